// The launch of the CUTLASS kernel for each product and operand type on sm_100.
#pragma once

#include "kernels/products/blackwell.cuh"
#include "kernels/products/sm100/kernels.h"
#include "kernels/products/sm100/tilings.h"

namespace jax_ep::cuda::sm100 {

template <GroupedDot kProduct, Operands kOperands>
using ProductTypes = BlackwellTypes<typename TilingFor<kOperands>::Type, kProduct, kOperands>;

template <GroupedDot kProduct, Operands kOperands>
cudaError_t ProductKernel<kProduct, kOperands>::Preload() {
  return PreloadCutlass<ProductTypes<kProduct, kOperands>>();
}

template <GroupedDot kProduct, Operands kOperands>
cudaError_t ProductKernel<kProduct, kOperands>::Launch(const GroupedDotParams& params,
                                                       const GroupArrays& groups, int num_sms,
                                                       cudaStream_t stream) {
  return LaunchCutlass<ProductTypes<kProduct, kOperands>>(params, groups, num_sms, stream);
}

}  // namespace jax_ep::cuda::sm100
