// A network for NCCL that is none, for tests: NCCL's proxy gives it the puts and signals of kernels, and they
// go through Unix sockets to another process of this host, which applies them late and in any order that NCCL
// allows. So the kernel that hops between hosts runs, with NCCL's own device code, where there is no RDMA.
//
//   g++ -std=c++17 -O2 -shared -fPIC -o librma_test.so tests/native/rma_plugin.cc -ldl
//   NCCL_RMA_PLUGIN=$PWD/librma_test.so NCCL_GIN_TYPE=2 ...
//
// RMA_TEST_DELAY_US=n: how late something may be applied at most (100). The functions are those of version 14
// of NCCL's interface for RMA plugins.
#include "rma_plugin.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <vector>

namespace {

constexpr int kConnectMs = 30'000;

// Memory that was registered, on all ranks in the same order.
struct Region {
  uint32_t number;
  char* data;
  size_t size;
  bool on_device;
};

struct Message {
  uint32_t region, signal_region;  // of the receiver
  uint64_t offset, size;           // of what follows
  uint64_t signal_offset, add;     // add 0: no signal
};

struct Pending {
  Message message;
  std::vector<char> bytes;
  uint64_t due;
};

struct Comm {
  std::mutex mutex;
  int ranks = 0, rank = 0;
  Device device;
  std::vector<int> sockets;
  std::vector<std::deque<char>> in, out;  // of each rank
  std::vector<Region*> regions;
  std::map<std::pair<uint32_t, uint64_t>, uint64_t> signals;  // what they are: nobody else writes them
  std::vector<Pending> pending;
  std::mt19937 random{std::random_device{}()};
  bool failed = false;
};

struct Listener {
  int socket;
};

uint64_t MostDelay() {
  static const char* const text = std::getenv("RMA_TEST_DELAY_US");
  return text == nullptr ? 100'000 : std::strtoull(text, nullptr, 10) * 1000;
}

sockaddr_un NameOf(const char* name, socklen_t* size) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path + 1, name, sizeof(address.sun_path) - 2);  // no file
  *size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + std::strlen(name));
  return address;
}

int Init(void** context, uint64_t, void*) {
  *context = nullptr;
  return GetDriver().ok() ? kSuccess : kSystemError;
}
int Devices(int* count) {
  *count = 1;
  return kSuccess;
}
int GetProperties(int device, Properties* properties) {
  *properties = {};
  properties->name = const_cast<char*>("rma_test");
  properties->guid = static_cast<uint64_t>(getpid());
  properties->ptr_support = kPtrHost | kPtrCuda;
  properties->speed = 10'000;
  properties->max_comms = 1024;
  properties->max_recvs = 1;
  properties->net_device_type = kGinProxy, properties->net_device_version = kGinProxyVersion;
  properties->devices.ndevs = 1;
  properties->devices.devs[0] = device;
  properties->max_p2p_bytes = properties->max_coll_bytes = size_t{1} << 40;
  properties->max_multi_request_size = 1;
  return kSuccess;
}

