// Loads of router output of either integer width.
#pragma once

#include "core/params.h"

namespace jax_ep::cuda {

// Returns the routed expert of token t's k-th choice, -1 if unused.
__device__ inline int32_t RoutedAt(const TopkIds& ids, const Shape& shape, int64_t t, int k) {
  const int64_t i = t * shape.top_k + k;
  return ids.is_int64 ? RoutedExpert(static_cast<const int64_t*>(ids.data)[i], shape.num_experts)
                      : RoutedExpert(static_cast<const int32_t*>(ids.data)[i], shape.num_experts);
}

// Loads the routed experts of `n` choices, from choice `first` on, into shared memory. Called by the whole
// block, which must synchronize before it uses them.
__device__ inline void StageExperts(const TopkIds& ids, int num_experts, int64_t first, int n,
                                    int16_t* experts) {
  const auto stage = [&](const auto* from) {
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      experts[i] = static_cast<int16_t>(RoutedExpert(from[first + i], num_experts));
    }
  };
  if (ids.is_int64) {
    stage(static_cast<const int64_t*>(ids.data));
  } else {
    stage(static_cast<const int32_t*>(ids.data));
  }
}

}  // namespace jax_ep::cuda
