// Sets up a product on the device: writes the description of the groups, and clears results that the
// product's kernel does not write. All architectures use it.
#include <algorithm>
#include <type_traits>

#include "kernels/launch/launch.h"
#include "kernels/products/groups.h"
#include "kernels/threads.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = 512;

// Returns whether the operands are FP8 [M, C] and [N, C], in which groups begin at multiples of 128.
__host__ __device__ bool HasTransposedRows(const GroupedDotParams& params) {
  return params.row_scales != nullptr && params.product == GroupedDot::kWeights;
}

// Returns whether rows of the result are cleared.
__host__ __device__ bool ClearsRows(const GroupedDotParams& params) {
  return params.clears_rows && params.product != GroupedDot::kWeights;
}

// Describes a group: the `rows` rows from `first` on. CUTLASS leaves a tile undefined if there is nothing to
// sum over, so a group without rows gets no tiles.
__device__ void DescribeGroup(const GroupedDotParams& params, const GroupArrays& groups, int group,
                              int64_t first, int rows) {
  constexpr int64_t kOut = sizeof(uint16_t);
  const int64_t element = params.row_scales != nullptr ? 1 : kOut;
  const int64_t inner = params.inner, outer = params.outer, width = params.matrix_width;
  const auto* a = static_cast<const std::byte*>(params.rows) + first * inner * element;
  const auto* others = static_cast<const std::byte*>(params.others);
  auto* out = static_cast<std::byte*>(params.out);
  const bool of_weights = params.product == GroupedDot::kWeights;
  groups.a[group] = a;
  groups.b[group] = of_weights ? others + first * outer * element
                               : params.OfGroup(others, params.redundant, group, inner * width * element);
  groups.d[group] = of_weights ? params.OfGroup(out, params.redundant, group, inner * outer * kOut)
                               : out + first * outer * kOut;
  groups.a_strides[group] = inner;
  groups.b_strides[group] = params.product == GroupedDot::kRowsTransposed ? inner : width;
  groups.d_strides[group] = outer;
  if (params.row_scales != nullptr) {
    groups.a_scales[group] = params.row_scales + first * (inner / kFp8Block);
    groups.b_scales[group] = params.OfGroup(params.other_scales, params.redundant_scales, group,
                                            (width / kFp8Block) * (inner / kFp8Block));
  }
  if (HasTransposedRows(params)) {
    groups.a[group] = static_cast<const std::byte*>(params.rows) + first;
    groups.b[group] = others + first;
    groups.a_strides[group] = groups.b_strides[group] = params.num_rows;
    groups.a_scales[group] = params.row_scales + first / kFp8Block * inner;
    groups.b_scales[group] = params.other_scales + first / kFp8Block * outer;
  }
  const GroupShape shape = rows == 0    ? GroupShape{0, 0, 0}
                           : of_weights ? GroupShape{params.inner, params.outer, rows}
                                        : GroupShape{rows, params.outer, params.inner};
  groups.shapes[group] = shape;
  if (groups.a_scale_layouts == nullptr) return;
  const int along_sum = (shape.k + kFp8Block - 1) / kFp8Block;
  // Scales of columns lie side by side, those of rows and matrices follow the sum.
  if (of_weights) {
    groups.a_scale_layouts[group] = {shape.m, along_sum, 1, params.inner, 0};
    groups.b_scale_layouts[group] = {shape.n, along_sum, 1, params.outer, 0};
  } else {
    groups.a_scale_layouts[group] = {shape.m, along_sum, 1, params.inner / kFp8Block, 0};
    groups.b_scale_layouts[group] = {shape.n / kFp8Block, along_sum, 1, params.inner / kFp8Block, 0};
  }
}

// Clears `bytes` bytes, a multiple of 16. Called by the whole grid.
__device__ void Clear(void* data, int64_t bytes) {
  auto* vectors = static_cast<uint4*>(data);
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < bytes / int64_t{sizeof(uint4)};
       i += step) {
    vectors[i] = uint4{};
  }
}

