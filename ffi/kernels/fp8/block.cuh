// Conversion of rows to FP8, bit for bit the same as in jax_ep/_rows/fp8.py.
#pragma once

#include <cuda_fp8.h>

#include "kernels/rows/vector.cuh"

namespace jax_ep::cuda {

// The FP8 values of a lane's 16-byte vectors, all of one block of a row of T. Neighboring lanes hold one
// block.
template <typename T, int kVectors = 1>
struct Quantized {
  static constexpr int kElements = 16 / sizeof(T);                     // per vector
  static constexpr int kLanes = kFp8Block / kElements / kVectors;      // that hold a block
  using Values = std::conditional_t<kElements == 8, uint2, uint32_t>;  // per vector
  Values values[kVectors];
  float scale;
};

// Returns the bits of the largest magnitude of a block, as float32. Bit patterns of magnitudes are ordered
// like the magnitudes, with NaN last. Called by the whole warp.
template <typename T, int kVectors>
__device__ inline uint32_t LargestMagnitude(const uint4 (&vectors)[kVectors]) {
  constexpr uint32_t kMagnitude = sizeof(T) == 2 ? 0x7fff7fffu : 0x7fffffffu;
  uint32_t largest = 0;
  const auto take = [&](uint32_t word) {  // one 32-bit or two 16-bit magnitudes
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

// Returns __frcp_rn(scale) for a scale, which is NaN or far from both ends of float32's range. The steps are
// the same, but without the branches, which would make one vector wait for another.
__device__ inline float Reciprocal(float scale) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(scale));
  return __fmaf_rn(guess, -__fmaf_rn(scale, guess, -1.0f), guess);
}

// Returns the scale of a block whose largest magnitude has these bits as float32. NaN if it is not finite.
__device__ inline float ScaleOf(uint32_t largest, bool rounded, float floor = kFloorOfRows) {
  constexpr float kScale = 1.0f / 448;
  constexpr uint32_t kInfinity = 0x7f800000, kMantissa = 0x7fffff;
  float scale = __fmul_rn(fmaxf(__uint_as_float(largest), floor), kScale);
  if (rounded) scale = __uint_as_float((__float_as_uint(scale) + kMantissa) & ~kMantissa);
  return largest >= kInfinity ? __uint_as_float(0x7fc00000) : scale;
}

// Returns two elements times a factor as FP8. The first one is in the low bits.
__device__ inline uint32_t ConvertPair(float first, float second, float factor) {
  const float2 scaled = {__fmul_rn(first, factor), __fmul_rn(second, factor)};
  return __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
}

// Converts a block to FP8. A block that is not finite gets NaN as scale and values. Called by the whole warp;
// lanes past the end of the row may hold anything.
template <typename T, int kVectors>
__device__ inline Quantized<T, kVectors> QuantizeBlock(const uint4 (&vectors)[kVectors], bool rounded,
                                                       float floor = kFloorOfRows) {
  constexpr int kElements = Quantized<T, kVectors>::kElements;
  Quantized<T, kVectors> out;
  const float scale = ScaleOf(LargestMagnitude<T>(vectors), rounded, floor);
  const float factor = Reciprocal(scale);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const Vector<T, kElements> row{vectors[v]};
    const auto convert_pair = [&](int j) { return ConvertPair(row[j], row[j + 1], factor); };
    uint32_t words[kElements / 4];
#pragma unroll
    for (int i = 0; i < kElements; i += 4) words[i / 4] = convert_pair(i) | convert_pair(i + 2) << 16;
    memcpy(&out.values[v], words, sizeof(words));
  }
  out.scale = scale;
  return out;
}

}  // namespace jax_ep::cuda
