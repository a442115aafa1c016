#include "runtime/peers.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include "core/text.h"
#include "kernels/kernels.h"
#include "runtime/driver.h"
#include "runtime/gpus.h"
#include "runtime/switches.h"

namespace jax_ep {
namespace {

std::string Failed(const char* what, int64_t device, cudaError_t error) {
  return Text(what, " on GPU ", device, ": ", cudaGetErrorString(error));
}

// Lets the device reach the memory of those peers that belong to this process; others' is mapped for it.
std::string PreparePeers(int64_t device, const RankMemory* peers, int num_peers) {
  for (const RankMemory* peer = peers; peer != peers + num_peers; ++peer) {
    if (peer->device == device || peer->device < 0) continue;
    if (LinkBetween(device, peer->device) == Link::kNone) {
      return Text("GPU ", device, " (", GpuName(device), ") cannot access the memory of GPU ", peer->device,
                  " (", GpuName(peer->device),
                  "); the GPUs of a group need peer access (NVLink, or PCIe with peer-to-peer; never between "
                  "MIG instances): choose others, or implementation='xla'");
    }
    const cudaError_t error = cudaDeviceEnablePeerAccess(static_cast<int>(peer->device), 0);
    if (error != cudaSuccess && error != cudaErrorPeerAccessAlreadyEnabled) {
      return Failed("enabling peer access", device, error);
    }
    (void)cudaGetLastError();  // 'already enabled' would stay behind
    const Memory memory = DescribeMemory(peer->control, device);
    if (!memory.reachable) {
      return Text("JAX's memory on GPU ", peer->device, " (", memory.kind, ") is not accessible from GPU ",
                  device,
                  "; let JAX use its own allocator (unset XLA_PYTHON_CLIENT_ALLOCATOR), or "
                  "implementation='xla'");
    }
  }
  return "";
}

}  // namespace

// What must be done on each device of this process before its first op.
static std::string Prepare(const RankMemory& rank, const RankMemory* peers, int num_peers) {
  return OnDevice(rank.device, [&]() -> std::string {
    if (std::string text = PreparePeers(rank.device, peers, num_peers); !text.empty()) return text;
    for (auto preload : {cuda::PreloadLayout, cuda::PreloadDispatch, cuda::PreloadCombine,
                         cuda::PreloadPermute, cuda::PreloadGroupedDot, cuda::PreloadGather}) {
      const cudaError_t error = preload();
      if (error != cudaSuccess) return Failed("loading the kernels", rank.device, error);
    }
    return "";
  });
}

std::string DevicePeers::Make(const std::vector<RankMemory>& ranks, int num_ranks,
                              std::shared_ptr<DevicePeers>& peers) {
  if (num_ranks > kMaxRanks) {
    return Text("a group on GPUs of one host has at most ", kMaxRanks, " ranks, got ", num_ranks);
  }
  auto made = std::make_shared<DevicePeers>();
  made->ranks_ = ranks;
  made->num_ranks_ = num_ranks;
  made->regions_.resize(ranks.size());
  int64_t a_device = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i].device < 0) continue;
    a_device = ranks[i].device;
    const RankMemory* const group = &ranks[i / num_ranks * num_ranks];
    if (std::string text = Prepare(ranks[i], group, num_ranks); !text.empty()) return text;
    if (std::any_of(group, group + num_ranks, [](const RankMemory& rank) { return rank.device < 0; })) {
      made->regions_[i] = FindRegion(ranks[i].control, a_device);
    }
  }
  const cudaError_t error = OnDevice(a_device, [&] {
    return cudaHostAlloc(reinterpret_cast<void**>(&made->expired_), sizeof(Expired) * ranks.size(),
                         cudaHostAllocPortable | cudaHostAllocMapped);
  });
  if (error != cudaSuccess) return Failed("allocating host memory", a_device, error);
  if (std::string text = made->Reset(); !text.empty()) return text;
  peers = made;
  return "";
}

std::string DevicePeers::Reset() {
  std::memset(expired_, 0, sizeof(Expired) * ranks_.size());
  for (const RankMemory& rank : ranks_) {
    if (rank.device < 0) continue;
    const cudaError_t error = OnDevice(rank.device, [&] {
      const cudaError_t cleared = cudaMemset(reinterpret_cast<void*>(rank.control), 0, sizeof(Control));
      return cleared == cudaSuccess ? cudaDeviceSynchronize() : cleared;
    });
    if (error != cudaSuccess) return Failed("clearing the control block", rank.device, error);
  }
  return "";
}

std::string DevicePeers::ReasonAgainst(const Group::Place& place, const void* address) const {
  const Region& region = regions_[place.group * num_ranks_ + place.rank];
  const bool shared = region.bytes == 0 || region.Contains(reinterpret_cast<uint64_t>(address));
  if (shared || address == nullptr) return "";
  return "an array lies outside of the memory that the group's processes shared when it was made; let JAX "
         "allocate all of its memory at the start (XLA_PYTHON_CLIENT_PREALLOCATE=true, "
         "XLA_PYTHON_CLIENT_ALLOCATOR unset), or use implementation='xla'";
}

Peers DevicePeers::At(const Group::Place& place, double timeout_s) const {
  Peers peers{};
  const int first = place.group * num_ranks_;
  for (int r = 0; r < num_ranks_; ++r) {
    peers.control[r] = reinterpret_cast<Control*>(ranks_[first + r].control);
    peers.shift[r] = ranks_[first + r].shift;
  }
  peers.expired = &expired_[first + place.rank];
  peers.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  peers.stress_ns = static_cast<uint32_t>(StressNanoseconds());
  peers.rank = place.rank;
  peers.num_ranks = num_ranks_;
  return peers;
}

std::string DevicePeers::DescribeExpired(const std::string& group_name) const {
  static const char* const kOps[] = {"dispatch", "dispatch (cached)", "combine", "gather"};
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const volatile Expired& record = expired_[i];
    const Phase phase = static_cast<Phase>(record.phase);
    if (phase == Phase::kNone) continue;
    const char* op = kOps[record.op];
    if (phase == Phase::kRank) {
      return Text(op, ": group ", group_name, " was made for another mesh: GPU ", ranks_[i].device,
                  " runs as rank ", static_cast<int>(record.missing), ", but is rank ",
                  static_cast<int>(record.rank), " there; make the Group from the mesh of this shard_map");
    }
    std::string missing;
    for (int r = 0; r < num_ranks_; ++r) {
      if ((record.missing >> r & 1) != 0) missing += Text(' ', r);
    }
    return Text(op, ": of group ", group_name, ", rank(s)", missing, " did not ",
                phase == Phase::kEnter ? "arrive" : "finish", " in time: rank ",
                static_cast<int>(record.rank), " waited in the group's op ",
                static_cast<uint32_t>(record.epoch),
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

std::string OpenDeviceGroup(const std::string& key, const std::vector<RankMemory>& ranks, int num_ranks) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::shared_ptr<DevicePeers>& peers = registry.peers[key];
  return peers == nullptr ? DevicePeers::Make(ranks, num_ranks, peers) : "";
}

std::shared_ptr<DevicePeers> FindDevicePeers(const std::string& key) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto it = registry.peers.find(key);
  return it == registry.peers.end() ? nullptr : it->second;
}

}  // namespace jax_ep
