// Sums of rows by warps, one slice of columns at a time.
#pragma once

#include "kernels/rows/vector.cuh"

namespace jax_ep::cuda {

constexpr int kSumRows = 4;     // rows whose loads are in flight at a time
constexpr int kSumVectors = 2;  // 16-byte loads per row and thread
// Values for sums that mostly have few rows: two rows keep as many loads in flight.
constexpr int kFewRows = 2;
constexpr int kFewRowsVectors = 4;

template <int N, int kVectors = kSumVectors>
constexpr int kSlice = kWarp * kVectors * N;  // columns

// The rows of one sum. Each lane in `lanes` holds the address and the factor of one row; rows are added in
// the order of the lanes.
template <typename T>
struct SumInputs {
  const T* row;
  float factor;
  unsigned lanes;
};

// A shift that returns the element unchanged.
struct NoShift {
  template <typename Acc>
  __device__ Acc operator()(int, int, Acc value) const {
    return value;
  }
};

// Sums the slice of the rows that begins at column `first`, kRows rows at a time. shift(lane, column, value)
// returns the value to use for an element of that lane's row.
template <typename T, int N, int kRows = kSumRows, int kVectors = kSumVectors, typename Shift = NoShift>
__device__ void SumSlice(const SumInputs<T>& inputs, int first, int width, int lane,
                         typename Sum<T>::Acc (&total)[kVectors][N], Shift shift = {}) {
  using Acc = typename Sum<T>::Acc;
  for (unsigned remaining = inputs.lanes; remaining != 0;) {
    Vector<T, N> vectors[kRows][kVectors];
    unsigned next = remaining;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool more = next != 0;
      const T* row = reinterpret_cast<const T*>(__shfl_sync(
          kAllLanes, reinterpret_cast<unsigned long long>(inputs.row), more ? __ffs(next) - 1 : 0));
      next &= next - 1;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int column = first + (v * kWarp + lane) * N;
        vectors[i][v] = Vector<T, N>::Load(row + column, more && column < width);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (remaining == 0) break;
      const int from = __ffs(remaining) - 1;
      const Acc factor = __shfl_sync(kAllLanes, inputs.factor, from);
      remaining &= remaining - 1;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const int column = first + (v * kWarp + lane) * N + j;
          const Acc value = shift(from, column, static_cast<Acc>(vectors[i][v][j]));
          total[v][j] = MultiplyAdd(factor, value, total[v][j]);
        }
      }
    }
  }
}

// Adds a slice of row t of each bias.
template <typename T, int N, int kVectors = kSumVectors>
__device__ void AddBiases(const Bias* biases, int num_biases, int t, int first, int width, int lane,
                          typename Sum<T>::Acc (&total)[kVectors][N]) {
  for (int b = 0; b < num_biases; ++b) {
    for (int v = 0; v < kVectors; ++v) {
      const int column = first + (v * kWarp + lane) * N;
      for (int j = 0; j < N && column < width; ++j) {
        total[v][j] +=
            LoadAs<typename Sum<T>::Acc>(biases[b].type, biases[b].data, int64_t{t} * width + column + j);
      }
    }
  }
}

// Rounds a slice of a sum and stores it.
template <typename T, int N, int kVectors = kSumVectors>
__device__ void StoreSlice(T* row, int first, int width, int lane,
                           const typename Sum<T>::Acc (&total)[kVectors][N]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + (v * kWarp + lane) * N;
    if (column < width) Vector<T, N>::Store(row + column, total[v]);
  }
}

// Calls f with an integral constant: the number of elements of T in 16 bytes, or 1 if rows are not a multiple
// of that.
template <typename T, typename F>
__device__ void WithVector(int64_t width, F&& f) {
  constexpr int kFull = 16 / sizeof(T);
  if (width % kFull == 0) {
    f(std::integral_constant<int, kFull>());
  } else {
    f(std::integral_constant<int, 1>());
  }
}

}  // namespace jax_ep::cuda
