// By expert: what a token's rows at a rank become where each is scaled by its weight.
#pragma once

#include "kernels/push/find.cuh"
#include "kernels/rows/vector.cuh"

namespace jax_ep::cuda {

constexpr int kScaledRows = 3;       // rows, and
constexpr int kColumnsInFlight = 4;  // columns of each, whose loads are in flight at a time

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
      dots[r] = 0;
    }
    for (int begin = lane * N; begin < width; begin += kColumnsInFlight * kWarp * N) {
      Vector<T, N> tokens[kColumnsInFlight], vectors[kScaledRows][kColumnsInFlight];
#pragma unroll
      for (int i = 0; i < kColumnsInFlight; ++i) {
        const int column = begin + i * kWarp * N;
        tokens[i] = Vector<T, N>::Load(token + column, column < width);
      }
#pragma unroll
      for (int r = 0; r < kScaledRows; ++r) {
#pragma unroll
        for (int i = 0; i < kColumnsInFlight; ++i) {
          const int column = begin + i * kWarp * N;
          vectors[r][i] =
              Vector<T, N>::Load(factors + int64_t{rows[r]} * width + column, rows[r] >= 0 && column < width);
        }
      }
#pragma unroll
      for (int r = 0; r < kScaledRows; ++r) {
#pragma unroll
        for (int i = 0; i < kColumnsInFlight; ++i) {
          const int column = begin + i * kWarp * N;
          if (rows[r] < 0 || column >= width) break;
          Acc scaled[N];
#pragma unroll
          for (int j = 0; j < N; ++j) {
            const Acc value = tokens[i][j];
            dots[r] += static_cast<Acc>(vectors[r][i][j]) * value;
            scaled[j] = weights[r] * value;
          }
          Vector<T, N>::Store(out + int64_t{rows[r]} * width + column, scaled);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kScaledRows; ++r) {
      for (int step = kWarp / 2; step > 0; step /= 2) dots[r] += __shfl_xor_sync(kAllLanes, dots[r], step);
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
