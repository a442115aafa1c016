// Loads and stores of rows of any summable type. Arithmetic is in float32 (float64 for float64 rows).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/params.h"
#include "kernels/ptx/memory.cuh"

namespace jax_ep::cuda {

// Calls f with a null pointer to the type that a Float names.
template <typename F>
auto WithType(Float type, F&& f) {
  switch (type) {
    case Float::kF16:
      return f(static_cast<__half*>(nullptr));
    case Float::kBF16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    case Float::kF32:
      return f(static_cast<float*>(nullptr));
    default:
      return f(static_cast<double*>(nullptr));
  }
}

template <typename T>
struct Sum {
  using Acc = float;
};
template <>
struct Sum<double> {
  using Acc = double;
};

__device__ inline float Widen(float v) { return v; }
__device__ inline double Widen(double v) { return v; }
__device__ inline float Widen(__half v) { return __half2float(v); }
__device__ inline float Widen(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T, typename Acc>
__device__ inline T Narrow(Acc v) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(static_cast<float>(v));
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(v));
  } else {
    return static_cast<T>(v);
  }
}

// Returns an element of an array whose type is known only at run time.
template <typename Acc>
__device__ inline Acc LoadAs(Float type, const void* data, int64_t i) {
  switch (type) {
    case Float::kF16:
      return Widen(static_cast<const __half*>(data)[i]);
    case Float::kBF16:
      return Widen(static_cast<const __nv_bfloat16*>(data)[i]);
    case Float::kF32:
      return static_cast<const float*>(data)[i];
    default:
      return static_cast<Acc>(static_cast<const double*>(data)[i]);
  }
}

template <typename Acc>
__device__ inline void StoreAs(Float type, void* data, int64_t i, Acc value) {
  switch (type) {
    case Float::kF16:
      static_cast<__half*>(data)[i] = Narrow<__half>(value);
      break;
    case Float::kBF16:
      static_cast<__nv_bfloat16*>(data)[i] = Narrow<__nv_bfloat16>(value);
      break;
    case Float::kF32:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      break;
    default:
      static_cast<double*>(data)[i] = value;
  }
}

// Returns a * b + c, rounded once.
__device__ inline float MultiplyAdd(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ inline double MultiplyAdd(double a, double b, double c) { return __fma_rn(a, b, c); }

// N elements of T: as many as fit in 16 bytes, or one if rows are not aligned to that. The bits are unpacked
// element by element on use. If they were unpacked right after the load, every load would have to complete
// before the next one is issued.
template <typename T, int N>
struct Vector {
  using Bits = std::conditional_t<N * sizeof(T) == 16, uint4, T>;
  static_assert(sizeof(Bits) == N * sizeof(T));
  Bits bits;

  // Loads through the L2 cache of the memory's owner, because a peer may have written the row.
  __device__ static Vector Load(const T* address, bool enabled = true) {
    if constexpr (N * sizeof(T) == 16) {
      return {LoadRow(reinterpret_cast<const uint4*>(address), enabled)};
    } else {
      return {enabled ? __ldcg(address) : T{}};
    }
  }

  __device__ auto operator[](int i) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
      // A bfloat16 is the upper half of a float32, so this takes one instruction.
      const uint32_t pair = reinterpret_cast<const uint32_t*>(&bits)[i / 2];
      return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    }
    T value;
    memcpy(&value, reinterpret_cast<const char*>(&bits) + i * sizeof(T), sizeof(T));
    return Widen(value);
  }

  template <typename Acc>
  __device__ static Vector Rounded(const Acc (&numbers)[N]) {
    T values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = Narrow<T>(numbers[i]);
    Vector vector;
    memcpy(&vector.bits, values, sizeof(Bits));
    return vector;
  }
  // Rounds the numbers and stores them.
  template <typename Acc>
  __device__ static void Store(T* address, const Acc (&numbers)[N]) {
    *reinterpret_cast<Bits*>(address) = Rounded(numbers).bits;
  }
};

}  // namespace jax_ep::cuda
