// The meeting of a group's ranks on the host, in all of its processes, at the first call of a call site.
//
// Loading a kernel or a graph late on one device holds locks of the driver. That could block a kernel on
// which peers wait. So the first call of a call site is launched only after all ranks have arrived, by all
// ranks or by none. (Exception: a rank that gives up while others check. Then the op fails on those, within a
// second.) No rank goes on before all have launched. A call's number counts the first calls of its rank. It
// is the same on all ranks if all reach the same ops in the same order. Otherwise the ranks find that their
// calls of a number differ. Then they refuse this call on all ranks, before any of them launches it, and stay
// in step for later calls.
//
// In a process with several devices, XLA starts every program on all of them in one order, whichever threads
// call it. Between processes no such order exists. So if processes share a meeting, a rank also refuses
// a first call that begins while another thread is in one: it would be luck if the other processes began
// these two in the same order.
//
// A process has a copy of the state of all ranks. Its own ranks write theirs, and send each change to the
// other processes (runtime/processes.h).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/groups.h"
#include "runtime/processes.h"

namespace jax_ep {

// Time to wait for the cause of a failure, after the first rank gave up.
constexpr std::chrono::seconds kCauseDelay{1};

class HostMeeting {
 public:
  // Makes a meeting for the groups of a mesh, which `key` identifies in all processes. `total_ranks` counts
  // the ranks of all groups. `processes` are the others that have ranks of this process's groups. They must
  // watch this process, and each must have made its meeting before a rank of this process begins a call.
  HostMeeting(const std::string& key, int total_ranks, std::vector<int> processes);
  ~HostMeeting();
  HostMeeting(const HostMeeting&) = delete;
  HostMeeting& operator=(const HostMeeting&) = delete;

  struct Call {
    uint32_t number;    // from 1; the same on all ranks of the group
    std::string error;  // empty: all ranks have arrived with the same op
    // The rank is in this call until the last copy is destroyed. Null if the rank need not be alone in a
    // call.
    std::shared_ptr<void> in_progress;
  };
  struct Hooks {
    // Returns the text of the op with a signature, empty if this process has not run it.
    std::function<std::string(uint64_t signature)> describe;
    // Returns whether the process of a rank of this group has ended. May be null.
    std::function<bool(int rank)> has_ended;
    // Returns why the connection to the process of a rank of this group was lost, empty if it was not. May be
    // null.
    std::function<std::string(int rank)> why_lost;
    // Returns why an earlier op failed, empty if this process has seen no failure. May be null.
    std::function<std::string()> failure;
  };

  // Begins the first call of a call site and waits, at most the group's time-out, until every rank has begun
  // a call of this number. Fails if a rank did not, if a rank has given up this call or an earlier one, or if
  // `hooks.failure` reports an op that failed. A rank that fails for such a reason gives up the call and all
  // later ones until Reset, so that they fail on all ranks. The call is refused, on all ranks, if their
  // signatures differ or if one of them is in another first call. A refused call does not affect later ones.
  // Signatures are below kNoSignature.
  Call Begin(const char* op, const Group& group, const Group::Position& position, uint64_t signature,
             const Hooks& hooks);

  // Records that this rank has launched a call, and waits until every rank has. Returns the reason why the
  // rank gave up, empty if all have launched.
  std::string AwaitLaunches(const char* op, const Group& group, const Group::Position& position,
                            uint32_t number, const Hooks& hooks);

  // Gives up a call and all later ones: GiveUp a call that this rank has begun, because its launch failed,
  // and GiveUpNext the next call, because it is rejected before it begins. Peers that wait for this rank in
  // such a call fail within a second. In that second their own process may learn the cause
  // (`Hooks::failure`).
  void GiveUp(const Group& group, const Group::Position& position, uint32_t number);
  void GiveUpNext(const Group& group, const Group::Position& position);

  // `first` and `count` select ranks of the mesh.
  // What this process knows of them.
  bool HasFailed(int first, int count) const;
  uint32_t LastCall(int first, int count) const;
  // Makes all ranks of the mesh usable again. `calls` is the last number that any rank of any process had
  // when the group had failed. The next call has the number `calls` + 2, so that every reset has a number of
  // its own (a group may fail again before its next call). No rank may be in a call. All processes must reset
  // to the same number before any rank begins a call.
  void Reset(uint32_t calls);

 private:
  struct Row;
  class PeerWait;

  // Stands for a call that its own rank refuses.
  static constexpr uint64_t kNoSignature = UINT64_MAX;

  // Takes over what a rank of another process reports.
  void Receive(const CallEvent& event);
  // Reports a change of a rank of this process to the other processes.
  void Send(CallEvent::Kind kind, int index, uint32_t number, uint64_t signature = 0);
  void GiveUp(int index, uint32_t number);

  // Marks the rank at an index as being in a call with this signature, unless it is in another one, whose
  // signature is returned in `other`.
  std::shared_ptr<void> Enter(int index, uint64_t signature, uint64_t& other);

  const uint64_t group_;  // in events
  // Guards the generation, and the rows during a reset. Events of an earlier generation may still arrive
  // then.
  std::mutex mutex_;
  uint32_t generation_ = 0;
  const int total_ranks_;
  const std::vector<int> processes_;
  const std::unique_ptr<Row[]> rows_;  // [total_ranks]
  // Signatures of the calls that ranks of this process are in, kNoSignature if they are in none.
  std::vector<std::atomic<uint64_t>> current_;
};

}  // namespace jax_ep
