// Engine sm90: CUTLASS kernels for GPUs of compute capability 9.0.
#include "kernels/products/sm90/kernels.h"

namespace jax_ep::cuda {
namespace {

bool RunsOn(int major, int minor) { return major == 9 && minor == 0; }

cudaError_t LaunchProduct(const GroupedDotParams& params, int num_sms, cudaStream_t stream) {
  return LaunchProductKernel<sm90::ProductKernel>(params, false, num_sms, stream);
}

}  // namespace

const ProductEngine kSm90Engine{"sm90",   true,          RunsOn,
                                SuitsTma, LaunchProduct, PreloadProductKernels<sm90::ProductKernel>};

}  // namespace jax_ep::cuda
