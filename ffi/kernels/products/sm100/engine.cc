// Engine sm100: CUTLASS kernels for GPUs of compute capability 10.0 and 10.3.
#include "kernels/products/sm100/kernels.h"

namespace jax_ep::cuda {
namespace {

bool RunsOn(int major, int minor) { return major == 10 && (minor == 0 || minor == 3); }

bool Supports(const GroupedDotParams& params) {
  return SuitsTma(params) && (params.row_scales == nullptr || HasRoomForScaleLayouts(params));
}

cudaError_t LaunchProduct(const GroupedDotParams& params, int num_sms, cudaStream_t stream) {
  return LaunchProductKernel<sm100::ProductKernel>(params, params.row_scales != nullptr, num_sms, stream);
}

}  // namespace

const ProductEngine kSm100Engine{"sm100",  false,         RunsOn,
                                 Supports, LaunchProduct, PreloadProductKernels<sm100::ProductKernel>};

}  // namespace jax_ep::cuda
