// Meetings of the ranks of a group on the CPU: the Enter and Leave of one op.
//
// No thread blocks. A rank arrives with its contribution to the op and a callback. When the last rank has
// arrived, each rank's part runs on its own thread. When the last part is done, each rank's callback runs on
// its own thread. (A blocking wait would deadlock XLA:CPU when two ops of one device do not depend on each
// other, because the waiting op holds the device's queue. Callbacks need their own threads because each runs
// the rest of its device's program, which may block.)
//
// A watchdog ends a meeting whose time is up: with an error that names the missing ranks or, if the op masks,
// without these ranks. Ranks meet only if they agree on which of them are active, so that no rank touches the
// memory of a rank that does not expect it.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/params.h"
#include "runtime/groups.h"

namespace jax_ep {

// Parameters of one rank's part of an op.
class Contribution {
 public:
  virtual ~Contribution() = default;
  // Sets the ranks that take part. Called before MoveRows with the active ranks, and again if some of them do
  // not arrive.
  virtual void SetParticipants(const std::vector<bool>& /*ranks*/) {}
  // Does this rank's part of the op. Runs once for each rank that has arrived, on all of them at the same
  // time. `contributions` are in rank order, and null for ranks that do not take part. All are null if this
  // rank is not active.
  virtual void MoveRows(const std::vector<Contribution*>& contributions) = 0;
};

// Reason why an op failed.
struct Failure {
  std::string text;  // empty: the op has not failed
  bool is_late;      // a rank did not arrive in time
};

// Callback of one rank, called exactly once: with null when the op is done, otherwise with the reason why it
// failed.
using Done = std::function<void(const Failure* failure)>;

// One rank's call of an op.
struct Arrival {
  int64_t run_id;  // the same on all devices of one launch, different between launches
  std::shared_ptr<Group> group;
  Group::Position position;
  int32_t list;  // number of the ranks' list in the mesh (MeshPosition), equal for all ranks that meet
  std::unique_ptr<Contribution> contribution;
  Attendance attendance;
  Done done;
};

class Meeting;

// The meetings of one call site. Each device passes its call sites in program order, so a rank's n-th arrival
// within one run belongs to the n-th meeting of that run.
class MeetingPoint {
 public:
  explicit MeetingPoint(std::string op) : op_(std::move(op)) {}

  void Arrive(Arrival arrival);

 private:
  const std::string op_;
  std::mutex mutex_;
  std::list<std::shared_ptr<Meeting>> open_;
};

}  // namespace jax_ep
