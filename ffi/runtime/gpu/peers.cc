#include "runtime/gpu/peers.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <set>
#include <stdexcept>

#include "core/text.h"
#include "runtime/gpu/driver.h"
#include "runtime/gpu/prepare.h"
#include "runtime/processes.h"
#include "runtime/switches.h"

namespace jax_ep {

std::string DevicePeers::Make(const std::string& key, const std::vector<RankMemory>& ranks, int num_ranks,
                              std::shared_ptr<DevicePeers>& peers) {
  if (num_ranks > kMaxRanks) {
    return Text("a group on GPUs of one domain has at most ", kMaxRanks, " ranks, got ", num_ranks);
  }
  auto created = std::make_shared<DevicePeers>();
  created->ranks_ = ranks;
  created->num_ranks_ = num_ranks;
  created->regions_.resize(ranks.size());
  std::set<int> processes;
  for (const RankMemory& rank : ranks) {
    if (rank.device < 0 && rank.control != 0) processes.insert(rank.process);
  }
  created->host_meeting_ = std::make_unique<HostMeeting>(
      key, static_cast<int>(ranks.size()), std::vector<int>(processes.begin(), processes.end()));
  int64_t last_device = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i].device < 0) continue;
    last_device = ranks[i].device;
    std::vector<int64_t> devices;
    std::vector<uint64_t> addresses;
    for (int r = created->first_of(i); r < created->first_of(i) + num_ranks; ++r) {
      devices.push_back(ranks[r].device);
      addresses.push_back(ranks[r].control);
    }
    if (std::string text = PrepareDevice(last_device, devices, addresses); !text.empty()) return text;
    if (std::count(devices.begin(), devices.end(), -1) != 0) {
      created->regions_[i] = FindRegion(ranks[i].control, last_device);
    }
  }
  created->reports_ = static_cast<Report*>(MappedHostMemory(last_device, sizeof(Report) * ranks.size()));
  OnTick([created] { created->Tick(); });
  peers = created;
  return "";
}

std::string DevicePeers::Reset(uint32_t epoch, uint32_t calls) {
  // All devices end their ops before the first control block is cleared, and all blocks are clear before the
  // first op begins.
  const auto on_all_devices = [&](const char* what, auto&& f) -> std::string {
    for (const RankMemory& rank : ranks_) {
      if (rank.device < 0) continue;
      const cudaError_t error = OnDevice(rank.device, [&] { return f(rank); });
      if (error != cudaSuccess) {
        return Text(what, " on GPU ", rank.device, ": ", cudaGetErrorString(error),
                    ". Only a new process can use a GPU again that was stopped or has failed");
      }
    }
    return "";
  };
  auto fresh = std::make_unique<Control>();
  if (epoch == UINT32_MAX) epoch = 1;  // the next one would be 0, which stands for no epoch
  for (Channel& channel : fresh->channels) {
    channel.epoch = epoch;
    channel.gate = channel.opened = static_cast<uint64_t>(epoch) << 32;
  }
  // The mailboxes and lines of earlier ops are cleared, because epochs may begin again. No op is in progress,
  // so every rank may write to the arenas of the others.
  auto fresh_arena = std::make_unique<Arena>();
  std::fill_n(fresh_arena->heard, kMaxRanks, epoch);
  std::fill_n(fresh_arena->begun, kMaxRanks, epoch);
  const int64_t arena = ArenaOffset(num_ranks_), slots = arena + SlotsOffset(num_ranks_);
  const int64_t lines = arena + LinesOffset(num_ranks_), end = GroupBytes(num_ranks_);
  std::string text = on_all_devices("waiting for the group's ops",
                                    [](const RankMemory&) { return cudaDeviceSynchronize(); });
  if (text.empty()) {
    text = on_all_devices("clearing the control block", [&](const RankMemory& rank) {
      const auto at = [&](int64_t offset) { return reinterpret_cast<void*>(rank.control + offset); };
      for (const cudaError_t error :
           {cudaMemset(at(0), 0, slots), cudaMemset(at(lines), 0, end - lines),
            cudaMemcpy(at(0), fresh.get(), sizeof(Control), cudaMemcpyHostToDevice),
            cudaMemcpy(at(arena), fresh_arena.get(), sizeof(Arena), cudaMemcpyHostToDevice)}) {
        if (error != cudaSuccess) return error;
      }
      return cudaDeviceSynchronize();
    });
  }
  if (!text.empty()) return text;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i].device < 0) continue;
    reports_[i].phase = 0;
    reports_[i].left_out = 0;
  }
  host_meeting_->Reset(calls);
  return "";
}

