#include "runtime/threads.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace jax_ep {
namespace {

class Threads {
 public:
  void Run(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    // Each queued piece has an idle thread of its own, so no piece waits behind one that blocks.
    if (queue_.size() < idle_) {
      queue_.push_back(std::move(work));
      wake_.notify_one();
    } else {
      std::thread([this, work = std::move(work)] { Loop(work); }).detach();
    }
  }

 private:
  void Loop(std::function<void()> work) {
    while (true) {
      work();
      work = nullptr;
      std::unique_lock<std::mutex> lock(mutex_);
      ++idle_;
      wake_.wait(lock, [this] { return !queue_.empty(); });
      --idle_;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  size_t idle_ = 0;
};

}  // namespace

void RunOnOwnThread(std::function<void()> work) {
  // Never destroyed, because idle threads wait on it until the process ends.
  static Threads* const threads = new Threads;
  threads->Run(std::move(work));
}

}  // namespace jax_ep
