// Where the ranks of a group meet on the CPU: the Enter and Leave of one op.
//
// No thread blocks. A rank arrives with its share of the op and a callback; when the last one has
// arrived, every rank's part is moved on its own thread; when the last part is done, every rank's
// callback runs on its own thread. (A blocking wait deadlocks XLA:CPU when two ops of one device
// do not depend on each other: the waiting op holds the device's queue. Callbacks need threads of
// their own because each runs the rest of its device's program, which may block.)
// A watchdog ends a meeting whose time is up: with an error that names the missing ranks, or without them
// where the op masks. Ranks meet only if they agree on which of them are active, so that nobody touches the
// memory of a rank that does not count on it.
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

// What one rank brings to an op.
class Share {
 public:
  virtual ~Share() = default;
  // Says which ranks take part, before Move: those that are active, and once more if some of them do not
  // come.
  virtual void Expect(const std::vector<bool>& /*ranks*/) {}
  // Does this rank's part of the op. Runs once for every rank that has come, at the same time on all of them;
  // `shares` are those of the ranks that take part, in rank order, and null for the others. All are null if
  // the rank is not active.
  virtual void Move(const std::vector<Share*>& shares) = 0;
};

// Why an op failed.
struct Failure {
  std::string text;  // empty: it has not
  bool is_late;      // a rank did not come in time
};

// Called exactly once: with null when the op is done, else with the reason why it failed.
using Done = std::function<void(const Failure* failure)>;

struct Arrival {
  int64_t run_id;  // the same on all devices of one launch, different between launches
  std::shared_ptr<Group> group;
  Group::Place place;
  int32_t list;  // of the ranks in the program's mesh (MeshPlace): the same for all that meet
  std::unique_ptr<Share> share;
  Attendance attendance;
  Done done;
};

class Meeting;

// The meetings of one call site. Each device passes its call sites in program order, so a rank's
// n-th arrival within one run belongs to that run's n-th meeting here.
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
