// Rounding to FP8 (e4m3) on the host, to the same bits as jax_ep/_rows/fp8.py.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/params.h"
#include "host/floats.h"

namespace jax_ep::host {

// Returns the value of e4m3 next to a number whose magnitude is at most 448, or NaN.
inline float RoundToFp8(float value) {
  const uint32_t bits = BitsOf(value), sign = bits & 0x80000000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return value;
  if (magnitude < 0x3c800000u) {
    // Below 2^-6 the values are multiples of 2^-9, the last bit of a float of this size.
    constexpr float kAligning = 16384.0f;
    return FloatOf(BitsOf((FloatOf(magnitude) + kAligning) - kAligning) | sign);
  }
  constexpr uint32_t kDropped = 20;  // bits of the mantissa that e4m3 does not have
  const uint32_t rounded = magnitude + (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1u);
  return FloatOf((rounded >> kDropped << kDropped) | sign);
}

// Rounds n numbers, a multiple of kFp8Block, as if they were sent as FP8 and received. A block that is not
// finite becomes NaN.
inline void RoundTripFp8(float* numbers, int64_t n, bool rounds_scale) {
  constexpr float kScale = 1.0f / 448;
  for (float* block = numbers; block < numbers + n; block += kFp8Block) {
    uint32_t largest = 0;
    for (int i = 0; i < kFp8Block; ++i) largest = std::max(largest, BitsOf(block[i]) & 0x7fffffffu);
    if (largest >= 0x7f800000u) {
      std::fill_n(block, kFp8Block, FloatOf(0x7fc00000u));
      continue;
    }
    float scale = std::max(FloatOf(largest), kFloorOfRows) * kScale;
    if (rounds_scale) scale = FloatOf((BitsOf(scale) + 0x7fffffu) & ~0x7fffffu);
    const float factor = 1.0f / scale;
    for (int i = 0; i < kFp8Block; ++i) block[i] = RoundToFp8(block[i] * factor) * scale;
  }
}

}  // namespace jax_ep::host
