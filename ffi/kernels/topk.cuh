// Reads router output of either integer width.
#pragma once

#include "core/params.h"

namespace jax_ep::cuda {

// The routed expert of token t's k-th choice, -1 unused.
__device__ inline int32_t RoutedAt(const TopkIds& ids, const Shape& shape, int64_t t, int k) {
  const int64_t first = t * shape.top_k;
  return ids.is_int64 ? RoutedExpert(static_cast<const int64_t*>(ids.data) + first, k, shape.num_experts)
                      : RoutedExpert(static_cast<const int32_t*>(ids.data) + first, k, shape.num_experts);
}

// A token's choices are compared in shared memory: the ids of `n` choices, from choice `first` on, there, -1
// where they are no expert's. The whole block, which must synchronise before they are read.
__device__ inline void StageIds(const TopkIds& ids, int num_experts, int64_t first, int n, int16_t* staged) {
  const auto stage = [&](const auto* from) {
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      const auto id = from[first + i];
      staged[i] = static_cast<int16_t>(id < 0 || id >= num_experts ? -1 : id);
    }
  };
  if (ids.is_int64) {
    stage(static_cast<const int64_t*>(ids.data));
  } else {
    stage(static_cast<const int32_t*>(ids.data));
  }
}

// The routed expert of the i-th of staged choices, the first of which is a token's first.
__device__ inline int RoutedStaged(const int16_t* staged, int i, int top_k) {
  const int expert = staged[i];
  bool repeated = false;
#pragma unroll 8
  for (int j = i - i % top_k; j < i; ++j) repeated |= staged[j] == expert;
  return repeated ? -1 : expert;
}

}  // namespace jax_ep::cuda
