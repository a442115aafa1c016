// What rows of any type need of CUDA's cuda_bf16.h: found before it. The emulation has rows of float32 only.
#pragma once

#include <cstdint>
#include <cstdlib>

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16) { std::abort(); }
inline __nv_bfloat16 __float2bfloat16_rn(float) { std::abort(); }
