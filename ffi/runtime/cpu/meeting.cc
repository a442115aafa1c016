#include "runtime/cpu/meeting.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "core/text.h"
#include "runtime/cpu/deadlines.h"
#include "runtime/threads.h"

namespace jax_ep {

using Clock = std::chrono::steady_clock;

namespace {

std::vector<bool> ActiveRanks(const Arrival& arrival) {
  std::vector<bool> active(arrival.group->num_ranks());
  for (size_t rank = 0; rank < active.size(); ++rank) active[rank] = arrival.attendance.is_active(rank);
  return active;
}

void WriteActive(const std::vector<bool>& active, const Attendance& attendance) {
  if (attendance.active_after != nullptr) std::copy(active.begin(), active.end(), attendance.active_after);
}

// The op of a rank that does not meet the others: it has come too late, and takes part alone, or is not
// active.
void MoveAlone(Arrival arrival, std::vector<bool> active) {
  const int rank = arrival.place.rank;
  std::vector<Share*> shares(active.size());
  if (active[rank]) {
    active.assign(active.size(), false);
    active[rank] = true;
    shares[rank] = arrival.share.get();
  }
  WriteActive(active, arrival.attendance);
  if (arrival.attendance.wait_us != nullptr) std::fill_n(arrival.attendance.wait_us, active.size(), 0.0f);
  arrival.share->Expect(active);
  arrival.share->Move(shares);
  arrival.done(nullptr);
}

}  // namespace

class Meeting : public Waiting, public std::enable_shared_from_this<Meeting> {
 public:
  Meeting(const std::string& op, const Arrival& first, std::vector<bool> active)
      : op_(op),
        run_id_(first.run_id),
        group_(first.group),
        group_index_(first.place.group),
        list_(first.list),
        first_rank_(first.place.rank),
        deadline_(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(first.group->timeout_s()))),
        masks_(first.attendance.masks),
        active_(std::move(active)),
        num_active_(std::count(active_.begin(), active_.end(), true)),
        seats_(first.group->num_ranks()),
        present_(first.group->num_ranks(), false) {}

  Clock::time_point deadline() const override { return deadline_; }

  int64_t run_id() const override { return run_id_; }

  bool IsFor(const Arrival& arrival, const std::vector<bool>& active) const {
    // A group that was made anew meanwhile is another object, but the run is still the old one.
    return run_id_ == arrival.run_id && group_->key() == arrival.group->key() &&
           group_index_ == arrival.place.group && active_ == active;
  }

  // Why a rank must not join, or nothing: it runs in another list of ranks, whose rows are other ones.
  std::string WhyApart(const Arrival& arrival) const {
    if (arrival.list == list_) return "";
    return Text(op_, ": group ", group_->NameOf(group_index_), " was made for another mesh: its rank ",
                arrival.place.rank, " runs in another list of ranks than its rank ", first_rank_,
                "; make the Group from the mesh of this shard_map");
  }

  // Guarded by the meeting point's mutex.
  bool HasRank(int rank) const { return present_[rank]; }
  void AddRank(int rank) { present_[rank] = true; }
  bool IsFull() const { return present_ == active_; }