int Listen(void*, int, void* handle, void** listener) {
  static std::atomic<int> count{0};
  char name[64];
  std::snprintf(name, sizeof(name), "rma_test.%d.%d", getpid(), count++);
  socklen_t size = 0;
  const sockaddr_un address = NameOf(name, &size);
  const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (socket < 0 || bind(socket, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      listen(socket, 64) != 0) {
    return kSystemError;
  }
  std::memcpy(handle, name, sizeof(name));
  *listener = new Listener{socket};
  return kSuccess;
}

bool IsReady(int socket) {
  pollfd wanted{socket, POLLIN, 0};
  return poll(&wanted, 1, kConnectMs) == 1;
}

int Connect(void*, void* handles[], int ranks, int rank, void* listener, void** result) {
  auto* const comm = new Comm;
  comm->ranks = ranks, comm->rank = rank;
  comm->sockets.assign(ranks, -1);
  comm->in.resize(ranks), comm->out.resize(ranks);
  if (!comm->device.Open()) return kSystemError;
  for (int other = 0; other < rank; ++other) {
    socklen_t size = 0;
    const sockaddr_un address = NameOf(static_cast<const char*>(handles[other]), &size);
    const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(socket, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
        send(socket, &rank, sizeof(rank), MSG_NOSIGNAL) != sizeof(rank)) {
      return kSystemError;
    }
    comm->sockets[other] = socket;
  }
  for (int i = rank + 1; i < ranks; ++i) {
    const int waits = static_cast<Listener*>(listener)->socket;
    const int socket = IsReady(waits) ? accept4(waits, nullptr, nullptr, SOCK_CLOEXEC) : -1;
    int other = 0;
    if (socket < 0 || !IsReady(socket) || recv(socket, &other, sizeof(other), MSG_WAITALL) != sizeof(other) ||
        other <= rank || other >= ranks) {
      return kSystemError;
    }
    comm->sockets[other] = socket;
  }
  *result = comm;
  return kSuccess;
}

int CreateContext(void* comm, void*, void** context) {
  *context = comm;
  return kSuccess;
}

int Register(void* to, void* data, size_t size, int type, uint64_t, void** handle) {
  auto* const comm = static_cast<Comm*>(to);
  const std::lock_guard<std::mutex> lock(comm->mutex);
  comm->regions.push_back(new Region{static_cast<uint32_t>(comm->regions.size()), static_cast<char*>(data),
                                     size, type == kPtrCuda});
  *handle = comm->regions.back();
  return kSuccess;
}
int RegisterDmaBuf(void*, void*, size_t, int, uint64_t, int, uint64_t, void**) { return kInvalidArgument; }
int Deregister(void*, void*) { return kSuccess; }

int DestroyContext(void*) { return kSuccess; }
int CloseComm(void* closed) {
  auto* const comm = static_cast<Comm*>(closed);
  for (const int socket : comm->sockets) {
    if (socket >= 0) close(socket);
  }
  return kSuccess;  // the proxy's thread may still be in Progress
}
int CloseListener(void* listener) {
  close(static_cast<Listener*>(listener)->socket);
  delete static_cast<Listener*>(listener);
  return kSuccess;
}

void Append(std::deque<char>& to, const void* data, size_t size) {
  to.insert(to.end(), static_cast<const char*>(data), static_cast<const char*>(data) + size);
}

// The source is read at once, so a request is complete when it is made.
int PutSignal(void* context, int, uint64_t from, void* source, size_t size, uint64_t to, void* target,
              uint32_t rank, uint64_t signal_offset, void* signal, uint64_t value, uint32_t op, bool,
              void** request) {
  auto* const comm = static_cast<Comm*>(context);
  const std::lock_guard<std::mutex> lock(comm->mutex);
  Message message{};
  std::vector<char> bytes(size);
  if (size != 0) {
    const auto* const region = static_cast<Region*>(source);
    message.region = static_cast<Region*>(target)->number, message.offset = to, message.size = size;
    if (!region->on_device) {
      std::memcpy(bytes.data(), region->data + from, size);
    } else if (!comm->device.Read(bytes.data(), region->data + from, size)) {
      return kInternalError;
    }
  }
  if (signal != nullptr) {
    message.signal_region = static_cast<Region*>(signal)->number;
    message.signal_offset = signal_offset;
    message.add = op == kSignalInc ? 1 : value;
  }
  std::deque<char>& way = static_cast<int>(rank) == comm->rank ? comm->in[rank] : comm->out[rank];
  Append(way, &message, sizeof(message));
  Append(way, bytes.data(), bytes.size());
  *request = comm;
  return kSuccess;
}
int Put(void* context, int number, uint64_t from, void* source, size_t size, uint64_t to, void* target,
        uint32_t rank, void** request) {
  return PutSignal(context, number, from, source, size, to, target, rank, 0, nullptr, 0, 0, false, request);
}
int Get(void*, int, uint64_t, void*, size_t, uint64_t, void*, uint32_t, void**) { return kInvalidArgument; }
int Flush(void*, int, void*, uint32_t, void** request) {
  *request = nullptr;
  return kSuccess;
}
int Test(void*, void*, int* done) {
  *done = 1;
  return kSuccess;
}

void Exchange(Comm& comm, int rank) {
  const int socket = comm.sockets[rank];
  char piece[1 << 16];
  while (!comm.out[rank].empty()) {
    const size_t size = std::min(comm.out[rank].size(), sizeof(piece));
    std::copy_n(comm.out[rank].begin(), size, piece);
    const ssize_t sent = send(socket, piece, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent <= 0) break;
    comm.out[rank].erase(comm.out[rank].begin(), comm.out[rank].begin() + sent);
  }
  for (ssize_t came; (came = recv(socket, piece, sizeof(piece), MSG_DONTWAIT)) > 0;) {
    Append(comm.in[rank], piece, static_cast<size_t>(came));
  }
}

void TakeMessages(Comm& comm, std::deque<char>& in) {
  Message message;
  while (in.size() >= sizeof(message)) {
    std::copy_n(in.begin(), sizeof(message), reinterpret_cast<char*>(&message));
    if (in.size() < sizeof(message) + message.size) return;
    const auto first = in.begin() + sizeof(message), last = first + static_cast<ptrdiff_t>(message.size);
    comm.pending.push_back({message, {first, last}, Now() + comm.random() % (MostDelay() + 1)});
    in.erase(in.begin(), last);
  }
}

bool Apply(Comm& comm, const Pending& pending) {
  const Message& message = pending.message;
  char* const to = comm.regions[message.region]->data + message.offset;
  // What was put is there before its signal is.
  if (!comm.device.Write(to, pending.bytes.data(), message.size)) return false;
  if (message.add == 0) return true;
  const uint64_t value = comm.signals[{message.signal_region, message.signal_offset}] += message.add;
  char* const signal = comm.regions[message.signal_region]->data + message.signal_offset;
  return comm.device.Write(signal, &value, sizeof(value));
}

int Progress(void* context) {
  auto* const comm = static_cast<Comm*>(context);
  const std::lock_guard<std::mutex> lock(comm->mutex);
  if (comm->failed) return kInternalError;
  for (int rank = 0; rank < comm->ranks; ++rank) {
    if (rank != comm->rank) Exchange(*comm, rank);
    TakeMessages(*comm, comm->in[rank]);
  }
  const uint64_t now = Now();
  for (size_t i = 0; i < comm->pending.size();) {
    const Message& message = comm->pending[i].message;
    const bool known = std::max(message.region, message.signal_region) < comm->regions.size();
    if (comm->pending[i].due > now || !known) {
      ++i;
      continue;
    }
    if (!Apply(*comm, comm->pending[i])) comm->failed = true;
    comm->pending[i] = std::move(comm->pending.back());
    comm->pending.pop_back();
  }
  return kSuccess;
}

int QueryLastError(void* context, bool* failed) {
  *failed = static_cast<Comm*>(context)->failed;
  return kSuccess;
}
int Finalize(void*) { return kSuccess; }

struct Plugin {
  const char* name = "rma_test";
  decltype(&Init) init = Init;
  decltype(&Devices) devices = Devices;
  decltype(&GetProperties) get_properties = GetProperties;
  decltype(&Listen) listen = Listen;
  decltype(&Connect) connect = Connect;
  decltype(&CreateContext) create_context = CreateContext;
  decltype(&Register) register_memory = Register;
  decltype(&RegisterDmaBuf) register_dma_buf = RegisterDmaBuf;
  decltype(&Deregister) deregister = Deregister;
  decltype(&DestroyContext) destroy_context = DestroyContext;
  decltype(&CloseComm) close_comm = CloseComm;
  decltype(&CloseListener) close_listener = CloseListener;
  decltype(&Put) put = Put;
  decltype(&PutSignal) put_signal = PutSignal;
  decltype(&Get) get = Get;
  decltype(&Flush) flush = Flush;
  decltype(&Test) test = Test;
  decltype(&Progress) progress = Progress;
  decltype(&QueryLastError) query_last_error = QueryLastError;
  decltype(&Finalize) finalize = Finalize;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const Plugin ncclRmaPlugin_v14{};