uint32_t DevicePeers::LastEpoch() const {
  uint32_t last = 0;
  for (const RankMemory& rank : ranks_) {
    if (rank.device < 0) continue;
    OnDevice(rank.device, [&] {
      const auto* control = reinterpret_cast<const Control*>(rank.control);
      for (const Channel& channel : control->channels) {
        uint32_t epoch = 0;
        (void)cudaMemcpy(&epoch, &channel.epoch, sizeof(epoch), cudaMemcpyDeviceToHost);
        last = std::max(last, epoch);
      }
      return cudaSuccess;
    });
  }
  return last;
}

uint32_t DevicePeers::LastCall() const { return host_meeting_->LastCall(0, static_cast<int>(ranks_.size())); }

std::string DevicePeers::CheckReachable(const Group::Position& position, const void* address) const {
  const Region& region = regions_[position.group_index * num_ranks_ + position.rank];
  const bool shared = region.bytes == 0 || region.Contains(reinterpret_cast<uint64_t>(address));
  if (shared || address == nullptr) return "";
  return "an array lies outside the memory that the group's processes shared when it was made; let JAX "
         "allocate all of its memory at the start (XLA_PYTHON_CLIENT_PREALLOCATE=true, "
         "XLA_PYTHON_CLIENT_ALLOCATOR unset), or use implementation='xla'";
}

Peers DevicePeers::MakePeers(const Group::Position& position, const Call& call, bool through_arena) const {
  Peers peers{};
  const int first = position.group_index * num_ranks_;
  peers.call = call;
  peers.channel_number = through_arena ? kArenaChannel : static_cast<int32_t>(call.site % kChannels);
  for (int r = 0; r < num_ranks_; ++r) {
    auto* control = reinterpret_cast<Control*>(ranks_[first + r].control);
    peers.channel[r] = &control->channels[peers.channel_number];
    peers.shift[r] = ranks_[first + r].shift;
  }
  peers.report = &reports_[first + position.rank];
  peers.stress_ns = static_cast<uint32_t>(StressNanoseconds());
  peers.rank = position.rank;
  peers.num_ranks = num_ranks_;
  peers.arena_offset = ArenaOffsetFromChannel(num_ranks_);
  return peers;
}

void DevicePeers::Configure(const std::string& name, double timeout_s) {
  for (size_t i = 0; i < ranks_.size(); ++i) reports_[i].timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  std::lock_guard<std::mutex> lock(mutex_);
  name_ = name;
}

void DevicePeers::Stall(int rank_index, Phase phase, double seconds) {
  reports_[rank_index].stall_ns[phase == Phase::kEnter ? 0 : 1] = static_cast<uint64_t>(seconds * 1e9);
}

uint32_t DevicePeers::RegisterCall(const std::string& description) {
  uint32_t hash = 2166136261u;  // FNV-1a
  for (const char c : description) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  std::lock_guard<std::mutex> lock(mutex_);
  calls_[hash] = description;
  return hash;
}

HostMeeting::Hooks DevicePeers::HooksFor(int group) const {
  return {[this](uint64_t hash) {
            std::lock_guard<std::mutex> lock(mutex_);
            const auto it = calls_.find(static_cast<uint32_t>(hash));
            return it == calls_.end() ? std::string() : it->second;
          },
          [this, group](int rank) {
            const RankMemory& memory = ranks_[group * num_ranks_ + rank];
            return memory.device < 0 && HasProcessEnded(memory.process);
          },
          [this, group](int rank) {
            const RankMemory& memory = ranks_[group * num_ranks_ + rank];
            return memory.device < 0 ? WhyProcessIsLost(memory.process) : std::string();
          },
          [this] { return DescribeFailure(); }};
}

