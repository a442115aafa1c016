// The CUTLASS kernel for each product and operand type on sm_100: its tiles and its launch. Each tile is that
// of two SMs, whose tensor cores work on it together.
#pragma once

#include <cutlass/arch/arch.h>

#include <cutlass/epilogue/dispatch_policy.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>

#include "kernels/products/blackwell.cuh"

namespace jax_ep::cuda::sm100 {

// The sizes of tiles: kM x kN of the result, and kK elements of the sum per step.
template <typename Mainloop_, int kM, int kN, int kK>
struct Tiling {
  using Arch = cutlass::arch::Sm100;
  using Mainloop = Mainloop_;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecialized2Sm;
  using Tile = cute::Shape<cute::Int<kM>, cute::Int<kN>, cute::Int<kK>>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
};

// Two sums of 256 columns fill an SM's tensor memory, so that one is stored while the other one grows.
template <Operands kOperands>
struct TilingFor {
  using Type = Tiling<cutlass::gemm::KernelPtrArrayTmaWarpSpecialized2SmSm100, 256, 256, 64>;
};

// The sums of 128 elements are scaled in registers, so the tiles are smaller.
template <>
struct TilingFor<Operands::kFp8> {
  using Type = Tiling<cutlass::gemm::KernelPtrArrayTmaWarpSpecializedBlockwise2SmSm100, 256, 128, 128>;
};

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
