// Grouped products of 16-bit floats and of FP8 on GPUs of compute capability 9.0, by CUTLASS kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace jax_ep::cuda {

// Returns true if these kernels support the product on the current device.
bool SupportsProduct(const GroupedDotParams& params);
cudaError_t LaunchProduct(const GroupedDotParams& params, int num_sms, cudaStream_t stream);
cudaError_t PreloadProducts();

}  // namespace jax_ep::cuda
