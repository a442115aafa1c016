// Products of a row with several weights, and its dot products with rows of factors.
#pragma once

#include "kernels/rows/vector.cuh"

namespace jax_ep::cuda {

constexpr int kScaledRows = 3;       // output rows, and ...
constexpr int kColumnsInFlight = 4;  // ... columns of each, whose loads are in flight at a time

// Sets row rows[r] of `out` to weights[r] times the source, and dots[r], on all lanes, to the dot product of
// the source and row rows[r] of the factors. Skips r if rows[r] is negative. The source may be one of the
// output rows, because each column is read before it is written. Called by a warp.
template <typename T, int N>
__device__ void ScaleRow(const T* source, int width, const int (&rows)[kScaledRows],
                         const typename Sum<T>::Acc (&weights)[kScaledRows], const T* factors, T* out,
                         int lane, typename Sum<T>::Acc (&dots)[kScaledRows]) {
  using Acc = typename Sum<T>::Acc;
#pragma unroll
  for (int r = 0; r < kScaledRows; ++r) dots[r] = 0;
  for (int begin = lane * N; begin < width; begin += kColumnsInFlight * kWarp * N) {
    Vector<T, N> sources[kColumnsInFlight], vectors[kScaledRows][kColumnsInFlight];
#pragma unroll
    for (int i = 0; i < kColumnsInFlight; ++i) {
      const int column = begin + i * kWarp * N;
      sources[i] = Vector<T, N>::Load(source + column, column < width);
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
          const Acc value = sources[i][j];
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
  }
}

}  // namespace jax_ep::cuda
