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
  uint8_t values[kElements];
  float scale;
};

// Blocks that are not finite have NaN as scale and values. The whole warp; lanes past the row hold anything.
template <typename T>
__device__ inline Quantized<T> QuantizeVector(const Vector<T, Quantized<T>::kElements>& row, bool rounded) {
  constexpr float kFloor = 1e-4f, kScale = 1.0f / 448;
  constexpr uint32_t kInfinity = 0x7f800000, kMantissa = 0x7fffff;
  Quantized<T> out;
  uint32_t largest = 0;  // the bits of magnitudes are in their order, NaN last
#pragma unroll
  for (int i = 0; i < out.kElements; ++i) {
    largest = max(largest, __float_as_uint(static_cast<float>(row[i])) & 0x7fffffffu);
  }
#pragma unroll
  for (int step = 1; step < out.kLanes; step *= 2) {
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, step));
  }
  float scale = __fmul_rn(fmaxf(__uint_as_float(largest), kFloor), kScale);
  if (rounded) scale = __uint_as_float((__float_as_uint(scale) + kMantissa) & ~kMantissa);
  if (largest >= kInfinity) scale = __uint_as_float(0x7fc00000);
  const float factor = __frcp_rn(scale);
#pragma unroll
  for (int i = 0; i < out.kElements; ++i) {
    const float value = __fmul_rn(static_cast<float>(row[i]), factor);
    out.values[i] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
  }
  out.scale = scale;
  return out;
}

}  // namespace jax_ep::cuda
