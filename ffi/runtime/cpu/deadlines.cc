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
  void Watch(std::shared_ptr<Waiting> waiting) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (const auto refusal = Find(waiting->run_id()); refusal != refusals_.end()) {
      const std::string text = refusal->text;
      lock.unlock();
      waiting->Refuse(text);
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

  void Forget(const std::shared_ptr<Waiting>& waiting) {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.erase(waiting);
  }

  void Refuse(int64_t run_id, const std::string& text) {
    std::vector<std::shared_ptr<Waiting>> ended;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (Find(run_id) != refusals_.end()) return;
      // Runs that are so long over that no rank can still come to them are forgotten.
      constexpr size_t kMostRefusals = 64;
      if (refusals_.size() >= kMostRefusals) refusals_.pop_front();
      refusals_.push_back({run_id, text});
      const auto is_refused = [&](const auto& waiting) { return waiting->run_id() == run_id; };
      std::copy_if(waiting_.begin(), waiting_.end(), std::back_inserter(ended), is_refused);
      for (const auto& waiting : ended) waiting_.erase(waiting);
    }
    for (const auto& waiting : ended) waiting->Refuse(text);
  }

 private:
  struct Refusal {
    int64_t run_id;
    std::string text;
  };

  struct ByDeadline {
    bool operator()(const std::shared_ptr<Waiting>& a, const std::shared_ptr<Waiting>& b) const {
      return std::make_pair(a->deadline(), a.get()) < std::make_pair(b->deadline(), b.get());
    }
  };

  std::list<Refusal>::const_iterator Find(int64_t run_id) const {
    return std::find_if(refusals_.begin(), refusals_.end(),
                        [&](const Refusal& refusal) { return refusal.run_id == run_id; });
  }

  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      if (waiting_.empty()) {
        wake_.wait(lock);
        continue;
      }
      std::shared_ptr<Waiting> first = *waiting_.begin();
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
  std::set<std::shared_ptr<Waiting>, ByDeadline> waiting_;
  std::list<Refusal> refusals_;  // the newest last
  bool started_ = false;
};

Watchdog& GetWatchdog() {
  // Never destroyed: its thread lives until the process ends.
  static Watchdog* const watchdog = new Watchdog;
  return *watchdog;
}

}  // namespace

void Watch(std::shared_ptr<Waiting> waiting) { GetWatchdog().Watch(std::move(waiting)); }

void Forget(const std::shared_ptr<Waiting>& waiting) { GetWatchdog().Forget(waiting); }

void Refuse(int64_t run_id, const std::string& text) { GetWatchdog().Refuse(run_id, text); }

}  // namespace jax_ep
