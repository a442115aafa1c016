// What rows of any type need of CUDA's cuda_fp16.h: found before it. The emulation has rows of float32 only.
#pragma once

#include <cstdint>
#include <cstdlib>

struct __half {
  uint16_t bits;
};
inline float __half2float(__half) { std::abort(); }
inline __half __float2half_rn(float) { std::abort(); }
