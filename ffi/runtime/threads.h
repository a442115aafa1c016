// Threads for work that may block.
#pragma once

#include <functional>

namespace jax_ep {

// Runs `work` on an otherwise idle thread. Idle threads are reused, so there are never more threads than
// pieces of work at one time.
void RunOnOwnThread(std::function<void()> work);

}  // namespace jax_ep
