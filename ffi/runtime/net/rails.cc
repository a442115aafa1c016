#include "runtime/net/rails.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <future>
#include <map>
#include <mutex>
#include <stdexcept>

#include "core/text.h"
#include "runtime/gpu/peers.h"
#include "runtime/gpu/prepare.h"

namespace jax_ep {
namespace {

// What a track may have posted to a host that is not answered: pieces and credits for each slot, and its end.
constexpr int kMostPosted = 2 * kHopSlots + 1;
// A queue of NCCL's proxy holds so many to a host, whatever is asked for, unless the user says otherwise.
// There is one for each context. What has been answered leaves it a little later, and before that as much may
// be posted again.
constexpr int kLeastQueue = 32;
static_assert(2 * kMostPosted < kLeastQueue, "a track's posts have room, with a context of its own");
// In the network's own queues each may take several places.
constexpr int kQueueDepth = 4 * kLeastQueue;
// NCCL's proxy counts what was posted to a host in 32 bits, and waits for ever where they begin anew. A piece
// is two of these: itself and a credit.
constexpr uint64_t kMostProxyPieces = (uint64_t{1} << 31) - (1 << 20);

std::string Failed(const char* what, cudaError_t error) {
  (void)cudaGetLastError();
  return Text(what, ": ", cudaGetErrorString(error));
}

std::string Hexadecimal(const ncclUniqueId& id) {
  static const char* const kDigits = "0123456789abcdef";
  std::string text;
  for (const char c : id.internal) {
    const auto byte = static_cast<unsigned char>(c);
    text += kDigits[byte / 16];
    text += kDigits[byte % 16];
  }
  return text;
}

bool FromHexadecimal(const std::string& text, ncclUniqueId& id) {
  if (text.size() != 2 * sizeof(id.internal)) return false;
  for (size_t i = 0; i < sizeof(id.internal); ++i) {
    id.internal[i] = static_cast<char>(std::strtol(text.substr(2 * i, 2).c_str(), nullptr, 16));
  }
  return true;
}

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Rails>> begun, rails;
};

Registry& GetRegistry() {
  static Registry* const registry = new Registry;
  return *registry;
}

}  // namespace

std::string MakeRailId() {
  std::string reason;
  const Nccl* const nccl = FindNccl(reason);
  if (nccl == nullptr) throw std::runtime_error(reason);
  ncclUniqueId id{};
  const ncclResult_t result = nccl->GetUniqueId(&id);
  if (result != ncclSuccess) {
    throw std::runtime_error(Text("NCCL makes no id for a rail: ", nccl->GetErrorString(result)));
  }
  return Hexadecimal(id);
}

// In a thread for each device: what NCCL does for one of them may wait for the others.
template <typename F>
std::string Rails::OnAll(const char* what, F&& f) {
  std::vector<std::future<std::string>> ends;
  for (Rail& rail : rails_) {
    ends.push_back(std::async(std::launch::async, [&rail, &f]() -> std::string {
      const cudaError_t error = cudaSetDevice(static_cast<int>(rail.device));
      return error == cudaSuccess ? f(rail) : Failed("choosing it", error);
    }));
  }
  std::string all;
  for (size_t i = 0; i < ends.size(); ++i) {
    const std::string text = ends[i].get();
    if (!text.empty() && all.empty()) all = Text(what, " on GPU ", rails_[i].device, ": ", text);
  }
  return all;
}

std::string Rails::Connect(const std::vector<RailSeat>& seats, int num_hosts) {
  std::string reason;
  nccl_ = FindNccl(reason);
  if (nccl_ == nullptr) return reason;
  if (num_hosts > kMaxHosts) return Text("at most ", kMaxHosts, " hosts are joined so, got ", num_hosts);
  num_hosts_ = num_hosts;
  std::map<int64_t, ncclUniqueId> ids;
  for (const RailSeat& seat : seats) {
    Rail rail{};
    rail.device = seat.device;
    rail.hop.window = HopWindow::Of(num_hosts);
    rail.hop.host = seat.host;
    rails_.push_back(rail);
    if (!FromHexadecimal(seat.id, ids[seat.device])) return "the id of a rail is not one of NCCL's";
  }
  return OnAll("connecting hosts by NCCL", [&](Rail& rail) -> std::string {
    ncclResult_t result = nccl_->CommInitRank(&rail.comm, num_hosts_, ids.at(rail.device), rail.hop.host);
    if (result != ncclSuccess) return nccl_->GetErrorString(result);
    ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
    result = nccl_->CommQueryProperties(rail.comm, &properties);
    if (result != ncclSuccess) return nccl_->GetErrorString(result);
    if (!properties.deviceApiSupport) return "NCCL's device API does not run here (NCCL_DEBUG=INFO says why)";
    rail.connections =
        properties.ginType != NCCL_GIN_TYPE_NONE ? NCCL_GIN_CONNECTION_FULL : NCCL_GIN_CONNECTION_RAIL;
    // NCCL may have read it from a file of its own by now.
    const char* const queue = std::getenv("NCCL_GIN_PROXY_QUEUE_SIZE");
    const int64_t places = queue == nullptr ? kLeastQueue : std::strtoll(queue, nullptr, 0);
    if (0 <= places && places < kLeastQueue) {
      return Text("hops need NCCL_GIN_PROXY_QUEUE_SIZE to be ", kLeastQueue, " or more, or unset; it is ",
                  queue);
    }
    if (properties.ginType == NCCL_GIN_TYPE_NONE && properties.railedGinType == NCCL_GIN_TYPE_NONE) {
      return "NCCL's kernels reach no other host here: GIN needs an RDMA network that NCCL supports, or a "
             "plugin (NCCL_DEBUG=INFO says what it found)";
    }
    return "";
  });
}

