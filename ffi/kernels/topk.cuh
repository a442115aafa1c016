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

}  // namespace jax_ep::cuda