// Transposes the scales of rows. Called by the whole grid.
__device__ void TransposeScales(const GroupedDotParams& params, float* to) {
  // Tiles of a warp: 8 scales of 32 rows. So each sector of the source is read once.
  constexpr int kBlocks = 8, kRowsAtOnce = kWarp / kBlocks;
  __shared__ float tiles[kThreads / kWarp][kBlocks][kWarp + 1];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  auto& tile = tiles[warp];
  const int64_t blocks = params.inner / kFp8Block, rows = params.num_rows, stride = (rows + 3) / 4 * 4;
  const int64_t across = (blocks + kBlocks - 1) / kBlocks, count = (rows + kWarp - 1) / kWarp * across;
  constexpr int kWarps = kThreads / kWarp;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + warp; i < count; i += int64_t{gridDim.x} * kWarps) {
    const int64_t first_row = i / across * kWarp, first_block = i % across * kBlocks;
    for (int at = lane / kBlocks; at < kWarp; at += kRowsAtOnce) {
      const int64_t row = first_row + at, block = first_block + lane % kBlocks;
      if (row < rows && block < blocks) tile[lane % kBlocks][at] = params.row_scales[row * blocks + block];
    }
    __syncwarp();
    for (int at = 0; at < kBlocks && first_block + at < blocks; ++at) {
      if (first_row + lane < rows) to[(first_block + at) * stride + first_row + lane] = tile[at][lane];
    }
    __syncwarp();
  }
}

// Clears the empty rows of the 32 groups from `base` on, of which each lane has the filled `rows` of one.
// Called by the whole grid.
__device__ void ClearPadding(const GroupedDotParams& params, int base, int rows) {
  const int64_t width = int64_t{params.outer} * int64_t{sizeof(uint16_t)};
  const int num_groups = min(kWarp, params.num_groups - base);
  for (int i = 0; i < num_groups; ++i) {
    const int filled = __shfl_sync(kAllLanes, rows, i);
    const int64_t first = int64_t{base + i} * params.rows_per_group + filled;
    Clear(static_cast<std::byte*>(params.out) + first * width, (params.rows_per_group - filled) * width);
  }
}

// Each warp locates the rows of all groups on its own, 32 groups at a time. The first warp writes the
// descriptions.
__global__ void __launch_bounds__(kThreads) SetUpKernel(GroupedDotParams params, GroupArrays groups) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool writes = blockIdx.x == 0 && threadIdx.x < kWarp;
  const bool of_weights = params.product == GroupedDot::kWeights;
  const int64_t num_rows = params.num_rows, width = int64_t{params.outer} * int64_t{sizeof(uint16_t)};
  const int64_t matrix = params.inner * width;
  auto* out = static_cast<std::byte*>(params.out);
  if (writes && lane == 0) *groups.next_tile = 0;
  long long begin = 0;  // the first row of the 32 groups
  const bool is_padded = params.rows_per_group > 0 && !HasTransposedRows(params);
  if (params.first_row != nullptr && !is_padded) {
    begin = min(max(int64_t{*params.first_row}, int64_t{0}), num_rows);
  }
  const bool clears_rows = ClearsRows(params);
  if (clears_rows) Clear(out, begin * width);
  for (int base = 0; base < params.num_groups; base += kWarp) {
    const int group = base + lane;
    const bool is_group = group < params.num_groups;
    long long size = is_group ? SizeOfGroup(params.group_sizes, group, params.rows_per_group) : 0;
    if (HasTransposedRows(params)) size = (size + kFp8Block - 1) / kFp8Block * kFp8Block;
    const long long end = SumUpToLane(size);
    const auto within = [&](int64_t row) { return min(row, num_rows); };
    const int64_t first = within(is_padded ? int64_t{group} * params.rows_per_group : begin + end - size);
    const int rows = static_cast<int>(within(is_padded ? first + size : begin + end) - first);
    if (writes && is_group) DescribeGroup(params, groups, group, first, rows);
    if (of_weights) {
      for (unsigned empty = __ballot_sync(kAllLanes, is_group && rows == 0); empty != 0; empty &= empty - 1) {
        const int group = base + __ffs(static_cast<int>(empty)) - 1;
        Clear(params.OfGroup(out, params.redundant, group, matrix), matrix);
      }
    }
    if (is_padded && clears_rows) ClearPadding(params, base, rows);
    begin += __shfl_sync(kAllLanes, end, kWarp - 1);
  }
  if (clears_rows && !is_padded && begin < num_rows) Clear(out + begin * width, (num_rows - begin) * width);
  if (groups.transposed_scales != nullptr) TransposeScales(params, groups.transposed_scales);
}

