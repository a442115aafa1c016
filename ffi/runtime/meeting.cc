#include "runtime/meeting.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <set>
#include <thread>
#include <utility>

#include "core/text.h"
#include "runtime/threads.h"

namespace jax_ep {

using Clock = std::chrono::steady_clock;

class Meeting : public std::enable_shared_from_this<Meeting> {
 public:
  Meeting(const std::string& op, const Arrival& first)
      : op_(op),
        run_id_(first.run_id),
        group_(first.group),
        group_index_(first.place.group),
        deadline_(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(first.group->timeout_s()))),
        shares_(first.group->num_ranks()),
        done_(first.group->num_ranks()),
        present_(first.group->num_ranks(), false) {}

  Clock::time_point deadline() const { return deadline_; }

  bool IsFor(const Arrival& arrival) const {
    // A group that was made anew meanwhile is another object, but the run is still the old one.
    return run_id_ == arrival.run_id && group_->key() == arrival.group->key() &&
           group_index_ == arrival.place.group;
  }

  // Guarded by the meeting point's mutex.
  bool HasRank(int rank) const { return present_[rank]; }
  void AddRank(int rank) { present_[rank] = true; }
  bool IsFull() const {
    return std::all_of(present_.begin(), present_.end(), [](bool p) { return p; });
  }

  // Takes in a rank. Returns whether it was the last one; its caller then starts the move.
  bool Join(Arrival arrival) {
    const int rank = arrival.place.rank;
    std::string error;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (expired_.empty()) {
        shares_[rank] = std::move(arrival.share);
        done_[rank] = std::move(arrival.done);
        return ++num_arrived_ == group_->num_ranks();
      }
      error = expired_;
    }
    arrival.done(&error);
    return false;
  }

  void StartMove(int last_rank) {
    for (const auto& share : shares_) ranks_.push_back(share.get());
    num_moving_ = group_->num_ranks();
    for (int rank = 0; rank < group_->num_ranks(); ++rank) {
      if (rank != last_rank) {
        RunOnOwnThread([self = shared_from_this(), rank] { self->Move(rank); });
      }
    }
    Move(last_rank);
  }

  // Ends the meeting if ranks are still missing.
  void Expire() {
    std::vector<Done> waiting;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (num_arrived_ == group_->num_ranks() || !expired_.empty()) return;
      expired_ = DescribeMissing();
      for (Done& done : done_) {
        if (done) waiting.push_back(std::exchange(done, nullptr));
      }
      for (auto& share : shares_) share.reset();
    }
    group_->RecordExpired(expired_);
    for (Done& done : waiting) {
      RunOnOwnThread([self = shared_from_this(), done = std::move(done)] { done(&self->expired_); });
    }
  }

 private:
  void Move(int rank) {
    ranks_[rank]->Move(ranks_);
    // Leave: nobody goes on before every row is in place and every source has been read.
    if (num_moving_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (int peer = 0; peer < group_->num_ranks(); ++peer) {
      if (peer != rank) {
        RunOnOwnThread([self = shared_from_this(), peer] { self->done_[peer](nullptr); });
      }
    }
    done_[rank](nullptr);
  }

  std::string DescribeMissing() const {
    std::string missing;
    for (size_t rank = 0; rank < done_.size(); ++rank) {
      if (!done_[rank]) missing += Text(' ', rank);
    }
    const std::string which = group_index_ > 0 ? Text(" (no. ", group_index_, " of the mesh)") : "";
    return Text(op_, ": of group ", group_->name(), which, ", rank(s)", missing, " did not arrive within ",
                group_->timeout_s(),
                " s. Every rank must reach the same ops in the same order: look for a branch that differs "
                "between ranks, or raise Group(timeout_s=...) if a rank is only slow.");
  }

  const std::string op_;
  const int64_t run_id_;
  const std::shared_ptr<Group> group_;
  const int group_index_;
  const Clock::time_point deadline_;

  std::mutex mutex_;
  int num_arrived_ = 0;
  std::string expired_;
  std::vector<std::unique_ptr<Share>> shares_;
  std::vector<Done> done_;

  std::vector<bool> present_;
  std::vector<Share*> ranks_;
  std::atomic<int> num_moving_{0};
};

namespace {

class Watchdog {
 public:
  void Watch(std::shared_ptr<Meeting> meeting) {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool is_earliest = meetings_.empty() || meeting->deadline() < (*meetings_.begin())->deadline();
    meetings_.insert(std::move(meeting));
    if (!started_) {
      started_ = true;
      std::thread([this] { Loop(); }).detach();
    } else if (is_earliest) {
      wake_.notify_one();
    }
  }

  void Forget(const std::shared_ptr<Meeting>& meeting) {
    std::lock_guard<std::mutex> lock(mutex_);
    meetings_.erase(meeting);
  }

 private:
  struct ByDeadline {
    bool operator()(const std::shared_ptr<Meeting>& a, const std::shared_ptr<Meeting>& b) const {
      return std::make_pair(a->deadline(), a.get()) < std::make_pair(b->deadline(), b.get());
    }
  };

  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      if (meetings_.empty()) {
        wake_.wait(lock);
        continue;
      }
      std::shared_ptr<Meeting> first = *meetings_.begin();
      if (Clock::now() < first->deadline()) {
        wake_.wait_until(lock, first->deadline());
        continue;
      }
      meetings_.erase(meetings_.begin());
      lock.unlock();
      first->Expire();
      first.reset();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::set<std::shared_ptr<Meeting>, ByDeadline> meetings_;
  bool started_ = false;
};

Watchdog& GetWatchdog() {
  // Never destroyed: its thread lives until the process ends.
  static Watchdog* const watchdog = new Watchdog;
  return *watchdog;
}

}  // namespace

void MeetingPoint::Arrive(Arrival arrival) {
  const int rank = arrival.place.rank;
  std::shared_ptr<Meeting> meeting;
  bool is_new = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = std::find_if(open_.begin(), open_.end(),
                           [&](const auto& open) { return open->IsFor(arrival) && !open->HasRank(rank); });
    if (it == open_.end()) {
      // A meeting that expired waits here for its late ranks, until its run is long over.
      constexpr size_t kMostOpen = 1024;
      if (open_.size() >= kMostOpen) open_.pop_front();
      it = open_.insert(open_.end(), std::make_shared<Meeting>(op_, arrival));
      is_new = true;
    }
    meeting = *it;
    meeting->AddRank(rank);
    if (meeting->IsFull()) open_.erase(it);
  }
  if (is_new) GetWatchdog().Watch(meeting);
  if (meeting->Join(std::move(arrival))) {
    GetWatchdog().Forget(meeting);
    meeting->StartMove(rank);
  }
}

}  // namespace jax_ep
