#include "runtime/first_call.h"

#include <chrono>

#include "core/text.h"

namespace jax_ep {

std::string FirstCall::Wait(const char* op, const Group& group, const Group::Place& place) {
  std::unique_lock<std::mutex> lock(mutex_);
  std::set<int>& arrived = arrived_[place.group];
  arrived.insert(place.rank);
  std::string missing;
  const auto all_here = [&] {
    missing.clear();
    for (int rank = 0; rank < group.num_ranks(); ++rank) {
      if (group.IsLocal({place.group, rank}) && arrived.count(rank) == 0) missing += Text(' ', rank);
    }
    return missing.empty();
  };
  if (all_here()) wake_.notify_all();
  const auto limit = std::chrono::duration<double>(group.timeout_s());
  if (wake_.wait_for(lock, limit, all_here)) return "";
  return Text(op, ": of group ", group.name(), ", rank(s)", missing, " did not arrive within ",
              group.timeout_s(),
              " s at the first call. Every rank must reach the same ops in the same order.");
}

}  // namespace jax_ep
