// A thread of this process that checks five times a second whether the other processes of its groups still
// live, and then calls registered functions.
#pragma once

#include <functional>

namespace jax_ep {

// Takes over a connected stream socket whose other end is held by that process only. Nothing is sent on it.
// Its end of file means that the process has ended.
void WatchProcess(int process, int descriptor);

// Returns whether a process ended long enough ago that the driver has stopped its kernels, so that it neither
// reads nor writes memory any more. Returns false for processes that are not watched.
bool HasProcessEnded(int process);

// Calls the function about five times a second until this process ends. All such functions run on one thread,
// so they must neither throw nor block.
void OnTick(std::function<void()> tick);

}  // namespace jax_ep
