// Rows times their group's matrix.
#include "kernels/products/sm90/kernel.cuh"

namespace jax_ep::cuda::sm90 {

template struct ProductKernel<GroupedDot::kRows, Operands::kF16>;
template struct ProductKernel<GroupedDot::kRows, Operands::kBF16>;

}  // namespace jax_ep::cuda::sm90
