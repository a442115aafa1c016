// Sums of rows in float32 (float64 rows in float64), a block of columns at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/params.h"
#include "host/floats.h"

namespace jax_ep::host {

// Columns summed at a time, so that the accumulators stay in the first-level cache.
constexpr int64_t kBlock = 1024;

// Calls f with a null pointer of the C++ type behind a Float.
template <typename F>
void WithType(Float type, F&& f) {
  switch (type) {
    case Float::kF16:
      return f(static_cast<F16*>(nullptr));
    case Float::kBF16:
      return f(static_cast<BF16*>(nullptr));
    case Float::kF32:
      return f(static_cast<float*>(nullptr));
    case Float::kF64:
      return f(static_cast<double*>(nullptr));
  }
}

template <typename T, typename Acc>
T Round(Acc value) {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else {
    return FromFloat<T, float>(static_cast<float>(value));
  }
}

// Computes sum[i] += weight * row[first + i] for i < n.
template <typename Acc>
void AddRow(Float type, const void* row, int64_t first, int64_t n, Acc weight, Acc* __restrict sum) {
  WithType(type, [&](auto* null) {
    const auto* values = static_cast<decltype(null)>(const_cast<void*>(row)) + first;
    for (int64_t i = 0; i < n; ++i) sum[i] += weight * static_cast<Acc>(ToFloat(values[i]));
  });
}

template <typename Acc>
void StoreRow(Float type, const Acc* __restrict sum, int64_t first, int64_t n, void* row) {
  WithType(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    T* values = static_cast<T*>(row) + first;
    for (int64_t i = 0; i < n; ++i) values[i] = Round<T>(sum[i]);
  });
}

inline const void* RowAt(const void* data, int64_t row, int64_t num_elements, Float type) {
  return static_cast<const char*>(data) + row * num_elements * BytesOf(type);
}

inline void* RowAt(void* data, int64_t row, int64_t num_elements, Float type) {
  return static_cast<char*>(data) + row * num_elements * BytesOf(type);
}

// Computes out = weight * row. Returns the dot product of row and factor.
template <typename Acc>
Acc ScaleRow(Float type, const void* row, const void* factor, int64_t n, float weight, void* out) {
  Acc dot[8] = {};  // several sums, so that they can be vectorized
  WithType(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const T* __restrict values = static_cast<const T*>(row);
    const T* __restrict factors = static_cast<const T*>(factor);
    T* __restrict scaled = static_cast<T*>(out);
    const auto element = [&](int64_t i, Acc& sum) {
      const Acc value = static_cast<Acc>(ToFloat(values[i]));
      sum += static_cast<Acc>(ToFloat(factors[i])) * value;
      scaled[i] = Round<T>(static_cast<Acc>(weight) * value);
    };
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      for (int64_t j = 0; j < 8; ++j) element(i + j, dot[j]);
    }
    for (; i < n; ++i) element(i, dot[0]);
  });
  Acc sum{0};
  for (Acc part : dot) sum += part;
  return sum;
}

// Calls f with a null pointer of the accumulator type: float64 for float64 rows, float32 for others.
template <typename F>
void WithAccumulator(Float type, F&& f) {
  if (type == Float::kF64) {
    f(static_cast<double*>(nullptr));
  } else {
    f(static_cast<float*>(nullptr));
  }
}

}  // namespace jax_ep::host