void DevicePeers::Tick() {
  const auto now = std::chrono::steady_clock::now();
  bool has_failed = false;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i].device < 0) continue;
    RankSet ended{};
    for (int r = 0; r < num_ranks_; ++r) {
      const RankMemory& peer = ranks_[first_of(i) + r];
      if (peer.device < 0 && HasProcessEnded(peer.process)) ended.Add(RankBits::Of(r));
    }
    for (int word = 0; word < kMaxRanks / kRankBits; ++word) {
      __atomic_store_n(&reports_[i].gone.words[word], ended.words[word], __ATOMIC_RELEASE);
    }
    const auto phase = static_cast<Phase>(__atomic_load_n(&reports_[i].phase, __ATOMIC_ACQUIRE));
    has_failed |= phase != Phase::kNone;
    if (phase != Phase::kStuck) continue;
    if (!reported_at_) {
      reported_at_ = now;
      std::fprintf(stderr, "jax_ep: %s\n", Describe(reports_[i], static_cast<int>(i)).c_str());
    } else if (now - *reported_at_ > std::chrono::seconds(kEndsAfterSeconds)) {
      std::fprintf(stderr, "jax_ep: ends this process %d seconds after its GPU was stopped\n",
                   kEndsAfterSeconds);
      std::_Exit(1);
    }
  }
  if (!has_failed) {
    failed_at_.reset();
    has_printed_failure_ = false;
  } else if (!failed_at_) {
    failed_at_ = now;
  } else if (!has_printed_failure_ && !reported_at_ && now - *failed_at_ > kCauseDelay) {
    const std::string text = DescribeFailure();  // empty if the group has just been reset
    if (!text.empty()) std::fprintf(stderr, "jax_ep: %s\n", text.c_str());
    has_printed_failure_ = !text.empty();
  }
}

namespace {

struct MakeResult {
  std::shared_ptr<DevicePeers> peers;
  std::string error;
};

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_future<MakeResult>> groups;
};

// Never destroyed, like the control blocks in it.
Registry& GetRegistry() {
  static Registry* const registry = new Registry;
  return *registry;
}

}  // namespace

// Makes the group outside the lock, because that takes locks of the driver, and a handler that holds one may
// wait here for the registry.
std::string OpenDeviceGroup(const std::string& key, const std::vector<RankMemory>& ranks, int num_ranks) {
  Registry& registry = GetRegistry();
  std::promise<MakeResult> promise;
  std::shared_future<MakeResult> future;
  {
    std::lock_guard<std::mutex> lock(registry.mutex);
    const auto it = registry.groups.find(key);
    if (it != registry.groups.end()) {
      future = it->second;
    } else {
      registry.groups.emplace(key, promise.get_future().share());
    }
  }
  if (future.valid()) return future.get().error;
  MakeResult result;
  try {
    result.error = DevicePeers::Make(key, ranks, num_ranks, result.peers);
  } catch (const std::exception& error) {
    result.error = error.what();
  }
  if (!result.error.empty()) {
    std::lock_guard<std::mutex> lock(registry.mutex);
    registry.groups.erase(key);  // a later call may try again
  }
  promise.set_value(result);
  return result.error;
}

std::shared_ptr<DevicePeers> FindDevicePeers(const std::string& key) {
  Registry& registry = GetRegistry();
  std::shared_future<MakeResult> future;
  {
    std::lock_guard<std::mutex> lock(registry.mutex);
    const auto it = registry.groups.find(key);
    if (it == registry.groups.end()) return nullptr;
    future = it->second;
  }
  const bool ready = future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  return ready ? future.get().peers : nullptr;
}

}  // namespace jax_ep
