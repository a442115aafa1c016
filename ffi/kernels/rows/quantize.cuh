// Rows as FP8: as jax_ep/_quantize.py makes them, bit for bit.
#pragma once

#include <cuda_fp8.h>

#include "kernels/rows/vector.cuh"

namespace jax_ep::cuda {

// 16 bytes of a row as FP8, and the scale of their block, which neighbouring lanes hold together.
template <typename T>
struct Quantized {
  static constexpr int kElements = 16 / sizeof(T);
  static constexpr int kLanes = kFp8Block / kElements;  // that hold a block
  uint32_t values[kElements / 4];                       // four each
  float scale;
};

// The bits of the largest magnitude of a block, as float32. The bits of magnitudes are in their order, NaN
// last. The whole warp.
template <typename T>
__device__ inline uint32_t LargestMagnitude(const uint4& bits) {
  const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
  uint32_t largest = 0;
  const auto take = [&](uint32_t word) {  // two at a time of 16 bits each
    largest = sizeof(T) == 2 ? __vmaxu2(largest, word & 0x7fff7fffu) : max(largest, word & 0x7fffffffu);
  };
  for (uint32_t word : words) take(word);
#pragma unroll
  for (int step = 1; step < Quantized<T>::kLanes; step *= 2) {
    take(__shfl_xor_sync(kAllLanes, largest, step));
  }
  if constexpr (sizeof(T) == 4) {
    return largest;
  } else {
    const auto half = static_cast<uint16_t>(max(largest & 0xffffu, largest >> 16));
    T value;
    memcpy(&value, &half, sizeof(value));
    return __float_as_uint(Widen(value));
  }
}

// __frcp_rn of scales, which are never near the ends of float32's range, or of NaN: the same steps without
// its branches, which would let one vector wait for another.
__device__ inline float Reciprocal(float scale) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(scale));
  return __fmaf_rn(guess, -__fmaf_rn(scale, guess, -1.0f), guess);
}

// Blocks that are not finite have NaN as scale and values. The whole warp; lanes past the row hold anything.
template <typename T>
__device__ inline Quantized<T> QuantizeVector(const Vector<T, Quantized<T>::kElements>& row, bool rounded) {
  constexpr float kFloor = 1e-4f, kScale = 1.0f / 448;
  constexpr uint32_t kInfinity = 0x7f800000, kMantissa = 0x7fffff;
  Quantized<T> out;
  const uint32_t largest = LargestMagnitude<T>(row.bits);
  float scale = __fmul_rn(fmaxf(__uint_as_float(largest), kFloor), kScale);
  if (rounded) scale = __uint_as_float((__float_as_uint(scale) + kMantissa) & ~kMantissa);
  if (largest >= kInfinity) scale = __uint_as_float(0x7fc00000);
  const float factor = Reciprocal(scale);
#pragma unroll
  for (int i = 0; i < out.kElements; i += 4) {
    const auto two = [&](int j) -> uint32_t {
      const float2 scaled = {__fmul_rn(row[j], factor), __fmul_rn(row[j + 1], factor)};
      return __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
    };
    out.values[i / 4] = two(i) | two(i + 2) << 16;
  }
  out.scale = scale;
  return out;
}

}  // namespace jax_ep::cuda
