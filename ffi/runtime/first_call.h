// A meeting of a call site's devices on the host, before its first launch.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "runtime/groups.h"

namespace jax_ep {

class FirstCall {
 public:
  // Waits until every rank of the place's group in this process has called it once; later calls return at
  // once. Each device has a host thread of its own on GPUs, so waiting is safe. Returns the reason why it
  // gave up, or nothing.
  std::string Wait(const char* op, const Group& group, const Group::Place& place);

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  std::map<int, std::set<int>> arrived_;  // by group, ranks
};

}  // namespace jax_ep
