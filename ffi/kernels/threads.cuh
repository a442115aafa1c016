// Definitions that all kernels share: warps, groups of threads, and counters that hand out work.
#pragma once

#include <cuda_runtime.h>

#include "core/index.h"

// 1 if the code being compiled may use features of sm_90: bulk copies and clusters.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define JAX_EP_HAS_SM_90 1
#else
#define JAX_EP_HAS_SM_90 0
#endif

namespace jax_ep::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Return the largest or the smallest of the lanes' numbers, of 32 bits. Called by the whole warp.
template <typename T>
__device__ inline T WarpMax(T value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, value);
#else
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    value = max(value, __shfl_xor_sync(kAllLanes, value, lanes));
  }
  return value;
#endif
}
template <typename T>
__device__ inline T WarpMin(T value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_min_sync(kAllLanes, value);
#else
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    value = min(value, __shfl_xor_sync(kAllLanes, value, lanes));
  }
  return value;
#endif
}

// Returns the sum of the values of this lane and of those before it. Called by the whole warp.
template <typename T>
__device__ inline T SumUpToLane(T value) {
  for (int step = 1; step < kWarp; step *= 2) {
    const T before = __shfl_up_sync(kAllLanes, value, step);
    if (static_cast<int>(threadIdx.x) % kWarp >= step) value += before;
  }
  return value;
}

// Warps of a block that work together: all of them, or those that share a named barrier.
struct ThreadGroup {
  int thread;   // index of this thread
  int threads;  // a multiple of the warp size
  int barrier;  // 0 is the barrier of the whole block

  __device__ void Sync() const { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
};

__device__ inline ThreadGroup WholeBlock() {
  return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), 0};
}

// A counter that hands out tickets to warps. A ticket is a number from 0 on that stands for a piece of work.
// A warp that is free takes the next one, so no warp waits for a slower one.
struct TicketCounter {
  unsigned* next;
  // Requests a ticket. Nothing waits for the atomic before Broadcast.
  __device__ unsigned Request(int lane) const { return lane == 0 ? atomicAdd(next, 1u) : 0u; }
  __device__ static int Broadcast(unsigned requested) {
    return static_cast<int>(__shfl_sync(kAllLanes, requested, 0));
  }
  // Waits for a request whose ticket is not used. A counter must not be reset before that, because the atomic
  // could come later.
  __device__ static void Settle(unsigned requested) { (void)Broadcast(requested); }
  // Hands out all tickets anew. No request may be in flight.
  __device__ void Reset() const { *next = 0; }
};

}  // namespace jax_ep::cuda
