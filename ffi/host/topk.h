// Router output of either integer width.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace jax_ep::host {

// Writes the routed experts [K] of token t, -1 where a choice is unused.
inline void RoutedExperts(const TopkIds& ids, const Shape& shape, int32_t t, int32_t* experts) {
  const int64_t first = int64_t{t} * shape.top_k;
  for (int32_t k = 0; k < shape.top_k; ++k) {
    experts[k] = ids.is_int64
                     ? RoutedExpert(static_cast<const int64_t*>(ids.data)[first + k], shape.num_experts)
                     : RoutedExpert(static_cast<const int32_t*>(ids.data)[first + k], shape.num_experts);
  }
}

}  // namespace jax_ep::host
