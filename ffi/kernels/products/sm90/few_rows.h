// Products of groups of few rows, as in a decoding step.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/products/engines.h"

namespace jax_ep::cuda::sm90 {

// Returns whether the kernel for few rows computes a product, and is the faster one for it.
bool SuitsFewRows(const GroupedDotParams& params);

// Computes the product. Rows of the result that belong to no group stay as they are.
cudaError_t LaunchFewRows(const GroupedDotParams& params, int num_sms, cudaStream_t stream);
cudaError_t PreloadFewRows();

}  // namespace jax_ep::cuda::sm90
