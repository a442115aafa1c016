// The engines of grouped products: what they have in common, the kernels for tensor cores, and the comparison
// of an engine with the plain one.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <vector>

#include "core/params.h"
#include "kernels/products/groups.h"
#include "kernels/products/products.h"

namespace jax_ep::cuda {

// An implementation of grouped products for some architectures.
struct ProductEngine {
  const char* name;
  // True if this project has run the kernels on a GPU. Otherwise they are checked before their first use.
  bool is_verified;
  // Returns whether the engine's kernels run on GPUs of this compute capability.
  bool (*runs_on)(int major, int minor);
  // Returns whether the engine computes a product, on a GPU on which its kernels run.
  bool (*supports)(const GroupedDotParams& params);
  cudaError_t (*launch)(const GroupedDotParams& params, int num_sms, cudaStream_t stream);
  cudaError_t (*preload)();
};

extern const ProductEngine kAnyEngine;  // computes all products on all GPUs
extern const ProductEngine kSm90Engine;
extern const ProductEngine kSm100Engine;
extern const ProductEngine kSm120Engine;

// The type of both operands' elements.
enum class Operands { kF16, kBF16, kFp8 };

// Returns the type of a product whose operands are not float32.
Operands OperandsOf(const GroupedDotParams& params);

// Returns whether TMA can load the operands of a product, which are 16-bit floats or FP8.
bool SuitsTma(const GroupedDotParams& params);

// The kernels of an engine. Launch runs a kernel on at most `num_sms` SMs, but on at least one cluster. An
// earlier kernel on the stream fills the arrays. Each architecture has kernels of its own
// (cmake/Products.cmake).
namespace sm90 {
template <GroupedDot kProduct, Operands kOperands>
struct ProductKernel {
  static cudaError_t Launch(const GroupedDotParams& params, const GroupArrays& groups, int num_sms,
                            cudaStream_t stream);
  static cudaError_t Preload();
};
}  // namespace sm90
namespace sm100 {
template <GroupedDot kProduct, Operands kOperands>
struct ProductKernel {
  static cudaError_t Launch(const GroupedDotParams& params, const GroupArrays& groups, int num_sms,
                            cudaStream_t stream);
  static cudaError_t Preload();
};
}  // namespace sm100
namespace sm120 {
template <GroupedDot kProduct, Operands kOperands>
struct ProductKernel {
  static cudaError_t Launch(const GroupedDotParams& params, const GroupArrays& groups, int num_sms,
                            cudaStream_t stream);
  static cudaError_t Preload();
};
}  // namespace sm120

// Calls f with the kernel of a product. FP8 does not support kRows, and takes the operands of kWeights
// transposed, because tensor cores take 8-bit operands in that layout only.
template <template <GroupedDot, Operands> class Kernel, typename F>
cudaError_t WithProductKernel(Operands operands, GroupedDot product, F&& f) {
  const bool of_weights = product == GroupedDot::kWeights,
             transposed = product == GroupedDot::kRowsTransposed;
  switch (operands) {
    case Operands::kFp8:
      return of_weights ? f(Kernel<GroupedDot::kWeights, Operands::kFp8>())
                        : f(Kernel<GroupedDot::kRowsTransposed, Operands::kFp8>());
    case Operands::kF16:
      return of_weights   ? f(Kernel<GroupedDot::kWeights, Operands::kF16>())
             : transposed ? f(Kernel<GroupedDot::kRowsTransposed, Operands::kF16>())
                          : f(Kernel<GroupedDot::kRows, Operands::kF16>());
    default:
      return of_weights   ? f(Kernel<GroupedDot::kWeights, Operands::kBF16>())
             : transposed ? f(Kernel<GroupedDot::kRowsTransposed, Operands::kBF16>())
                          : f(Kernel<GroupedDot::kRows, Operands::kBF16>());
  }
}

// Sets up the groups and launches the kernel of a product.
template <template <GroupedDot, Operands> class Kernel>
cudaError_t LaunchProductKernel(const GroupedDotParams& params, ScaleForm scale_form, int num_sms,
                                cudaStream_t stream) {
  GroupArrays groups;
  const cudaError_t error = SetUpGroups(params, scale_form, num_sms, stream, groups);
  if (error != cudaSuccess) return error;
  return WithProductKernel<Kernel>(OperandsOf(params), params.product, [&](auto kernel) {
    return kernel.Launch(params, groups, num_sms, stream);
  });
}

template <template <GroupedDot, Operands> class Kernel>
cudaError_t PreloadProductKernels() {
  cudaError_t error = PreloadSetUp();
  for (Operands operands : {Operands::kF16, Operands::kBF16, Operands::kFp8}) {
    for (GroupedDot product : {GroupedDot::kRows, GroupedDot::kRowsTransposed, GroupedDot::kWeights}) {
      if (error != cudaSuccess) return error;
      error = WithProductKernel<Kernel>(operands, product, [](auto kernel) { return kernel.Preload(); });
    }
  }
  return error;
}

// A kind of product that engines other than the plain one may compute.
struct ProductKind {
  Operands operands;
  GroupedDot product;
  const char* name;
  double tolerance;
};

constexpr int kNumProductKinds = 8;
extern const ProductKind kProductKinds[kNumProductKinds];

// Returns the comparison for each kind of product, on the current device, or up to the first fatal one.
std::vector<ProductCheck> CompareEngines(const ProductEngine& engine, const ProductEngine& plain);

}  // namespace jax_ep::cuda
