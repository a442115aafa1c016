// What all kernels share: warps, teams of them, dealers of work, and where a token's rows lie.
#pragma once

#include <cuda_runtime.h>

#include "core/control.h"

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
struct Dealer {
  unsigned* next;
  // Asks for a ticket. Nothing waits for it until it is shown.
  __device__ unsigned Take(int lane) const { return lane == 0 ? atomicAdd(next, 1u) : 0u; }
  __device__ static int Show(unsigned asked) { return static_cast<int>(__shfl_sync(kAllLanes, asked, 0)); }
};

// What a handle says of a token's row that this lane of a warp stands for.
struct LoadedPlace {
  int row;     // -1: none
  int expert;  // of the choice that it is for, where rows are those of choices
};

__device__ inline LoadedPlace LoadPlace(const Shape& shape, const HandleArrays& handle, int t, int lane) {
  LoadedPlace place{-1, 0};
  const int width = shape.rows_per_token();
  if (lane < width) place.row = handle.sent_rows[int64_t{t} * width + lane];
  if (lane < width && shape.has_row_per_choice()) place.expert = handle.topk_idx[int64_t{t} * width + lane];
  return place;
}

// The row that this lane stands for, -1 none, and the rank that holds it: 0 where lanes stand for nothing,
// for it is used as an index before rows are looked at.
struct Place {
  int row;
  int rank;
};

__device__ inline Place FindPlace(const Shape& shape, const LoadedPlace& place, int lane) {
  if (lane >= shape.rows_per_token()) return {-1, 0};
  const bool by_choice = shape.has_row_per_choice();
  if (by_choice && !IsExpert(place.expert, shape.num_experts)) return {-1, 0};
  return {IsRow(place.row, shape.capacity) ? place.row : -1, by_choice ? shape.rank_of(place.expert) : lane};
}

__device__ inline Place FindPlace(const Shape& shape, const HandleArrays& handle, int t, int lane) {
  return FindPlace(shape, LoadPlace(shape, handle, t, lane), lane);
}

}  // namespace jax_ep::cuda
