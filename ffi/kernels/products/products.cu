// Selection of the CUTLASS kernel for a grouped product.
#include <algorithm>

#include "kernels/products/products.h"
#include "kernels/products/sm90/groups.h"

namespace jax_ep::cuda {
namespace {

bool IsDeviceSm90() {
  int device = 0, major = 0, minor = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
         major == 9 && minor == 0;
}

template <Operands kOperands, typename F>
cudaError_t WithKernel(GroupedDot product, F&& f) {
  switch (product) {
    case GroupedDot::kRows:
      return f(ProductKernel<GroupedDot::kRows, kOperands>());
    case GroupedDot::kRowsTransposed:
      return f(ProductKernel<GroupedDot::kRowsTransposed, kOperands>());
    default:
      return f(ProductKernel<GroupedDot::kWeights, kOperands>());
  }
}

template <typename F>
cudaError_t WithKernel(Operands operands, GroupedDot product, F&& f) {
  switch (operands) {
    case Operands::kFp8:
      if (product == GroupedDot::kWeights) return f(ProductKernel<GroupedDot::kWeights, Operands::kFp8>());
      return f(ProductKernel<GroupedDot::kRowsTransposed, Operands::kFp8>());
    case Operands::kF16:
      return WithKernel<Operands::kF16>(product, f);
    default:
      return WithKernel<Operands::kBF16>(product, f);
  }
}

Operands OperandsOf(const GroupedDotParams& params) {
  if (params.row_scales != nullptr) return Operands::kFp8;
  return params.type == Float::kF16 ? Operands::kF16 : Operands::kBF16;
}

}  // namespace

bool SupportsProduct(const GroupedDotParams& params) {
  const auto aligned = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % kProductAlignment == 0;
  };
  const int vector = params.row_scales != nullptr ? kFp8Block : kProductAlignment / sizeof(uint16_t);
  return (params.type == Float::kF16 || params.type == Float::kBF16) && params.num_rows > 0 &&
         params.num_groups > 0 && params.inner > 0 && params.inner % vector == 0 && params.outer > 0 &&
         params.outer % vector == 0 && aligned(params.rows) && aligned(params.others) &&
         aligned(params.out) && aligned(params.scratch) && IsDeviceSm90();
}

cudaError_t LaunchProduct(const GroupedDotParams& params, int num_sms, cudaStream_t stream) {
  if (params.num_sms > 0) num_sms = std::min(num_sms, params.num_sms);
  GroupArrays groups;
  const cudaError_t error = SetUpGroups(params, num_sms, stream, groups);
  if (error != cudaSuccess) return error;
  return WithKernel(OperandsOf(params), params.product,
                    [&](auto kernel) { return kernel.Launch(params, groups, num_sms, stream); });
}

cudaError_t PreloadProducts() {
  if (!IsDeviceSm90()) return cudaSuccess;
  cudaError_t error = PreloadSetUp();
  for (Operands operands : {Operands::kF16, Operands::kBF16, Operands::kFp8}) {
    for (GroupedDot product : {GroupedDot::kRows, GroupedDot::kRowsTransposed, GroupedDot::kWeights}) {
      if (error != cudaSuccess) return error;
      error = WithKernel(operands, product, [](auto kernel) { return kernel.Preload(); });
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
