// Sums of rows in float32 (float64 rows in float64), a block of columns at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/floats.h"
#include "core/params.h"

namespace jax_ep::host {

// Columns summed at a time: the accumulators stay in the first-level cache.
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

// sum[i] += weight * row[first + i] for i < n.
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
    if constexpr (std::is_same_v<T, double>) {
      for (int64_t i = 0; i < n; ++i) values[i] = sum[i];
    } else {
      for (int64_t i = 0; i < n; ++i) values[i] = FromFloat<T, float>(static_cast<float>(sum[i]));
    }
  });
}

inline int64_t SizeOf(Float type) {
  int64_t size = 0;
  WithType(type, [&](auto* null) { size = sizeof(*null); });
  return size;
}

inline const void* RowAt(const void* data, int64_t row, int64_t num_elements, Float type) {
  return static_cast<const char*>(data) + row * num_elements * SizeOf(type);
}

inline void* RowAt(void* data, int64_t row, int64_t num_elements, Float type) {
  return static_cast<char*>(data) + row * num_elements * SizeOf(type);
}

// Calls f(accumulator type's null pointer): float64 rows are summed in float64, others in float32.
template <typename F>
void WithAccumulator(Float type, F&& f) {
  if (type == Float::kF64) {
    f(static_cast<double*>(nullptr));
  } else {
    f(static_cast<float*>(nullptr));
  }
}

}  // namespace jax_ep::host
