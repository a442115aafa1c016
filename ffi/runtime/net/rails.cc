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

// Largest number of unanswered posts of a track to a domain: a piece and a credit for each slot, and the end
// signal.
constexpr int kMaxPosted = 2 * kHopSlots + 1;
// Number of posts to a domain that a queue of NCCL's proxy holds by default, whatever depth is requested.
// Each context has its own queue. A post leaves the queue a little after its answer, and by then as many may
// be posted again.
constexpr int kMinQueue = 32;
static_assert(2 * kMaxPosted < kMinQueue, "a track's posts fit into the queue of its own context");
// Requested depth: a post may take several entries in the network's own queues.
constexpr int kQueueDepth = 4 * kMinQueue;
// NCCL's proxy counts posts to a domain in 32 bits and waits forever when the count wraps around. A piece
// takes two posts: itself and a credit.
constexpr uint64_t kMaxProxyPieces = (uint64_t{1} << 31) - (1 << 20);

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
    throw std::runtime_error(Text("NCCL failed to make an id for a rail: ", nccl->GetErrorString(result)));
  }
  return Hexadecimal(id);
}

// Calls f in one thread per device, because NCCL calls for one device may wait for the others.
template <typename F>
std::string Rails::ForEachRail(const char* what, F&& f) {
  std::vector<std::future<std::string>> results;
  for (Rail& rail : rails_) {
    results.push_back(std::async(std::launch::async, [&rail, &f]() -> std::string {
      const cudaError_t error = cudaSetDevice(static_cast<int>(rail.device));
      return error == cudaSuccess ? f(rail) : Failed("selecting it", error);
    }));
  }
  std::string first_error;
  for (size_t i = 0; i < results.size(); ++i) {
    const std::string text = results[i].get();
    if (!text.empty() && first_error.empty()) {
      first_error = Text(what, " on GPU ", rails_[i].device, ": ", text);
    }
  }
  return first_error;
}

