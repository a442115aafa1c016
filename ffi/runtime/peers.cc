#include "runtime/peers.h"

#include <cstring>
#include <map>
#include <mutex>

#include "core/text.h"
#include "kernels/kernels.h"
#include "runtime/gpus.h"
#include "runtime/switches.h"

namespace jax_ep {
namespace {

// Restores the current device, and leaves no error behind.
class DeviceGuard {
 public:
  DeviceGuard() { (void)cudaGetDevice(&device_); }
  ~DeviceGuard() {
    (void)cudaSetDevice(device_);
    (void)cudaGetLastError();
  }

 private:
  int device_ = 0;
};

std::string Failed(const char* what, int64_t device, cudaError_t error) {
  return Text(what, " on GPU ", device, ": ", cudaGetErrorString(error));
}

// Lets the device reach the memory of its peers. places[i] and samples[i] belong to one peer.
std::string PreparePeers(int64_t device, const std::vector<int64_t>& peers,
                         const std::vector<uint64_t>& samples) {
  for (size_t i = 0; i < peers.size(); ++i) {
    if (peers[i] == device) continue;
    if (LinkBetween(device, peers[i]) == Link::kNone) {
      return Text("GPU ", device, " (", GpuName(device), ") cannot access the memory of GPU ", peers[i], " (",
                  GpuName(peers[i]),
                  "); the GPUs of a group need peer access (NVLink, or PCIe with peer-to-peer; never between "
                  "MIG instances): choose others, or implementation='xla'");
    }
    const cudaError_t error = cudaDeviceEnablePeerAccess(static_cast<int>(peers[i]), 0);
    if (error != cudaSuccess && error != cudaErrorPeerAccessAlreadyEnabled) {
      return Failed("enabling peer access", device, error);
    }
    (void)cudaGetLastError();  // 'already enabled' would stay behind
    const Memory memory = DescribeMemory(samples[i], device);
    if (!memory.reachable) {
      return Text("JAX's memory on GPU ", peers[i], " (", memory.kind, ") is not accessible from GPU ",
                  device,
                  "; let JAX use its own allocator (unset XLA_PYTHON_CLIENT_ALLOCATOR), or "
                  "implementation='xla'");
    }
  }
  return "";
}

}  // namespace

std::string DevicePeers::Make(const std::vector<int64_t>& devices, const std::vector<uint64_t>& samples,
                              int num_ranks, std::shared_ptr<DevicePeers>& peers) {
  DeviceGuard guard;
  if (num_ranks > kMaxRanks) {
    return "a group on GPUs of one host has at most " + std::to_string(kMaxRanks) + " ranks, got " +
           std::to_string(num_ranks);
  }
  auto made = std::make_shared<DevicePeers>();
  made->devices_ = devices;
  made->num_ranks_ = num_ranks;
  cudaError_t error =
      cudaHostAlloc(reinterpret_cast<void**>(&made->expired_), sizeof(Expired) * devices.size(),
                    cudaHostAllocPortable | cudaHostAllocMapped);
  if (error != cudaSuccess) return Failed("allocating host memory", devices[0], error);
  std::memset(made->expired_, 0, sizeof(Expired) * devices.size());
  for (size_t i = 0; i < devices.size(); ++i) {
    const int64_t device = devices[i];
    const size_t first = i / num_ranks * num_ranks;
    if ((error = cudaSetDevice(static_cast<int>(device))) != cudaSuccess) {
      return Failed("selecting the device", device, error);
    }
    const std::vector<int64_t> group(devices.begin() + first, devices.begin() + first + num_ranks);
    const std::vector<uint64_t> theirs(samples.begin() + first, samples.begin() + first + num_ranks);
    if (std::string text = PreparePeers(device, group, theirs); !text.empty()) return text;
    for (auto preload : {cuda::PreloadLayout, cuda::PreloadDispatch, cuda::PreloadCombine,
                         cuda::PreloadPermute, cuda::PreloadGroupedDot}) {
      if ((error = preload()) != cudaSuccess) return Failed("loading the kernels", device, error);
    }
    Control* control = nullptr;
    if ((error = cudaMalloc(reinterpret_cast<void**>(&control), sizeof(Control))) != cudaSuccess) {
      return Failed("allocating the control block", device, error);
    }
    made->controls_.push_back(control);
  }
  if (std::string text = made->Reset(); !text.empty()) return text;
  peers = made;
  return "";
}

std::string DevicePeers::Reset() {
  DeviceGuard guard;
  std::memset(expired_, 0, sizeof(Expired) * devices_.size());
  for (size_t i = 0; i < devices_.size(); ++i) {
    cudaError_t error = cudaSetDevice(static_cast<int>(devices_[i]));
    if (error == cudaSuccess) error = cudaMemset(controls_[i], 0, sizeof(Control));
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    if (error != cudaSuccess) return Failed("clearing the control block", devices_[i], error);
  }
  return "";
}

Peers DevicePeers::At(const Group::Place& place, double timeout_s) const {
  Peers peers{};
  const int first = place.group * num_ranks_;
  for (int r = 0; r < num_ranks_; ++r) peers.control[r] = controls_[first + r];
  peers.expired = &expired_[first + place.rank];
  peers.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  peers.stress_ns = static_cast<uint32_t>(StressNanoseconds());
  peers.rank = place.rank;
  peers.num_ranks = num_ranks_;
  return peers;
}

std::string DevicePeers::DescribeExpired(const std::string& group_name) const {
  static const char* const kOps[] = {"dispatch", "dispatch (cached)", "combine"};
  for (size_t i = 0; i < devices_.size(); ++i) {
    const volatile Expired& record = expired_[i];
    const Phase phase = static_cast<Phase>(record.phase);
    if (phase == Phase::kNone) continue;
    const char* op = kOps[record.op];
    if (phase == Phase::kRank) {
      return Text(op, ": group ", group_name, " was made for another mesh: GPU ", devices_[i],
                  " runs as rank ", static_cast<int>(record.missing), ", but is rank ",
                  static_cast<int>(record.rank), " there; make the Group from the mesh of this shard_map");
    }
    std::string missing, seen;
    for (int r = 0; r < num_ranks_; ++r) {
      if ((record.missing >> r & 1) == 0) continue;
      missing += Text(' ', r);
      seen += Text(' ', static_cast<uint32_t>(record.seen_epoch[r]));
    }
    return Text(op, ": of group ", group_name, ", rank(s)", missing, " did not ",
                phase == Phase::kEnter ? "arrive" : "finish", " in time: rank ",
                static_cast<int>(record.rank), " waited for epoch ",
                static_cast<uint32_t>(record.expected_epoch), " and saw", seen,
                ". Every rank must reach the same ops in the same order; a rank that is only slow needs a "
                "larger Group(timeout_s=...). Make the Group anew to go on.");
  }
  return "";
}

namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<DevicePeers>> peers;
};

// Never destroyed, like the blocks it holds.
Registry& GetRegistry() {
  static Registry* const registry = new Registry;
  return *registry;
}

}  // namespace

std::string OpenDeviceGroup(const std::string& key, const std::vector<int64_t>& devices,
                            const std::vector<uint64_t>& samples, int num_ranks) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::shared_ptr<DevicePeers>& peers = registry.peers[key];
  if (peers == nullptr) return DevicePeers::Make(devices, samples, num_ranks, peers);
  return peers->DescribeExpired("").empty() ? "" : peers->Reset();
}

std::shared_ptr<DevicePeers> FindDevicePeers(const std::string& key) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto it = registry.peers.find(key);
  return it == registry.peers.end() ? nullptr : it->second;
}

}  // namespace jax_ep
