// Threads for work that may block.
#pragma once

#include <functional>

namespace jax_ep {

// Runs `work` soon, on a thread that nothing else occupies. Threads are kept and used again, and
// never more are made than there was work at one time.
void RunOnOwnThread(std::function<void()> work);

}  // namespace jax_ep
