// FP8 rows, transposed, times FP8 rows, group by group: the gradient of the matrices.
#include "kernels/products/sm90/kernel.cuh"

namespace jax_ep::cuda::sm90 {

template struct ProductKernel<GroupedDot::kWeights, Operands::kFp8>;

}  // namespace jax_ep::cuda::sm90
