#include "runtime/first_call.h"

#include <chrono>

#include "core/text.h"

namespace jax_ep {

std::string FirstCall::Wait(const char* op, const Group& group, const Group::Place& place) {
  std::unique_lock<std::mutex> lock(mutex_);
  std::set<int>& arrived = arrived_[place.group];
  const size_t num_ranks = group.num_ranks();
  if (arrived.insert(place.rank).second && arrived.size() == num_ranks) wake_.notify_all();
  const auto limit = std::chrono::duration<double>(group.timeout_s());
  if (wake_.wait_for(lock, limit, [&] { return arrived.size() == num_ranks; })) return "";
  std::string missing;
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    if (arrived.count(static_cast<int>(rank)) == 0) missing += Text(' ', rank);
  }
  return Text(op, ": of group ", group.name(), ", rank(s)", missing, " did not arrive within ",
              group.timeout_s(),
              " s at the first call. Every rank must reach the same ops in the same order.");
}

}  // namespace jax_ep
