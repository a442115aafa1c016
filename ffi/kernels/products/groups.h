// The description of the groups that the kernels for tensor cores read.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/params.h"

namespace jax_ep::cuda {

// A group's sizes in CUTLASS's terms: the result D [M, N] is A [M, K] times B [K, N]. In memory it equals
// cute::Shape<int, int, int>.
struct GroupShape {
  int m, n, k;
};

// The layout of a group's scales in CUTLASS's terms: the numbers of scales along the rows of an operand (M or
// N) and along the sum (K), and the distance between scales in the direction that is not contiguous. In
// memory it equals the dynamic numbers of cutlass::detail::Sm1xxBlockwiseScaleConfig's layouts.
struct ScaleLayout {
  int along_rows, along_sum, batches, stride, batch_stride;
};

// Alignment of addresses and strides that TMA requires, in bytes.
constexpr int kProductAlignment = 16;

// Arrays [L] in the scratch of a call, preceded by the TMA descriptors of CUTLASS's kernels. There each block
// has its own descriptors, and modifies them when it proceeds to another group.
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
  ScaleLayout* a_scale_layouts;  // null unless the engine reads them
  ScaleLayout* b_scale_layouts;
  float* transposed_scales;  // of FP8 rows [N / 128, C], C rounded up to 4
  int32_t* next_tile;        // starts at 0; of kernels that hand out tiles, which have no descriptors
  void* descriptors;
  int64_t descriptor_bytes;
};

// In what form an engine reads the scales of FP8 rows, and of other FP8 operands.
enum class ScaleForm {
  kAsTheyAre,
  kWithLayouts,  // which are described, at the end of the descriptors' memory
  kTransposed,   // rows' scales are copied
};

// Describes the groups in the scratch, on the device: fills the arrays, and clears results that belong to no
// group's rows. Sizes are cut at the number of rows, or at rows_per_group, and negative sizes count as 0.
cudaError_t SetUpGroups(const GroupedDotParams& params, ScaleForm scale_form, int num_sms,
                        cudaStream_t stream, GroupArrays& groups);
cudaError_t PreloadSetUp();

// The most bytes of descriptors with layouts of scales: three for each of 192 SMs, and their alignment.
constexpr int64_t kMaxDescriptorBytes = (3 * 192 + 1) * 128;

// Returns whether the scratch of a call has room for layouts of scales next to the descriptors.
bool HasRoomForScaleLayouts(const GroupedDotParams& params);

}  // namespace jax_ep::cuda
