// By expert: what a token's rows at a rank become where each is scaled by its weight.
#pragma once

#include "kernels/push/find.cuh"
#include "kernels/rows/scale.cuh"

namespace jax_ep::cuda {

// Each row becomes its weight times the token's, which lies in the first of them; and the weight's gradient
// the dot product of the token's row with the factors. Some rows at a time, the first of all in the end: each
// of its columns is read before it is written.
template <typename T, int N>
__device__ void ScaleRows(const PushArgs& args, int p, const Spread& spread, int lane) {
  using Acc = typename Sum<T>::Acc;
  const int width = static_cast<int>(args.payloads[p].row_bytes / sizeof(T));
  T* const out = reinterpret_cast<T*>(args.payloads[p].out);
  const T* const factors = static_cast<const T*>(args.factors[p]);
  const T* const token = out + int64_t{__shfl_sync(kAllLanes, spread.row, __ffs(spread.lanes) - 1)} * width;
  for (unsigned left = spread.lanes; left != 0;) {
    int rows[kScaledRows];
    Acc weights[kScaledRows], dots[kScaledRows];
#pragma unroll
    for (int r = 0; r < kScaledRows; ++r) {
      const int from = left == 0 ? 0 : 31 - __clz(left);
      rows[r] = __shfl_sync(kAllLanes, left == 0 ? -1 : spread.row, from);
      left &= ~(1u << from);
      weights[r] = rows[r] >= 0 ? args.row_weights[rows[r]] : 0.0f;
    }
    ScaleRow<T, N>(token, width, rows, weights, factors, out, lane, dots);
#pragma unroll
    for (int r = 0; r < kScaledRows; ++r) {
      if (lane != 0 || rows[r] < 0) continue;
      float& gradient = args.arrived_weights[rows[r]];
      gradient = static_cast<float>(p == 0 ? dots[r] : static_cast<Acc>(gradient) + dots[r]);
    }
  }
}

template <typename T>
__device__ void ScaleArray(const PushArgs& args, int p, const Spread& spread, int lane) {
  if (args.payloads[p].row_bytes % 16 == 0) {
    ScaleRows<T, 16 / sizeof(T)>(args, p, spread, lane);
  } else {
    ScaleRows<T, 1>(args, p, spread, lane);
  }
}

}  // namespace jax_ep::cuda
