// The kernels of engine sm120, which has the products of FP8.
#pragma once

#include "kernels/products/engines.h"

namespace jax_ep::cuda::sm120 {

template <GroupedDot kProduct>
struct ProductKernel {
  // Launches the kernel on at most `num_sms` SMs. An earlier kernel on the stream fills the arrays.
  static cudaError_t Launch(const GroupedDotParams& params, const GroupArrays& groups, int num_sms,
                            cudaStream_t stream);
  static cudaError_t Preload();
};

}  // namespace jax_ep::cuda::sm120
