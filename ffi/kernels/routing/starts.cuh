// Where the blocks of experts start in a receive buffer.
#pragma once

#include "kernels/threads.cuh"

namespace jax_ep::cuda {

// By expert: where the blocks of a rank's experts start [L + 1]. One warp; `rows` are theirs.
__device__ inline void FindStarts(const Shape& shape, const int32_t* rows, int32_t* starts) {
  const int L = shape.num_local_experts(), lane = threadIdx.x % kWarp;
  int begin = 0;
#pragma unroll 1
  for (int first = 0; first < L; first += kWarp) {
    const int i = first + lane;
    // As Shape::BlockOf, in 32 bits.
    const unsigned a = shape.alignment, n = i < L ? rows[i] : 0;
    const int size = static_cast<int>(shape.has_fixed_blocks() ? a : (n + a - 1) / a * a);
    int end = size;
    for (int step = 1; step < kWarp; step *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end, step);
      if (lane >= step) end += before;
    }
    if (i < L) starts[i] = begin + end - size;
    begin += __shfl_sync(kAllLanes, end, kWarp - 1);
  }
  if (lane == 0) starts[L] = begin;
}

}  // namespace jax_ep::cuda
