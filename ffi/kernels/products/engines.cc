// The engines for the tensor cores of one architecture each.
#include "kernels/products/engines.h"

#include "kernels/products/sm90/few_rows.h"

namespace jax_ep::cuda {

#ifdef JAX_EP_PRODUCTS_SM90
// GPUs of compute capability 9.0.
static bool RunsOn90(int major, int minor) { return major == 9 && minor == 0; }

static cudaError_t Launch90(const GroupedDotParams& params, int num_sms, cudaStream_t stream) {
  if (sm90::SuitsFewRows(params)) {
    if (params.clears_rows) {  // by the set-up, whose description of the groups is not used
      GroupArrays groups;
      const cudaError_t error = SetUpGroups(params, ScaleForm::kAsTheyAre, num_sms, stream, groups);
      if (error != cudaSuccess) return error;
    }
    return sm90::LaunchFewRows(params, num_sms, stream);
  }
  return LaunchProductKernel<sm90::ProductKernel>(params, ScaleForm::kTransposed, num_sms, stream);
}

static cudaError_t Preload90() {
  const cudaError_t error = PreloadProductKernels<sm90::ProductKernel>();
  return error != cudaSuccess ? error : sm90::PreloadFewRows();
}

const ProductEngine kSm90Engine{"sm90", true, RunsOn90, SuitsTma, Launch90, Preload90};
#endif

#ifdef JAX_EP_PRODUCTS_SM100
// GPUs of compute capability 10.0 and 10.3.
static bool RunsOn100(int major, int minor) { return major == 10 && (minor == 0 || minor == 3); }

static bool Supports100(const GroupedDotParams& params) {
  return SuitsTma(params) && (params.row_scales == nullptr || HasRoomForScaleLayouts(params));
}

static cudaError_t Launch100(const GroupedDotParams& params, int num_sms, cudaStream_t stream) {
  const ScaleForm form = params.row_scales != nullptr ? ScaleForm::kWithLayouts : ScaleForm::kAsTheyAre;
  return LaunchProductKernel<sm100::ProductKernel>(params, form, num_sms, stream);
}

const ProductEngine kSm100Engine{"sm100",     false,     RunsOn100,
                                 Supports100, Launch100, PreloadProductKernels<sm100::ProductKernel>};
#endif

#ifdef JAX_EP_PRODUCTS_SM120
// FP8 on GPUs of compute capability 12.0 and 12.1. CUTLASS 4.2's builder for scaled blocks takes no 16-bit
// floats there, so engine `any` computes those.
static bool RunsOn120(int major, int minor) { return major == 12 && (minor == 0 || minor == 1); }

static bool Supports120(const GroupedDotParams& params) {
  return params.row_scales != nullptr && SuitsTma(params) && HasRoomForScaleLayouts(params);
}

static cudaError_t Launch120(const GroupedDotParams& params, int num_sms, cudaStream_t stream) {
  GroupArrays groups;
  const cudaError_t error = SetUpGroups(params, ScaleForm::kWithLayouts, num_sms, stream, groups);
  if (error != cudaSuccess) return error;
  const auto launch = params.product == GroupedDot::kWeights
                          ? sm120::ProductKernel<GroupedDot::kWeights, Operands::kFp8>::Launch
                          : sm120::ProductKernel<GroupedDot::kRowsTransposed, Operands::kFp8>::Launch;
  return launch(params, groups, num_sms, stream);
}

static cudaError_t Preload120() {
  cudaError_t error = PreloadSetUp();
  if (error == cudaSuccess) error = sm120::ProductKernel<GroupedDot::kWeights, Operands::kFp8>::Preload();
  if (error == cudaSuccess) {
    error = sm120::ProductKernel<GroupedDot::kRowsTransposed, Operands::kFp8>::Preload();
  }
  return error;
}

const ProductEngine kSm120Engine{"sm120", false, RunsOn120, Supports120, Launch120, Preload120};
#endif

}  // namespace jax_ep::cuda