std::string Rails::Allocate() {
  if (rails_.empty()) return "";
  auto* const reports = static_cast<HopReport*>(
      MappedHostMemory(rails_.front().device, static_cast<int64_t>(sizeof(HopReport) * rails_.size())));
  for (size_t i = 0; i < rails_.size(); ++i) rails_[i].hop.report = &reports[i];
  return OnAll("taking memory for a window", [&](Rail& rail) -> std::string {
    void* memory = nullptr;
    const ncclResult_t result = nccl_->MemAlloc(&memory, rail.window_bytes() + sizeof(HopState));
    if (result != ncclSuccess) return nccl_->GetErrorString(result);
    rail.hop.slots = static_cast<std::byte*>(memory);
    rail.hop.state = reinterpret_cast<HopState*>(rail.hop.slots + rail.window_bytes());
    cudaError_t error = cudaMemset(memory, 0, rail.window_bytes() + sizeof(HopState));
    if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamLegacy);
    if (error == cudaSuccess) error = cuda::PreloadHop();
    return error == cudaSuccess ? "" : Failed("clearing it", error);
  });
}

std::string Rails::Register() {
  return OnAll("making a window of NCCL's", [&](Rail& rail) -> std::string {
    std::string text =
        Collective(rail, nccl_->CommWindowRegister(rail.comm, rail.hop.slots, rail.window_bytes(),
                                                   &rail.gin.window, NCCL_WIN_COLL_SYMMETRIC));
    if (!text.empty()) return text;
    return rail.gin.window == nullptr ? "NCCL makes none of its own memory" : "";
  });
}

std::string Rails::Join() {
  return OnAll("making a communicator for kernels", [&](Rail& rail) -> std::string {
    ncclDevCommRequirements_t needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    needs.ginConnectionType = rail.connections;
    needs.ginContextCount = rail.hop.window.tracks;
    needs.ginSignalCount = rail.hop.window.num_signals();
    needs.ginQueueDepth = kQueueDepth;
    needs.ginStrongSignalsRequired = false;
    needs.ginVaSignalsRequired = false;
    std::string text = Collective(rail, nccl_->DevCommCreate(rail.comm, &needs, &rail.gin.comm));
    return text.empty() ? WhyNotBy(rail) : text;
  });
}

std::string Rails::Try(double trial_s) {
  return OnAll("trying a hop", [&](Rail& rail) -> std::string {
    rail.hop.report->trial_ns = static_cast<uint64_t>(trial_s * 1e9);
    rail.hop.timeout_ns = &rail.hop.report->trial_ns;
    return Try(rail);
  });
}

// NCCL's calls that all ranks of a rail make wait for each other. Who fails of one ends the waits of the
// others.
std::string Rails::Collective(Rail& rail, ncclResult_t result) {
  if (result == ncclSuccess) return "";
  (void)nccl_->CommAbort(rail.comm);
  rail.comm = nullptr;
  return nccl_->GetErrorString(result);
}

// What hops need of the communicator, or why they cannot go by it.
std::string Rails::WhyNotBy(Rail& rail) {
  if (static_cast<int>(rail.gin.comm.ginContextCount) < kHopTracks) {
    return Text("NCCL gives ", rail.gin.comm.ginContextCount, " contexts to post to, and hops need ",
                kHopTracks, ", or they might wait for room in a queue");
  }
  rail.hop.most_pieces = UINT64_MAX;
  for (int i = 0; i < rail.gin.comm.ginConnectionCount; ++i) {
    const int type = rail.gin.comm.ginNetDeviceTypes[i];
    // The kernels were compiled for these, and what they do with others is undefined.
    if (type != NCCL_NET_DEVICE_GIN_PROXY && type != NCCL_NET_DEVICE_GIN_GDAKI &&
        type != NCCL_NET_DEVICE_GIN_GPI) {
      return Text("NCCL has a network of a kind that its version ", NcclVersionText(kLeastNccl),
                  ", with whose headers this extension was built, does not know (", type, ")");
    }
    if (type == NCCL_NET_DEVICE_GIN_PROXY) rail.hop.most_pieces = kMostProxyPieces;
  }
  // NCCL's rails join the ranks of one index among those that load from each other's memory.
  if (rail.connections == NCCL_GIN_CONNECTION_RAIL && rail.gin.comm.lsaSize != 1) {
    return "NCCL takes some of the hosts for one, and its network does not join all of its ranks";
  }
  return "";
}

