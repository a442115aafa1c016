// The description of the groups that CUTLASS's kernels read, and the launch of these kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cute/layout.hpp>

#include "core/params.h"

namespace jax_ep::cuda {

// A group's sizes in CUTLASS's terms: the result D [M, N] is A [M, K] times B [K, N].
using GroupShape = cute::Shape<int, int, int>;

// Alignment of addresses and strides that TMA requires, in bytes.
constexpr int kProductAlignment = 16;

// Arrays [L] in the scratch of a call, preceded by the TMA descriptors. Each block has its own descriptors,
// and modifies them when it proceeds to another group.
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

// Describes the groups in the scratch, on the device: fills the arrays, and clears results that belong to no
// group's rows. Sizes are cut at the number of rows, and negative sizes count as 0.
cudaError_t SetUpGroups(const GroupedDotParams& params, int num_sms, cudaStream_t stream,
                        GroupArrays& groups);
cudaError_t PreloadSetUp();

// The type of both operands' elements.
enum class Operands { kF16, kBF16, kFp8 };

// The kernel of one product. FP8 does not support kRows, and takes the operands of kWeights transposed,
// because tensor cores take 8-bit operands in that layout only.
template <GroupedDot kProduct, Operands kOperands>
struct ProductKernel {
  // Launches the kernel on at most `num_sms` SMs, but on at least one cluster. An earlier kernel on the
  // stream fills the arrays.
  static cudaError_t Launch(const GroupedDotParams& params, const GroupArrays& groups, int num_sms,
                            cudaStream_t stream);
  static cudaError_t Preload();
};

}  // namespace jax_ep::cuda
