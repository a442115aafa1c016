#include "runtime/cpu/deadlines.h"

#include <algorithm>
#include <condition_variable>
#include <iterator>
#include <list>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace jax_ep {

using Clock = std::chrono::steady_clock;

namespace {

class Watchdog {
 public:
  void Watch(std::shared_ptr<TimedWait> waiting) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (const auto failure = Find(waiting->run_id()); failure != failures_.end()) {
      const std::string text = failure->text;
      lock.unlock();
      waiting->Fail(text);
      return;
    }
    const bool is_earliest = waiting_.empty() || waiting->deadline() < (*waiting_.begin())->deadline();
    waiting_.insert(std::move(waiting));
    if (!started_) {
      started_ = true;
      std::thread([this] { Loop(); }).detach();
    } else if (is_earliest) {
      wake_.notify_one();
    }
  }

  void Forget(const std::shared_ptr<TimedWait>& waiting) {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.erase(waiting);
  }

  void FailRun(int64_t run_id, const std::string& text) {
    std::vector<std::shared_ptr<TimedWait>> failed;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (Find(run_id) != failures_.end()) return;
      // Old runs are dropped: no rank can still arrive in them.
      constexpr size_t kMaxFailures = 64;
      if (failures_.size() >= kMaxFailures) failures_.pop_front();
      failures_.push_back({run_id, text});
      const auto is_of_run = [&](const auto& waiting) { return waiting->run_id() == run_id; };
      std::copy_if(waiting_.begin(), waiting_.end(), std::back_inserter(failed), is_of_run);
      for (const auto& waiting : failed) waiting_.erase(waiting);
    }
    for (const auto& waiting : failed) waiting->Fail(text);
  }

 private:
  struct RunFailure {
    int64_t run_id;
    std::string text;
  };

  struct ByDeadline {
    bool operator()(const std::shared_ptr<TimedWait>& a, const std::shared_ptr<TimedWait>& b) const {
      return std::make_pair(a->deadline(), a.get()) < std::make_pair(b->deadline(), b.get());
    }
  };

  std::list<RunFailure>::const_iterator Find(int64_t run_id) const {
    return std::find_if(failures_.begin(), failures_.end(),
                        [&](const RunFailure& failure) { return failure.run_id == run_id; });
  }

  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      if (waiting_.empty()) {
        wake_.wait(lock);
        continue;
      }
      std::shared_ptr<TimedWait> first = *waiting_.begin();
      if (Clock::now() < first->deadline()) {
        wake_.wait_until(lock, first->deadline());
        continue;
      }
      waiting_.erase(waiting_.begin());
      lock.unlock();
      first->Expire();
      first.reset();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::set<std::shared_ptr<TimedWait>, ByDeadline> waiting_;
  std::list<RunFailure> failures_;  // the newest last
  bool started_ = false;
};

Watchdog& GetWatchdog() {
  // Never destroyed, because its thread lives until the process ends.
  static Watchdog* const watchdog = new Watchdog;
  return *watchdog;
}

}  // namespace

void WatchDeadline(std::shared_ptr<TimedWait> waiting) { GetWatchdog().Watch(std::move(waiting)); }

void ForgetDeadline(const std::shared_ptr<TimedWait>& waiting) { GetWatchdog().Forget(waiting); }

void FailRun(int64_t run_id, const std::string& text) { GetWatchdog().FailRun(run_id, text); }

}  // namespace jax_ep
