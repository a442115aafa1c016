// Ends what waits for ranks of this process when its time is up, or a rank of its run is known not to come.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace jax_ep {

class Waiting {
 public:
  virtual ~Waiting() = default;
  virtual std::chrono::steady_clock::time_point deadline() const = 0;
  virtual int64_t run_id() const = 0;
  // Both from any thread, and of no effect on what has ended.
  virtual void Expire() = 0;
  virtual void Refuse(const std::string& text) = 0;
};

// From now on it ends in time, or is refused with its run.
void Watch(std::shared_ptr<Waiting> waiting);
void Forget(const std::shared_ptr<Waiting>& waiting);

// A rank of this process will not come to anything of this run any more, for the reason in `text`: a call of
// it is wrong. All that wait for it, or would, fail for the same reason.
void Refuse(int64_t run_id, const std::string& text);

}  // namespace jax_ep
