// Rows, transposed, times rows, group by group: the gradient of the matrices.
#include "kernels/products/sm90/kernel.cuh"

namespace jax_ep::cuda::sm90 {

template struct ProductKernel<GroupedDot::kWeights, Operands::kF16>;
template struct ProductKernel<GroupedDot::kWeights, Operands::kBF16>;

}  // namespace jax_ep::cuda::sm90
