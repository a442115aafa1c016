// Rows as FP8: as jax_ep/_quantize.py makes them, bit for bit.
#pragma once

#include <cuda_fp8.h>

#include "kernels/rows/vector.cuh"

namespace jax_ep::cuda {

// A lane's vectors, of 16 bytes each, of one block of a row of T, as FP8. Neighbouring lanes hold the block
// together.
template <typename T, int kVectors = 1>
struct Quantized {
  static constexpr int kElements = 16 / sizeof(T);                     // of a vector
  static constexpr int kLanes = kFp8Block / kElements / kVectors;      // that hold a block
  using Values = std::conditional_t<kElements == 8, uint2, uint32_t>;  // of a vector
  Values values[kVectors];
  float scale;
};

// The bits of the largest magnitude of a block, as float32. The bits of magnitudes are in their order, NaN
// last. The whole warp.
template <typename T, int kVectors>
__device__ inline uint32_t LargestMagnitude(const uint4 (&vectors)[kVectors]) {
  constexpr uint32_t kMagnitude = sizeof(T) == 2 ? 0x7fff7fffu : 0x7fffffffu;
  uint32_t largest = 0;
  const auto take = [&](uint32_t word) {  // two at a time of 16 bits each
    largest = sizeof(T) == 2 ? __vmaxu2(largest, word) : max(largest, word);
  };
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    for (uint32_t word : {vectors[v].x, vectors[v].y, vectors[v].z, vectors[v].w}) take(word & kMagnitude);
  }
#pragma unroll
  for (int step = 1; step < Quantized<T, kVectors>::kLanes; step *= 2) {
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
template <typename T, int kVectors>
__device__ inline Quantized<T, kVectors> QuantizeBlock(const uint4 (&vectors)[kVectors], bool rounded) {
  constexpr float kFloor = 1e-4f, kScale = 1.0f / 448;
  constexpr uint32_t kInfinity = 0x7f800000, kMantissa = 0x7fffff;
  constexpr int kElements = Quantized<T, kVectors>::kElements;
  Quantized<T, kVectors> out;
  const uint32_t largest = LargestMagnitude<T>(vectors);
  float scale = __fmul_rn(fmaxf(__uint_as_float(largest), kFloor), kScale);
  if (rounded) scale = __uint_as_float((__float_as_uint(scale) + kMantissa) & ~kMantissa);
  if (largest >= kInfinity) scale = __uint_as_float(0x7fc00000);
  const float factor = Reciprocal(scale);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const Vector<T, kElements> row{vectors[v]};
    const auto convert_pair = [&](int j) -> uint32_t {
      const float2 scaled = {__fmul_rn(row[j], factor), __fmul_rn(row[j + 1], factor)};
      return __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
    };
    uint32_t words[kElements / 4];
#pragma unroll
    for (int i = 0; i < kElements; i += 4) words[i / 4] = convert_pair(i) | convert_pair(i + 2) << 16;
    memcpy(&out.values[v], words, sizeof(words));
  }
  out.scale = scale;
  return out;
}

}  // namespace jax_ep::cuda