std::string Rails::Connect(const std::vector<RailDevice>& devices, int num_domains) {
  std::string reason;
  nccl_ = FindNccl(reason);
  if (nccl_ == nullptr) return reason;
  if (num_domains > kMaxDomains) {
    return Text("at most ", kMaxDomains, " domains can be connected by NCCL, got ", num_domains);
  }
  num_domains_ = num_domains;
  std::map<int64_t, ncclUniqueId> ids;
  for (const RailDevice& entry : devices) {
    Rail rail{};
    rail.device = entry.device;
    rail.hop.window = HopWindow::Of(num_domains);
    rail.hop.domain = entry.domain;
    rails_.push_back(rail);
    if (!FromHexadecimal(entry.id, ids[entry.device])) return "the id of a rail is not an NCCL id";
  }
  return ForEachRail("connecting domains by NCCL", [&](Rail& rail) -> std::string {
    ncclResult_t result = nccl_->CommInitRank(&rail.comm, num_domains_, ids.at(rail.device), rail.hop.domain);
    if (result != ncclSuccess) return nccl_->GetErrorString(result);
    ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
    result = nccl_->CommQueryProperties(rail.comm, &properties);
    if (result != ncclSuccess) return nccl_->GetErrorString(result);
    if (!properties.deviceApiSupport) return "NCCL's device API does not run here (NCCL_DEBUG=INFO says why)";
    rail.connections =
        properties.ginType != NCCL_GIN_TYPE_NONE ? NCCL_GIN_CONNECTION_FULL : NCCL_GIN_CONNECTION_RAIL;
    // Read here, because NCCL may have set it from its configuration file by now.
    const char* const queue = std::getenv("NCCL_GIN_PROXY_QUEUE_SIZE");
    const int64_t queue_size = queue == nullptr ? kMinQueue : std::strtoll(queue, nullptr, 0);
    if (0 <= queue_size && queue_size < kMinQueue) {
      return Text("hops need NCCL_GIN_PROXY_QUEUE_SIZE to be ", kMinQueue, " or more, or unset; it is ",
                  queue);
    }
    if (properties.ginType == NCCL_GIN_TYPE_NONE && properties.railedGinType == NCCL_GIN_TYPE_NONE) {
      return "NCCL's kernels reach no other domain here: GIN needs an RDMA network that NCCL supports, or a "
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
  return ForEachRail("allocating a window", [&](Rail& rail) -> std::string {
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
  return ForEachRail("registering a window with NCCL", [&](Rail& rail) -> std::string {
    std::string text =
        CheckCollective(rail, nccl_->CommWindowRegister(rail.comm, rail.hop.slots, rail.window_bytes(),
                                                        &rail.gin.window, NCCL_WIN_COLL_SYMMETRIC));
    if (!text.empty()) return text;
    return rail.gin.window == nullptr ? "NCCL returned no window" : "";
  });
}

std::string Rails::Join() {
  return ForEachRail("creating a communicator for kernels", [&](Rail& rail) -> std::string {
    ncclDevCommRequirements_t needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    needs.ginConnectionType = rail.connections;
    needs.ginContextCount = rail.hop.window.tracks;
    needs.ginSignalCount = rail.hop.window.num_signals();
    needs.ginQueueDepth = kQueueDepth;
    needs.ginStrongSignalsRequired = false;
    needs.ginVaSignalsRequired = false;
    std::string text = CheckCollective(rail, nccl_->DevCommCreate(rail.comm, &needs, &rail.gin.comm));
    return text.empty() ? CheckCapabilities(rail) : text;
  });
}

std::string Rails::RunTrial(double trial_s) {
  return ForEachRail("trying a hop", [&](Rail& rail) -> std::string {
    rail.hop.report->trial_ns = static_cast<uint64_t>(trial_s * 1e9);
    rail.hop.timeout_ns = &rail.hop.report->trial_ns;
    return RunTrialHops(rail);
  });
}

// NCCL calls of all ranks of a rail wait for each other. The abort of a rank that fails ends the waits of the
// others.
std::string Rails::CheckCollective(Rail& rail, ncclResult_t result) {
  if (result == ncclSuccess) return "";
  (void)nccl_->CommAbort(rail.comm);
  rail.comm = nullptr;
  return nccl_->GetErrorString(result);
}

// Checks that hops can use the communicator. Returns an error, empty if they can.
std::string Rails::CheckCapabilities(Rail& rail) {
  if (static_cast<int>(rail.gin.comm.ginContextCount) < kHopTracks) {
    return Text("NCCL gives ", rail.gin.comm.ginContextCount, " contexts to post to, and hops need ",
                kHopTracks, ", because they could wait for room in a queue otherwise");
  }
  rail.hop.max_pieces = UINT64_MAX;
  for (int i = 0; i < rail.gin.comm.ginConnectionCount; ++i) {
    const int type = rail.gin.comm.ginNetDeviceTypes[i];
    // The kernels were compiled for these types. Their behavior with others is undefined.
    if (type != NCCL_NET_DEVICE_GIN_PROXY && type != NCCL_NET_DEVICE_GIN_GDAKI &&
        type != NCCL_NET_DEVICE_GIN_GPI) {
      return Text("NCCL has a network of type ", type, ", which NCCL ", NcclVersionText(kMinNcclVersion),
                  " does not support. This extension was built with the headers of that version");
    }
    if (type == NCCL_NET_DEVICE_GIN_PROXY) rail.hop.max_pieces = kMaxProxyPieces;
  }
  // NCCL's own rails connect ranks with the same index within their load/store domains.
  if (rail.connections == NCCL_GIN_CONNECTION_RAIL && rail.gin.comm.lsaSize != 1) {
    return "NCCL treats several domains as one, and its network does not connect all ranks";
  }
  return "";
}

// Runs hops of known bytes, enough to use each slot twice. So a network that delivers wrong bytes is found
// before an op relies on it.
std::string Rails::RunTrialHops(const Rail& rail) {
  constexpr int kHops = 2 * kHopSlots;
  const int domains = rail.hop.window.domains;
  // One piece for each track. The last piece is short.
  const int64_t block = rail.hop.window.tracks * rail.hop.window.piece_bytes - 20, bytes = block * domains;
  std::byte* device = nullptr;
  cudaStream_t stream = nullptr;
  const auto release = [&] {
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
    (void)cudaFree(device);
  };
  cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&device), static_cast<size_t>(2 * bytes + 16));
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  HopParams hop = rail.hop;
  hop.in = device, hop.out = device + bytes, hop.block_bytes = block;
  auto* const place = reinterpret_cast<MeshPosition*>(device + AlignUp(2 * bytes, alignof(MeshPosition)));
  hop.position_operand = place;
  const MeshPosition own_place{rail.hop.domain, 0};
  std::vector<unsigned char> sent(bytes), received(bytes);
  const auto copy = [&](void* to, const void* from, size_t size, cudaMemcpyKind kind) {
    if (error == cudaSuccess) error = cudaMemcpyAsync(to, from, size, kind, stream);
  };
  const auto expected_byte = [](int n, int from, int to, int64_t at) {
    return static_cast<unsigned char>(at * 31 + at / 251 + 7 * n + 101 * from + 57 * to);
  };
  copy(place, &own_place, sizeof(own_place), cudaMemcpyHostToDevice);
  bool is_correct = true;
  for (int n = 0; n < kHops && is_correct && error == cudaSuccess; ++n) {
    for (int64_t i = 0; i < bytes; ++i) {
      sent[i] = expected_byte(n, hop.domain, static_cast<int>(i / block), i % block);
    }
    hop.call = static_cast<uint32_t>(n) + 1;
    copy(device, sent.data(), sent.size(), cudaMemcpyHostToDevice);
    if (error == cudaSuccess) error = cuda::LaunchHop(hop, rail.gin, stream);
    // Synchronize before the copy: a copy to pageable memory waits in the driver, where it could block the
    // delivery of rows.
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    copy(received.data(), device + bytes, received.size(), cudaMemcpyDeviceToHost);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    for (int64_t i = 0; i < bytes && is_correct && error == cudaSuccess; ++i) {
      is_correct = received[i] == expected_byte(n, static_cast<int>(i / block), hop.domain, i % block);
    }
  }
  release();
  if (error != cudaSuccess) return Failed("running it", error);
  if (const std::string text = DescribeFailure(); !text.empty()) return text;
  return is_correct ? "" : "it brought other bytes than were sent";
}

void Rails::Drop() {
  (void)ForEachRail("disconnecting domains", [&](Rail& rail) -> std::string {
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

std::string Rails::DescribeFailure() const {
  for (const Rail& rail : rails_) {
    const HopReason reason{__atomic_load_n(&rail.hop.report->reason, __ATOMIC_ACQUIRE)};
    if (reason.word != 0) return DescribeReason(reason);
  }
  return "";
}

std::shared_ptr<Rails> BeginRails(const std::string& key) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  return registry.begun[key] = std::make_shared<Rails>();
}

std::shared_ptr<Rails> FindPendingRails(const std::string& key) {
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
