// 16-bit floats <-> float32 on the host, rounding to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace jax_ep {

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float ToFloat(float value) { return value; }
inline double ToFloat(double value) { return value; }
inline float ToFloat(BF16 value) { return FloatOf(static_cast<uint32_t>(value.bits) << 16); }

inline float ToFloat(F16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, NaN
    return FloatOf(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  // Avoids float32 subnormals, because XLA's threads flush them to zero.
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  const uint32_t bits = magnitude < 0x400u ? BitsOf(subnormal) : (magnitude << 13) + (112u << 23);
  return FloatOf(sign | bits);
}

template <typename T, typename Acc>
inline T FromFloat(Acc value) {
  return static_cast<T>(value);
}

template <>
inline BF16 FromFloat<BF16, float>(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return BF16{static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded)};
}

template <>
inline F16 FromFloat<F16, float>(float value) {
  const uint32_t bits = BitsOf(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;  // 65520 and above round to infinity
  } else if (magnitude < 0x38800000u) {
    // Subnormal half: adding 0.5 aligns the last kept bit with the last bit of a float.
    half = BitsOf(FloatOf(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return F16{static_cast<uint16_t>(sign | half)};
}

}  // namespace jax_ep
