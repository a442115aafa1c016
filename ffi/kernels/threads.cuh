// What all kernels share: warps, teams of them, and dealers of work.
#pragma once

#include <cuda_runtime.h>

#include "core/index.h"

// Whether what is being compiled may use what came with sm_90: bulk copies and clusters.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define JAX_EP_HAS_SM_90 1
#else
#define JAX_EP_HAS_SM_90 0
#endif

namespace jax_ep::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Warps of a block that work together: all of them, or those that a barrier of their own counts.
struct Team {
  int thread;   // this one's number
  int threads;  // a multiple of a warp's
  int barrier;  // 0 is that of the whole block

  __device__ void Sync() const { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
};

__device__ inline Team WholeBlock() {
  return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), 0};
}

// Deals tickets, which are numbers from 0 on that stand for work, to warps, so that none waits for one that
// has more to do.
struct TicketCounter {
  unsigned* next;
  // Asks for a ticket. Nothing waits for it until it is shown.
  __device__ unsigned Request(int lane) const { return lane == 0 ? atomicAdd(next, 1u) : 0u; }
  __device__ static int Broadcast(unsigned requested) {
    return static_cast<int>(__shfl_sync(kAllLanes, requested, 0));
  }
};

}  // namespace jax_ep::cuda
