// The products of FP8: rows times their group's matrix, and the gradient of the matrices.
#include "kernels/products/sm100/kernel.cuh"

namespace jax_ep::cuda::sm100 {

template struct ProductKernel<GroupedDot::kRowsTransposed, Operands::kFp8>;
template struct ProductKernel<GroupedDot::kWeights, Operands::kFp8>;

}  // namespace jax_ep::cuda::sm100
