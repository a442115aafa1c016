// The kernels of engine sm90.
#pragma once

#include "kernels/products/engines.h"

namespace jax_ep::cuda::sm90 {

template <GroupedDot kProduct, Operands kOperands>
struct ProductKernel {
  // Launches the kernel on at most `num_sms` SMs, but on at least one cluster. An earlier kernel on the
  // stream fills the arrays.
  static cudaError_t Launch(const GroupedDotParams& params, const GroupArrays& groups, int num_sms,
                            cudaStream_t stream);
  static cudaError_t Preload();
};

}  // namespace jax_ep::cuda::sm90
