// The device side of a group on GPUs.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kernels/hop/window.h"
#include "kernels/protocol/arena.h"
#include "runtime/gpu/host_meeting.h"
#include "runtime/gpu/regions.h"
#include "runtime/groups.h"

namespace jax_ep {

// Seconds that a process lives on after one of its GPUs was stopped.
constexpr int kEndsAfterSeconds = 30;

// Location of the memory of one rank.
struct RankMemory {
  int64_t device;    // its ordinal; -1: the rank belongs to another process
  uint64_t control;  // address of its control block in this process; 0: this process shares no group with it
  int64_t shift;     // add it to an address that the rank publishes to get the address in this process
  int process;
};

// Control blocks of a group and its reports of failed ops. They live as long as the process, because a
// captured graph may hold their addresses. A later group of the same devices uses them again.
class DevicePeers {
 public:
  // Checks that every device of this process reaches its peers' memory, and loads all kernels on it. `ranks`
  // holds the ranks of one group after another. Returns an error, empty on success.
  static std::string Make(const std::string& key, const std::vector<RankMemory>& ranks, int num_ranks,
                          std::shared_ptr<DevicePeers>& peers);

  // Returns the arguments that the kernels of a rank take.
  Peers MakePeers(const Group::Position& position, const Call& call, bool through_arena) const;

  // Returns an error if peers in other processes cannot reach an address of a rank, empty if they can.
  std::string CheckReachable(const Group::Position& position, const void* address) const;

  // Returns the most specific error among the ops that failed, empty if none failed.
  std::string DescribeFailure() const;
  bool HasFailed() const;

  // Sets the group's name for errors and the time-out of an op, also for graphs that were captured before.
  void Configure(const std::string& name, double timeout_s);

  // Returns a hash of an op and its shapes, and stores the text for errors. The hash is the same in every
  // process.
  uint32_t RegisterCall(const std::string& description);
  HostMeeting& host_meeting() const { return *host_meeting_; }
  // Returns the hooks by which a meeting on the host describes the errors of one of the groups.
  HostMeeting::Hooks HooksFor(int group) const;

  // Return the last epoch and the last number of a call site of any rank of this process.
  uint32_t LastEpoch() const;
  uint32_t LastCall() const;
  // Makes the group usable after a failure: clears the control blocks and reports of this process. The next
  // op of each channel has the epoch after `epoch`. `calls` is the last number of a call site in any process.
  // No op of the group may be queued on any device of any process. Returns an error, empty on success.
  std::string Reset(uint32_t epoch, uint32_t calls);

  // Delays each op of a rank before it enters or inside. For tests, in processes with JAX_EP_STRESS_US.
  void Stall(int rank_index, Phase phase, double seconds);

  // Reports processes that have ended to the kernels. Reports a failed op to the user, because the program
  // that would raise its error may wait for the missing rank in a collective of JAX. Reports a GPU that was
  // stopped, and ends this process some time after that, because JAX may wait forever for results of that
  // GPU.
  void Tick();

 private:
  std::string Describe(const Report& report, int rank_index) const;
  std::string Describe(const Call& call) const;
  int first_of(int rank_index) const { return rank_index / num_ranks_ * num_ranks_; }

  std::vector<RankMemory> ranks_;
  int num_ranks_ = 0;
  std::vector<Region> regions_;  // of each rank of this process, if the group spans several processes
  Report* reports_ = nullptr;    // [ranks], in host memory mapped to the devices
  std::unique_ptr<HostMeeting> host_meeting_;
  // Times when a failed op was found, and when a stopped GPU was reported to the user. Used by the watching
  // thread only.
  std::optional<std::chrono::steady_clock::time_point> failed_at_, reported_at_;
  bool has_printed_failure_ = false;
  mutable std::mutex mutex_;  // guards the members below
  std::string name_;
  std::map<uint32_t, std::string> calls_;  // by hash
};

// Returns why a hop between domains failed, without a full stop.
std::string DescribeReason(const HopReason& reason, const std::string& in_time = "in time");

// Makes or finds the device side of a group. Returns an error, empty on success.
std::string OpenDeviceGroup(const std::string& key, const std::vector<RankMemory>& ranks, int num_ranks);
// Returns the device side of a group, null if none was made.
std::shared_ptr<DevicePeers> FindDevicePeers(const std::string& key);

}  // namespace jax_ep
