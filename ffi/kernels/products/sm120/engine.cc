// Engine sm120: CUTLASS kernels for FP8 on GPUs of compute capability 12.0 and 12.1. CUTLASS 4.2's
// builder for scaled blocks takes no 16-bit floats there, so engine `any` computes those.
#include "kernels/products/sm120/kernels.h"

namespace jax_ep::cuda {
namespace {

bool RunsOn(int major, int minor) { return major == 12 && (minor == 0 || minor == 1); }

bool Supports(const GroupedDotParams& params) {
  return params.row_scales != nullptr && SuitsTma(params) && HasRoomForScaleLayouts(params);
}

cudaError_t LaunchProduct(const GroupedDotParams& params, int num_sms, cudaStream_t stream) {
  GroupArrays groups;
  const cudaError_t error = SetUpGroups(params, true, num_sms, stream, groups);
  if (error != cudaSuccess) return error;
  const auto launch = params.product == GroupedDot::kWeights
                          ? sm120::ProductKernel<GroupedDot::kWeights>::Launch
                          : sm120::ProductKernel<GroupedDot::kRowsTransposed>::Launch;
  return launch(params, groups, num_sms, stream);
}

cudaError_t PreloadAll() {
  cudaError_t error = PreloadSetUp();
  if (error == cudaSuccess) error = sm120::ProductKernel<GroupedDot::kWeights>::Preload();
  if (error == cudaSuccess) error = sm120::ProductKernel<GroupedDot::kRowsTransposed>::Preload();
  return error;
}

}  // namespace

const ProductEngine kSm120Engine{"sm120", false, RunsOn, Supports, LaunchProduct, PreloadAll};

}  // namespace jax_ep::cuda
