// Starts of the experts' blocks in a receive buffer.
#pragma once

#include "kernels/threads.cuh"

namespace jax_ep::cuda {

// Computes where the blocks of a rank's experts start [L + 1], by expert. `rows` are the experts' rows.
// Starts are clamped to the capacity, so that no sum overflows. That is safe because all rows past the
// capacity are dropped. Called by one warp.
__device__ inline void FindStarts(const Shape& shape, const int32_t* rows, int32_t* starts) {
  const int L = shape.num_local_experts(), lane = threadIdx.x % kWarp;
  const unsigned a = shape.alignment, capacity = shape.capacity;
  if (shape.has_fixed_blocks()) {  // together they are the capacity
#pragma unroll 1
    for (int i = lane; i <= L; i += kWarp) starts[i] = i * shape.alignment;
    return;
  }
  unsigned begin = 0;
#pragma unroll 1
  for (int first = 0; first < L; first += kWarp) {
    const int i = first + lane;
    // Computes Shape::BlockOf in 32 bits: rows and alignment are below 2^31.
    const unsigned n = i < L ? rows[i] : 0;
    unsigned end = min(a == 1 ? n : (n + a - 1) / a * a, capacity);
    for (int step = 1; step < kWarp; step *= 2) {
      const unsigned before = __shfl_up_sync(kAllLanes, end, step);
      if (lane >= step) end = min(end + before, capacity);
    }
    const unsigned before = __shfl_up_sync(kAllLanes, end, 1);
    if (i < L) starts[i] = static_cast<int>(min(begin + (lane == 0 ? 0 : before), capacity));
    begin = min(begin + __shfl_sync(kAllLanes, end, kWarp - 1), capacity);
  }
  if (lane == 0) starts[L] = static_cast<int>(begin);
}

}  // namespace jax_ep::cuda
