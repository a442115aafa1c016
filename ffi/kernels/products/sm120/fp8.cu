// The products of FP8 on sm_120: rows times their group's matrix, and the gradient of the matrices.
#include "kernels/products/blackwell.cuh"
#include "kernels/products/sm120/kernels.h"

namespace jax_ep::cuda::sm120 {

// The sizes of tiles, whose operands must fit in 99 KB of shared memory.
struct Tiling {
  using Arch = cutlass::arch::Sm120;
  using Mainloop = cutlass::gemm::KernelScheduleSm120Blockwise;
  using Epilogue = cutlass::epilogue::collective::EpilogueScheduleAuto;
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_128>;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
};

template <GroupedDot kProduct>
using ProductTypes = BlackwellTypes<Tiling, kProduct, Operands::kFp8>;

template <GroupedDot kProduct>
cudaError_t ProductKernel<kProduct>::Preload() {
  return PreloadCutlass<ProductTypes<kProduct>>();
}

template <GroupedDot kProduct>
cudaError_t ProductKernel<kProduct>::Launch(const GroupedDotParams& params, const GroupArrays& groups,
                                            int num_sms, cudaStream_t stream) {
  return LaunchCutlass<ProductTypes<kProduct>>(params, groups, num_sms, stream);
}

template struct ProductKernel<GroupedDot::kRowsTransposed>;
template struct ProductKernel<GroupedDot::kWeights>;

}  // namespace jax_ep::cuda::sm120