// Returns the arrays in the scratch. The descriptors come first, because they need the largest alignment.
GroupArrays ArraysOf(const GroupedDotParams& params, ScaleForm scale_form) {
  constexpr uintptr_t kDescriptorAlignment = 128;
  const auto address = reinterpret_cast<uintptr_t>(params.scratch);
  const uintptr_t begin = (address + kDescriptorAlignment - 1) / kDescriptorAlignment * kDescriptorAlignment;
  const int64_t groups = params.num_groups;
  auto* next = reinterpret_cast<std::byte*>(address) + GroupedDotScratchBytes(0);
  GroupArrays arrays{};
  arrays.descriptors = reinterpret_cast<void*>(begin);
  arrays.next_tile = static_cast<int32_t*>(arrays.descriptors);
  arrays.descriptor_bytes = GroupedDotScratchBytes(0) - static_cast<int64_t>(begin - address);
  if (scale_form == ScaleForm::kWithLayouts) {
    // Engines that read layouts need fewer descriptors than there is room for.
    arrays.b_scale_layouts = reinterpret_cast<ScaleLayout*>(next) - groups;
    arrays.a_scale_layouts = arrays.b_scale_layouts - groups;
    arrays.descriptor_bytes -= 2 * groups * static_cast<int64_t>(sizeof(ScaleLayout));
  }
  const auto take = [&](auto*& array, int64_t element) {
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(next);
    next += groups * element;
  };
  take(arrays.a, sizeof(void*));
  take(arrays.b, sizeof(void*));
  take(arrays.d, sizeof(void*));
  take(arrays.a_strides, sizeof(int64_t));
  take(arrays.b_strides, sizeof(int64_t));
  take(arrays.d_strides, sizeof(int64_t));
  take(arrays.a_scales, sizeof(void*));
  take(arrays.b_scales, sizeof(void*));
  take(arrays.shapes, sizeof(GroupShape));
  static_assert(8 * sizeof(int64_t) + sizeof(GroupShape) <= 80, "what GroupedDotScratchBytes counts");
  if (scale_form == ScaleForm::kTransposed && params.row_scales != nullptr && !HasTransposedRows(params)) {
    arrays.transposed_scales =
        reinterpret_cast<float*>(static_cast<std::byte*>(params.scratch) + GroupedDotScratchBytes(groups));
  }
  return arrays;
}

}  // namespace

bool HasRoomForScaleLayouts(const GroupedDotParams& params) {
  const int64_t bytes = 2 * int64_t{params.num_groups} * int64_t{sizeof(ScaleLayout)};
  return bytes <= GroupedDotScratchBytes(0) - kMaxDescriptorBytes;
}

cudaError_t SetUpGroups(const GroupedDotParams& params, ScaleForm scale_form, int num_sms,
                        cudaStream_t stream, GroupArrays& groups) {
  groups = ArraysOf(params, scale_form);
  // One block describes the groups.
  const bool is_small =
      params.product != GroupedDot::kWeights && !ClearsRows(params) && groups.transposed_scales == nullptr;
  return Launch(SetUpKernel, dim3(is_small ? 1 : num_sms), kThreads, 0, stream, false, params, groups);
}

cudaError_t PreloadSetUp() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, SetUpKernel);
}

}  // namespace jax_ep::cuda
