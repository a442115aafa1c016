// The CUTLASS kernel for each product of FP8 on sm_120: its tiles and its launch.
#pragma once

#include "kernels/products/blackwell.cuh"

namespace jax_ep::cuda::sm120 {

// The sizes of tiles, whose operands must fit in 99 KB of shared memory.
struct Tiling {
  using Arch = cutlass::arch::Sm120;
  using Mainloop = cutlass::gemm::KernelScheduleSm120Blockwise;
  using Epilogue = cutlass::epilogue::collective::EpilogueScheduleAuto;
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_128>;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
};

template <GroupedDot kProduct, Operands kOperands>
using ProductTypes = BlackwellTypes<Tiling, kProduct, kOperands>;

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

}  // namespace jax_ep::cuda::sm120
