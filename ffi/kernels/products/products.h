// Grouped products of 16-bit floats and of FP8 on GPUs of compute capability 9.0, by kernels of CUTLASS.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace jax_ep::cuda {

// Whether these kernels can make a product, here.
bool SupportsProduct(const GroupedDotParams& params);
cudaError_t LaunchProduct(const GroupedDotParams& params, int num_sms, cudaStream_t stream);
cudaError_t PreloadProducts();

}  // namespace jax_ep::cuda
