// Timed waits for ranks of this process. A wait ends when its time is up, or when a rank of its run cannot
// arrive.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace jax_ep {

class TimedWait {
 public:
  virtual ~TimedWait() = default;
  virtual std::chrono::steady_clock::time_point deadline() const = 0;
  virtual int64_t run_id() const = 0;
  // Both may be called from any thread and have no effect on a wait that has ended.
  virtual void Expire() = 0;
  virtual void Fail(const std::string& text) = 0;
};

// Registers a wait: it expires at its deadline, or fails with its run. Forgetting it undoes that.
void WatchDeadline(std::shared_ptr<TimedWait> wait);
void ForgetDeadline(const std::shared_ptr<TimedWait>& wait);

// Fails all present and future waits of a run with the error `text`, because a wrong call keeps a rank of
// this process from arriving.
void FailRun(int64_t run_id, const std::string& text);

}  // namespace jax_ep