// A few hops of known bytes, so many that each slot is used twice. What a network does not carry as it should
// shows before anybody relies on it.
std::string Rails::Try(const Rail& rail) {
  constexpr int kHops = 2 * kHopSlots;
  const int hosts = rail.hop.window.hosts;
  // One piece for each track, the last of them a short one.
  const int64_t block = rail.hop.window.tracks * rail.hop.window.piece_bytes - 20, bytes = block * hosts;
  std::byte* device = nullptr;
  cudaStream_t stream = nullptr;
  const auto give_back = [&] {
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
    (void)cudaFree(device);
  };
  cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&device), static_cast<size_t>(2 * bytes + 16));
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  HopParams hop = rail.hop;
  hop.in = device, hop.out = device + bytes, hop.block_bytes = block;
  auto* const place = reinterpret_cast<MeshPlace*>(device + AlignUp(2 * bytes, alignof(MeshPlace)));
  hop.place_operand = place;
  const MeshPlace found{rail.hop.host, 0};
  std::vector<unsigned char> sent(bytes), came(bytes);
  const auto copy = [&](void* to, const void* from, size_t size, cudaMemcpyKind kind) {
    if (error == cudaSuccess) error = cudaMemcpyAsync(to, from, size, kind, stream);
  };
  const auto byte_of = [](int n, int from, int to, int64_t at) {
    return static_cast<unsigned char>(at * 31 + at / 251 + 7 * n + 101 * from + 57 * to);
  };
  copy(place, &found, sizeof(found), cudaMemcpyHostToDevice);
  bool right = true;
  for (int n = 0; n < kHops && right && error == cudaSuccess; ++n) {
    for (int64_t i = 0; i < bytes; ++i) {
      sent[i] = byte_of(n, hop.host, static_cast<int>(i / block), i % block);
    }
    hop.call = static_cast<uint32_t>(n) + 1;
    copy(device, sent.data(), sent.size(), cudaMemcpyHostToDevice);
    if (error == cudaSuccess) error = cuda::LaunchHop(hop, rail.gin, stream);
    // Before the copy: one to this memory waits in the driver, where it may hold up what brings the rows.
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    copy(came.data(), device + bytes, came.size(), cudaMemcpyDeviceToHost);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    for (int64_t i = 0; i < bytes && right && error == cudaSuccess; ++i) {
      right = came[i] == byte_of(n, static_cast<int>(i / block), hop.host, i % block);
    }
  }
  give_back();
  if (error != cudaSuccess) return Failed("running it", error);
  if (const std::string text = WhyFailed(); !text.empty()) return text;
  return right ? "" : "it brought other bytes than were sent";
}

void Rails::Drop() {
  (void)OnAll("disconnecting hosts", [&](Rail& rail) -> std::string {
    if (rail.gin.window != nullptr) return "";
    if (rail.comm != nullptr) (void)nccl_->CommDestroy(rail.comm);
    if (rail.hop.slots != nullptr) (void)nccl_->MemFree(rail.hop.slots);
    return "";
  });
}

const Rails::Rail* Rails::Find(int64_t device) const {
  for (const Rail& rail : rails_) {
    if (rail.device == device) return &rail;
  }
  return nullptr;
}

std::string Rails::WhyFailed() const {
  for (const Rail& rail : rails_) {
    const HopReason reason{__atomic_load_n(&rail.hop.report->reason, __ATOMIC_ACQUIRE)};
    if (reason.word != 0) return WhyOf(reason);
  }
  return "";
}

std::shared_ptr<Rails> BeginRails(const std::string& key) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  return registry.begun[key] = std::make_shared<Rails>();
}

std::shared_ptr<Rails> FindBegunRails(const std::string& key) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  return registry.begun.at(key);
}

void PublishRails(const std::string& key) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.rails[key] = registry.begun.at(key);
}

std::shared_ptr<Rails> FindRails(const std::string& key) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  const auto it = registry.rails.find(key);
  return it == registry.rails.end() ? nullptr : it->second;
}

}  // namespace jax_ep
