// FP8 rows times their group's matrix, which is stored transposed.
#include "kernels/products/sm90/kernel.cuh"

namespace jax_ep::cuda::sm90 {

template struct ProductKernel<GroupedDot::kRowsTransposed, Operands::kFp8>;

}  // namespace jax_ep::cuda::sm90
