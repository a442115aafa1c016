// What CUTLASS's kernels read of each group, and these kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cute/layout.hpp>

#include "core/params.h"

namespace jax_ep::cuda {

// In CUTLASS's words the result D [M, N] of a group is A [M, K] times B [K, N].
using GroupShape = cute::Shape<int, int, int>;

// What a bulk tensor copy wants of addresses and of strides, in bytes.
constexpr int kProductAlignment = 16;

// Arrays [L] in the scratch of a call, and before them the descriptors of the bulk tensor copies: each block
// has its own, and changes them whenever it comes to another group.
struct GroupArrays {
  const void** a;
  const void** b;
  void** d;
  int64_t* a_strides;  // in elements
  int64_t* b_strides;
  int64_t* d_strides;
  const float** a_scales;  // of FP8 operands
  const float** b_scales;
  GroupShape* shapes;
  void* descriptors;
  int64_t descriptor_bytes;
};

// Describes the groups in the scratch, on the device: fills the arrays, and clears what belongs to no group's
// rows. Sizes are taken as far as there are rows, and negative ones as none.
cudaError_t SetUpGroups(const GroupedDotParams& params, int num_sms, cudaStream_t stream,
                        GroupArrays& groups);
cudaError_t PreloadSetUp();

// What the elements of both operands are.
enum class Operands { kF16, kBF16, kFp8 };

// The kernel of one product. Of FP8 there is kRowsTransposed only, for tensor cores take 8-bit operands so.
template <GroupedDot kProduct, Operands kOperands>
struct ProductKernel {
  // On `num_sms` SMs at most, but for a cluster's. The arrays are filled by what runs before it on the
  // stream.
  static cudaError_t Launch(const GroupedDotParams& params, const GroupArrays& groups, int num_sms,
                            cudaStream_t stream);
  static cudaError_t Preload();
};

}  // namespace jax_ep::cuda
