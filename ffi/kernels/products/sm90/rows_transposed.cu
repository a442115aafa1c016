// Rows times their group's matrix, transposed: the gradient of the rows.
#include "kernels/products/sm90/kernel.cuh"

namespace jax_ep::cuda::sm90 {

template struct ProductKernel<GroupedDot::kRowsTransposed, Operands::kF16>;
template struct ProductKernel<GroupedDot::kRowsTransposed, Operands::kBF16>;

}  // namespace jax_ep::cuda::sm90
