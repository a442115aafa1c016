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
#include "runtime/gpu/board.h"
#include "runtime/gpu/regions.h"
#include "runtime/groups.h"

namespace jax_ep {

// How long a process goes on after one of its GPUs was stopped.
constexpr int kEndsAfterSeconds = 30;

// Where the memory of one rank lies.
struct RankMemory {
  int64_t device;    // its ordinal; -1: the rank belongs to another process
  uint64_t control;  // address of its control block, here
  int64_t shift;     // added to an address that it publishes, gives the same memory here
  int process;
};

// The control blocks of a group and its reports of failed ops. They live as long as the process: a captured
// graph may hold their addresses, and a group of the same devices finds them again.
class DevicePeers {
 public:
  // Checks that every device of this process reaches its peers' memory and loads all kernels on it. `ranks`
  // are those of one group after the other. `board` is a descriptor of the memory where the group's processes
  // meet, -1 if there is one process. Empty text on success.
  static std::string Make(const std::vector<RankMemory>& ranks, int num_ranks, int board,
                          std::shared_ptr<DevicePeers>& peers);

  // What the kernels of rank `place` take.
  Peers At(const Group::Place& place, const Call& call, bool through_arena) const;

  // Why peers in other processes cannot reach an address of rank `place`; empty if they can.
  std::string ReasonAgainst(const Group::Place& place, const void* address) const;

  // The text of an op that failed, that which says most; empty if none did.
  std::string DescribeFailure() const;
  bool HasFailed() const;

  // The group's name for errors, and how long an op waits for its peers, also in graphs that were captured
  // before.
  void Configure(const std::string& name, double timeout_s);

  // A number that stands for an op and its shapes, whose text it keeps for errors. The same text has the same
  // number in every process.
  uint32_t Remember(const std::string& what);
  Board& board() const { return *board_; }
  // What Board's errors need to know of one of the groups.
  Board::Hooks HooksFor(int group) const;

  // The last epoch, and the last number of a call site, of any rank of this process.
  uint32_t LastEpoch() const;
  uint32_t LastCall() const;
  // Makes the group usable after a failure: clears the blocks and reports of this process. The next op of
  // each channel has the epoch after `epoch`, the next call site the number after `calls`. No op of the group
  // may be queued on a device, of this process or another.
  std::string Reset(uint32_t epoch, uint32_t calls);

  // For tests, in processes with JAX_EP_STRESS_US: holds each op of a rank up before it enters, or inside.
  void Stall(int rank_index, Phase phase, double seconds);

  // Tells the kernels which processes have ended, and the user of a GPU that was stopped. Ends the process
  // some time after that: JAX may wait for results of that GPU for ever, and so would whoever waits for the
  // process.
  void Tick();

  static int64_t BytesPerDevice() { return sizeof(Control) + kArenaBytes; }

 private:
  std::string Describe(const Report& report, int rank_index) const;
  std::string Describe(const Call& call) const;
  int first_of(int rank_index) const { return rank_index / num_ranks_ * num_ranks_; }

  std::vector<RankMemory> ranks_;
  int num_ranks_ = 0;
  std::vector<Region> regions_;  // of each rank of this process, if the group spans several
  Report* reports_ = nullptr;    // [ranks], host memory mapped to the devices
  std::shared_ptr<Board> board_;
  // When the user was told of a GPU that was stopped; the watching thread's.
  std::optional<std::chrono::steady_clock::time_point> told_at_;
  mutable std::mutex mutex_;  // of what follows
  std::string name_;
  std::map<uint32_t, std::string> calls_;  // by hash
};

// Why a hop between hosts failed, without a full stop.
std::string WhyOf(const HopReason& reason, const std::string& in_time = "in time");

// Makes the peers of a group, or finds them. Empty text on success. Takes over nothing.
std::string OpenDeviceGroup(const std::string& key, const std::vector<RankMemory>& ranks, int num_ranks,
                            int board);
// Null if none were made.
std::shared_ptr<DevicePeers> FindDevicePeers(const std::string& key);

}  // namespace jax_ep
