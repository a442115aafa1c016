// The products of 16-bit floats. They share a file because the compiler spends most of its time on headers.
#include "kernels/products/sm100/kernel.cuh"

namespace jax_ep::cuda::sm100 {

template struct ProductKernel<GroupedDot::kRows, Operands::kF16>;
template struct ProductKernel<GroupedDot::kRows, Operands::kBF16>;
template struct ProductKernel<GroupedDot::kRowsTransposed, Operands::kF16>;
template struct ProductKernel<GroupedDot::kRowsTransposed, Operands::kBF16>;
template struct ProductKernel<GroupedDot::kWeights, Operands::kF16>;
template struct ProductKernel<GroupedDot::kWeights, Operands::kBF16>;

}  // namespace jax_ep::cuda::sm100