  // Takes in a rank. Returns whether it was the last one; its caller then starts the move.
  bool Join(Arrival arrival) {
    const int rank = arrival.place.rank;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (failure_.text.empty()) {
        seats_[rank] = {std::move(arrival.share), arrival.attendance, std::move(arrival.done), Clock::now()};
        return ++num_arrived_ == num_active_;
      }
    }
    if (masks_ && failure_.is_late) {
      MoveAlone(std::move(arrival), active_);
    } else {
      arrival.done(&failure_);
    }
    return false;
  }

  // Moves the parts of all that have come, the one of rank `mine` on this thread.
  void StartMove(int mine) {
    num_moving_ = num_arrived_;
    end_ = Clock::now();
    for (const Seat& seat : seats_) shares_.push_back(seat.share.get());
    for (size_t rank = 0; rank < seats_.size(); ++rank) {
      if (seats_[rank].is_taken() && static_cast<int>(rank) != mine) {
        RunOnOwnThread([self = shared_from_this(), rank] { self->Move(rank); });
      }
    }
    Move(mine);
  }

  // Ends the meeting if ranks are still missing.
  void Expire() override {
    if (!End([this] { return Failure{DescribeMissing(), true}; })) return;
    if (masks_) {
      RunOnOwnThread([self = shared_from_this()] { self->GoOnWithoutMissing(); });
      return;
    }
    group_->RecordExpired(failure_.text);
    FailAll();
  }

  // Ends the meeting for a reason that does not let it go on without those who are missing either.
  void Refuse(const std::string& text) override {
    if (End([&] { return Failure{text, false}; })) FailAll();
  }

 private:
  // What a rank that has come left here.
  struct Seat {
    std::unique_ptr<Share> share;
    Attendance attendance;
    Done done;
    Clock::time_point arrived;

    bool is_taken() const { return share != nullptr; }
  };

  // False if it has ended, or all have come. From here on nobody joins.
  template <typename Describe>
  bool End(Describe&& describe) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (num_arrived_ == num_active_ || !failure_.text.empty()) return false;
    failure_ = describe();
    return true;
  }

  void FailAll() {
    for (Seat& seat : seats_) {
      if (!seat.is_taken()) continue;
      seat.share.reset();
      RunOnOwnThread([self = shared_from_this(), done = std::move(seat.done)] { done(&self->failure_); });
    }
  }

  void GoOnWithoutMissing() {
    std::vector<bool> here;
    for (const Seat& seat : seats_) here.push_back(seat.is_taken());
    for (const Seat& seat : seats_) {
      if (seat.is_taken()) seat.share->Expect(here);
    }
    StartMove(std::find(here.begin(), here.end(), true) - here.begin());
  }

  void Move(int rank) {
    WriteAttendance(seats_[rank]);
    shares_[rank]->Move(shares_);
    // Leave: nobody goes on before every row is in place and every source has been read.
    if (num_moving_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (size_t peer = 0; peer < seats_.size(); ++peer) {
      if (seats_[peer].is_taken() && static_cast<int>(peer) != rank) {
        RunOnOwnThread([self = shared_from_this(), peer] { self->seats_[peer].done(nullptr); });
      }
    }
    seats_[rank].done(nullptr);
  }

  // A rank that did not come was waited for until the end.
  void WriteAttendance(const Seat& mine) const {
    std::vector<bool> active;
    for (size_t rank = 0; rank < seats_.size(); ++rank) {
      const bool is_here = seats_[rank].is_taken();
      active.push_back(is_here);
      if (mine.attendance.wait_us == nullptr) continue;
      const std::chrono::duration<float, std::micro> wait =
          (is_here ? seats_[rank].arrived : end_) - mine.arrived;
      mine.attendance.wait_us[rank] = active_[rank] ? std::max(wait.count(), 0.0f) : 0.0f;
    }
    WriteActive(active, mine.attendance);
  }

  std::string DescribeMissing() const {
    std::string missing;
    for (size_t rank = 0; rank < seats_.size(); ++rank) {
      if (active_[rank] && !seats_[rank].is_taken()) missing += Text(' ', rank);
    }
    return Text(op_, ": of group ", group_->NameOf(group_index_), ", rank(s)", missing,
                " did not arrive within ", group_->timeout_s(),
                " s. Every rank must reach the same ops in the same order: look for a branch that differs "
                "between ranks, or raise Group(timeout_s=...) if a rank is only slow.");
  }

  const std::string op_;
  const int64_t run_id_;
  const std::shared_ptr<Group> group_;
  const int group_index_;
  const int32_t list_;  // in the program's mesh, as the first rank says
  const int first_rank_;
  const Clock::time_point deadline_;
  const bool masks_;
  const std::vector<bool> active_;  // those that meet
  const int num_active_;

  std::mutex mutex_;
  int num_arrived_ = 0;
  Failure failure_{};
  std::vector<Seat> seats_;

  std::vector<bool> present_;
  std::vector<Share*> shares_;
  Clock::time_point end_;
  std::atomic<int> num_moving_{0};
};

void MeetingPoint::Arrive(Arrival arrival) {
  const int rank = arrival.place.rank;
  const std::vector<bool> active = ActiveRanks(arrival);
  if (!active[rank]) return MoveAlone(std::move(arrival), active);
  arrival.share->Expect(active);
  std::shared_ptr<Meeting> meeting;
  bool is_new = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = std::find_if(open_.begin(), open_.end(), [&](const auto& open) {
      return open->IsFor(arrival, active) && !open->HasRank(rank);
    });
    if (it == open_.end()) {
      // A meeting that expired waits here for its late ranks, until its run is long over.
      constexpr size_t kMostOpen = 1024;
      if (open_.size() >= kMostOpen) open_.pop_front();
      it = open_.insert(open_.end(), std::make_shared<Meeting>(op_, arrival, active));
      is_new = true;
    }
    meeting = *it;
    meeting->AddRank(rank);
    if (meeting->IsFull()) open_.erase(it);
  }
  if (is_new) Watch(meeting);  // which may refuse it
  if (const std::string reason = meeting->WhyApart(arrival); !reason.empty()) {
    jax_ep::Refuse(arrival.run_id, reason);
    meeting->Refuse(reason);  // also where the rank that began it has not had it watched yet
  }
  if (meeting->Join(std::move(arrival))) {
    Forget(meeting);
    meeting->StartMove(rank);
  }
}

}  // namespace jax_ep
