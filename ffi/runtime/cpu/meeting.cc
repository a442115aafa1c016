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

// Runs the op of a rank that does not meet the others, because it has arrived too late or is not active. A
// rank that is late takes part alone.
void MoveAlone(Arrival arrival, std::vector<bool> active) {
  const int rank = arrival.position.rank;
  std::vector<Contribution*> contributions(active.size());
  if (active[rank]) {
    active.assign(active.size(), false);
    active[rank] = true;
    contributions[rank] = arrival.contribution.get();
  }
  WriteActive(active, arrival.attendance);
  if (arrival.attendance.wait_us != nullptr) std::fill_n(arrival.attendance.wait_us, active.size(), 0.0f);
  arrival.contribution->SetParticipants(active);
  arrival.contribution->MoveRows(contributions);
  arrival.done(nullptr);
}

}  // namespace

class Meeting : public TimedWait, public std::enable_shared_from_this<Meeting> {
 public:
  Meeting(const std::string& op, const Arrival& first, std::vector<bool> active)
      : op_(op),
        run_id_(first.run_id),
        group_(first.group),
        group_index_(first.position.group_index),
        list_(first.list),
        first_rank_(first.position.rank),
        deadline_(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(first.group->timeout_s()))),
        masks_(first.attendance.masks),
        active_(std::move(active)),
        num_active_(std::count(active_.begin(), active_.end(), true)),
        participants_(first.group->num_ranks()),
        present_(first.group->num_ranks(), false) {}

  Clock::time_point deadline() const override { return deadline_; }

  int64_t run_id() const override { return run_id_; }

  bool IsFor(const Arrival& arrival, const std::vector<bool>& active) const {
    // Compares keys, because a group that was reopened meanwhile is another object in the same run.
    return run_id_ == arrival.run_id && group_->key() == arrival.group->key() &&
           group_index_ == arrival.position.group_index && active_ == active;
  }

  // Returns an error if a rank runs in another list of ranks, whose rows are independent. Otherwise returns
  // an empty text.
  std::string CheckSameMesh(const Arrival& arrival) const {
    if (arrival.list == list_) return "";
    return Text(op_, ": group ", group_->ListName(group_index_), " was made for another mesh: its rank ",
                arrival.position.rank, " runs in another list of ranks than its rank ", first_rank_,
                "; make the Group from the mesh of this shard_map");
  }

  // Guarded by the meeting point's mutex.
  bool HasRank(int rank) const { return present_[rank]; }
  void AddRank(int rank) { present_[rank] = true; }
  bool IsFull() const { return present_ == active_; }

  // Adds a rank. Returns whether it was the last one. Then the caller starts the parts.
  bool Join(Arrival arrival) {
    const int rank = arrival.position.rank;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (failure_.text.empty()) {
        participants_[rank] = {std::move(arrival.contribution), arrival.attendance, std::move(arrival.done),
                               Clock::now()};
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

  // Runs the parts of all ranks that have arrived, the part of `own_rank` on this thread.
  void StartParts(int own_rank) {
    num_running_ = num_arrived_;
    end_ = Clock::now();
    for (const Participant& participant : participants_) {
      contributions_.push_back(participant.contribution.get());
    }
    for (size_t rank = 0; rank < participants_.size(); ++rank) {
      if (participants_[rank].has_arrived() && static_cast<int>(rank) != own_rank) {
        RunOnOwnThread([self = shared_from_this(), rank] { self->RunPart(rank); });
      }
    }
    RunPart(own_rank);
  }

  // Ends the meeting if ranks are still missing.
  void Expire() override {
    if (!End([this] { return Failure{DescribeMissing(), true}; })) return;
    if (masks_) {
      RunOnOwnThread([self = shared_from_this()] { self->ContinueWithoutMissing(); });
      return;
    }
    group_->RecordExpired(failure_.text);
    FailAll();
  }

  // Ends the meeting with an error, also if the op masks.
  void Fail(const std::string& text) override {
    if (End([&] { return Failure{text, false}; })) FailAll();
  }

 private:
  // State of one rank of the meeting.
  struct Participant {
    std::unique_ptr<Contribution> contribution;
    Attendance attendance;
    Done done;
    Clock::time_point arrived;

    bool has_arrived() const { return contribution != nullptr; }
  };

  // Ends the meeting, so that no rank joins any more. Returns false if it has ended or all ranks have
  // arrived.
  template <typename Describe>
  bool End(Describe&& describe) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (num_arrived_ == num_active_ || !failure_.text.empty()) return false;
    failure_ = describe();
    return true;
  }

  void FailAll() {
    for (Participant& participant : participants_) {
      if (!participant.has_arrived()) continue;
      participant.contribution.reset();
      RunOnOwnThread(
          [self = shared_from_this(), done = std::move(participant.done)] { done(&self->failure_); });
    }
  }

  void ContinueWithoutMissing() {
    std::vector<bool> arrived;
    for (const Participant& participant : participants_) arrived.push_back(participant.has_arrived());
    for (const Participant& participant : participants_) {
      if (participant.has_arrived()) participant.contribution->SetParticipants(arrived);
    }
    StartParts(std::find(arrived.begin(), arrived.end(), true) - arrived.begin());
  }

  void RunPart(int rank) {
    WriteAttendance(participants_[rank]);
    contributions_[rank]->MoveRows(contributions_);
    // Leave: no rank goes on before every row is in place and every source has been read.
    if (num_running_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (size_t peer = 0; peer < participants_.size(); ++peer) {
      if (participants_[peer].has_arrived() && static_cast<int>(peer) != rank) {
        RunOnOwnThread([self = shared_from_this(), peer] { self->participants_[peer].done(nullptr); });
      }
    }
    participants_[rank].done(nullptr);
  }

  // Writes which ranks took part, and the wait for each. For a missing rank the wait lasted until the end.
  void WriteAttendance(const Participant& participant) const {
    std::vector<bool> active;
    for (size_t rank = 0; rank < participants_.size(); ++rank) {
      const bool has_arrived = participants_[rank].has_arrived();
      active.push_back(has_arrived);
      if (participant.attendance.wait_us == nullptr) continue;
      const std::chrono::duration<float, std::micro> wait =
          (has_arrived ? participants_[rank].arrived : end_) - participant.arrived;
      participant.attendance.wait_us[rank] = active_[rank] ? std::max(wait.count(), 0.0f) : 0.0f;
    }
    WriteActive(active, participant.attendance);
  }

  std::string DescribeMissing() const {
    std::string missing;
    for (size_t rank = 0; rank < participants_.size(); ++rank) {
      if (active_[rank] && !participants_[rank].has_arrived()) missing += Text(' ', rank);
    }
    return Text(op_, ": of group ", group_->ListName(group_index_), ", rank(s)", missing,
                " did not arrive within ", group_->timeout_s(),
                " s. Every rank must reach the same ops in the same order: look for a branch that differs "
                "between ranks, or raise Group(timeout_s=...) if a rank is only slow.");
  }

  const std::string op_;
  const int64_t run_id_;
  const std::shared_ptr<Group> group_;
  const int group_index_;
  const int32_t list_;  // in the program's mesh, of the first rank
  const int first_rank_;
  const Clock::time_point deadline_;
  const bool masks_;
  const std::vector<bool> active_;  // ranks that meet
  const int num_active_;

  std::mutex mutex_;
  int num_arrived_ = 0;
  Failure failure_{};
  std::vector<Participant> participants_;

  std::vector<bool> present_;
  std::vector<Contribution*> contributions_;
  Clock::time_point end_;
  std::atomic<int> num_running_{0};
};

void MeetingPoint::Arrive(Arrival arrival) {
  const int rank = arrival.position.rank;
  const std::vector<bool> active = ActiveRanks(arrival);
  if (!active[rank]) return MoveAlone(std::move(arrival), active);
  arrival.contribution->SetParticipants(active);
  std::shared_ptr<Meeting> meeting;
  bool is_new = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = std::find_if(open_.begin(), open_.end(), [&](const auto& open) {
      return open->IsFor(arrival, active) && !open->HasRank(rank);
    });
    if (it == open_.end()) {
      // An expired meeting stays here for its late ranks until its run is long over.
      constexpr size_t kMaxOpen = 1024;
      if (open_.size() >= kMaxOpen) open_.pop_front();
      it = open_.insert(open_.end(), std::make_shared<Meeting>(op_, arrival, active));
      is_new = true;
    }
    meeting = *it;
    meeting->AddRank(rank);
    if (meeting->IsFull()) open_.erase(it);
  }
  if (is_new) WatchDeadline(meeting);  // fails the meeting at once if its run has failed
  if (const std::string reason = meeting->CheckSameMesh(arrival); !reason.empty()) {
    jax_ep::FailRun(arrival.run_id, reason);
    meeting->Fail(reason);  // also if the rank that began it has not registered it yet
  }
  if (meeting->Join(std::move(arrival))) {
    ForgetDeadline(meeting);
    meeting->StartParts(rank);
  }
}

}  // namespace jax_ep
