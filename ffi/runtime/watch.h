// One thread of this process that looks, five times a second, after what no other thread waits for: whether
// the other processes of its groups still live, and whatever else asks to be called.
#pragma once

#include <functional>

namespace jax_ep {

// Takes over a connected stream socket whose other end only that process holds. Nothing is sent on it: its
// end of file means that the process has ended.
void WatchProcess(int process, int descriptor);

// Whether a process has ended, long enough ago that the driver has stopped its kernels: nothing of it reads
// or writes memory any more. False for processes that are not watched.
bool IsGone(int process);

// Calls the function about five times a second, one after the other with all such functions, from now on
// until this process ends. It must neither throw nor block.
void OnTick(std::function<void()> tick);

}  // namespace jax_ep
