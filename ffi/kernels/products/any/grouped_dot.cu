// Engine any: each expert's rows times its matrix, and the products of its gradients.
#include <algorithm>

#include "kernels/launch/launch.h"
#include "kernels/products/any/groups.cuh"
#include "kernels/products/any/multiply.cuh"
#include "kernels/products/any/multiply_float32.cuh"
#include "kernels/products/engines.h"

namespace jax_ep::cuda {
namespace {

// Clears a tile of rows that belong to no group. Called by the whole block.
template <typename Out>
__device__ void ClearTile(Out* out, int rows, int n0, int N) {
  for (int i = threadIdx.x; i < rows * kTileN; i += kThreads) {
    if (n0 + i % kTileN < N) out[int64_t{i / kTileN} * N + n0 + i % kTileN] = Out(0.0f);
  }
}

// Clears the rows of a tile that belong to no group, and returns the number of those before them. `out` is
// the tile's first row. Called by the whole block.
template <typename Out>
__device__ int ClearEmptyRows(const TileOfRows& tile, Out* out, int n0, int N) {
  const int rows = min(kTileM, tile.last - tile.first),
            filled = min(rows, max(tile.filled_end - tile.first, 0));
  if (filled < rows) ClearTile(out + int64_t{filled} * N, rows - filled, n0, N);
  return filled;
}

// What multiplies a tile. Tensor cores round float32 operands to tf32.
enum class Unit { kTensorCores, kFloat32 };

// Computes a tile as MultiplyTile does.
template <Unit kUnit, bool kATransposed, bool kBTransposed, typename T>
__device__ void MultiplyBy(const Matrix<T>& a, const Matrix<T>& b, int depth, int m0, int n0, T* out,
                           int64_t out_stride, int out_rows, int out_columns) {
  if constexpr (kUnit == Unit::kFloat32) {
    MultiplyFloatTile<kATransposed, kBTransposed>(a, b, depth, m0, n0, out, out_stride, out_rows,
                                                  out_columns);
  } else {
    MultiplyTile<T, kATransposed, kBTransposed>(a, b, depth, m0, n0, out, out_stride, out_rows, out_columns);
  }
}

// Blocks in float32 need two on an SM, so that one multiplies while the other waits for its slice.
template <Unit kUnit>
constexpr int kMinBlocks = kUnit == Unit::kFloat32 ? 2 : 1;

// Computes out [rows, n]: rows times the matrix of their group, [k, n], or [n, k] if kTransposed.
template <typename T, bool kTransposed, Unit kUnit>
__global__ void __launch_bounds__(kThreads, kMinBlocks<kUnit>) RowsKernel(GroupedDotParams params) {
  const TileOfRows tile = FindTile(params, blockIdx.x);
  if (tile.first >= tile.last) return;
  const int K = params.inner, N = params.outer, n0 = blockIdx.y * kTileN;
  T* out = static_cast<T*>(params.out) + int64_t{tile.first} * N;
  const int rows = ClearEmptyRows(tile, out, n0, N);
  if (rows == 0) return;
  const Matrix<T> a{static_cast<const T*>(params.rows) + int64_t{tile.first} * K, K, rows, K};
  const int width = params.matrix_width;
  const T* weights =
      params.OfGroup(static_cast<const T*>(params.others), params.redundant, tile.group, int64_t{K} * width);
  const Matrix<T> b = kTransposed ? Matrix<T>{weights, K, N, K} : Matrix<T>{weights, width, K, N};
  MultiplyBy<kUnit, false, kTransposed>(a, b, K, 0, n0, out, N, rows, N);
}

// Computes the same of FP8 rows and matrices [n, k], which are widened to float32.
__global__ void __launch_bounds__(kThreads) RowsFp8Kernel(GroupedDotParams params) {
  const TileOfRows tile = FindTile(params, blockIdx.x);
  if (tile.first >= tile.last) return;
  const int K = params.inner, N = params.outer, n0 = blockIdx.y * kTileN, blocks = K / kFp8Block;
  auto* out = static_cast<__nv_bfloat16*>(params.out) + int64_t{tile.first} * N;
  const int rows = ClearEmptyRows(tile, out, n0, N);
  if (rows == 0) return;
  const ScaledMatrix a{static_cast<const __nv_fp8_e4m3*>(params.rows) + int64_t{tile.first} * K,
                       K,
                       rows,
                       K,
                       params.row_scales + int64_t{tile.first} * blocks,
                       blocks,
                       1,
                       0,
                       kFp8Shift};
  const ScaledMatrix b{params.OfGroup(static_cast<const __nv_fp8_e4m3*>(params.others), params.redundant,
                                      tile.group, int64_t{K} * params.matrix_width),
                       K,
                       N,
                       K,
                       params.OfGroup(params.other_scales, params.redundant_scales, tile.group,
                                      int64_t{params.matrix_width / kFp8Block} * blocks),
                       blocks,
                       1,
                       kFp8Shift,
                       kFp8Shift};
  MultiplyTile<float, false, true>(a, b, K, 0, n0, out, N, rows, N);
}

// Computes out [L, k, n]: for each group its rows [., k], transposed, times its others [., n].
template <typename T, Unit kUnit>
__global__ void __launch_bounds__(kThreads, kMinBlocks<kUnit>) WeightsKernel(GroupedDotParams params) {
  const int group = static_cast<int>(blockIdx.z), per_group = params.rows_per_group;
  const RowRange range = per_group > 0
                             ? RowRange{group * per_group, SizeOfGroup(params.group_sizes, group, per_group)}
                             : FindRows(params, group, 1);
  const int K = params.inner, N = params.outer;
  const Matrix<T> a{static_cast<const T*>(params.rows) + int64_t{range.begin} * K, K, range.rows, K};
  const Matrix<T> b{static_cast<const T*>(params.others) + int64_t{range.begin} * N, N, range.rows, N};
  T* out = params.OfGroup(static_cast<T*>(params.out), params.redundant, group, int64_t{K} * N);
  MultiplyBy<kUnit, true, false>(a, b, range.rows, blockIdx.y * kTileM, blockIdx.x * kTileN, out, N, K, N);
}

// Computes the same of FP8 operands [k, C] and [n, C], which are widened to float32.
__global__ void __launch_bounds__(kThreads) WeightsFp8Kernel(GroupedDotParams params) {
  const RowRange range = FindRows(params, blockIdx.z, kFp8Block);
  const int K = params.inner, N = params.outer, C = params.num_rows, first_scale = range.begin / kFp8Block;
  const auto operand = [&](const void* data, const float* scales, int width) {
    return ScaledMatrix{static_cast<const __nv_fp8_e4m3*>(data) + range.begin,
                        C,
                        width,
                        range.rows,
                        scales + int64_t{first_scale} * width,
                        1,
                        width,
                        0,
                        kFp8Shift};
  };
  auto* out =
      params.OfGroup(static_cast<__nv_bfloat16*>(params.out), params.redundant, blockIdx.z, int64_t{K} * N);
  MultiplyTile<float, false, true>(operand(params.rows, params.row_scales, K),
                                   operand(params.others, params.other_scales, N), range.rows,
                                   blockIdx.y * kTileM, blockIdx.x * kTileN, out, N, K, N);
}

template <typename T, Unit kUnit = Unit::kTensorCores, typename F>
cudaError_t WithAnyKernel(GroupedDot product, F&& f) {
  constexpr int kShared = kUnit == Unit::kFloat32 ? kFloatSharedBytes : SharedBytes<T>();
  switch (product) {
    case GroupedDot::kRows:
      return f(RowsKernel<T, false, kUnit>, kShared);
    case GroupedDot::kRowsTransposed:
      return f(RowsKernel<T, true, kUnit>, kShared);
    default:
      return f(WeightsKernel<T, kUnit>, kShared);
  }
}

template <typename F>
cudaError_t WithFp8Kernel(GroupedDot product, F&& f) {
  return f(product == GroupedDot::kWeights ? WeightsFp8Kernel : RowsFp8Kernel, SharedBytes<float>());
}

template <typename F>
cudaError_t WithAnyKernel(Float type, bool allow_tf32, GroupedDot product, F&& f) {
  switch (type) {
    case Float::kF16:
      return WithAnyKernel<__half>(product, f);
    case Float::kBF16:
      return WithAnyKernel<__nv_bfloat16>(product, f);
    default:
      return allow_tf32 ? WithAnyKernel<float>(product, f) : WithAnyKernel<float, Unit::kFloat32>(product, f);
  }
}

int Tiles(int64_t size, int tile) { return static_cast<int>((size + tile - 1) / tile); }

bool RunsOn(int, int) { return true; }
bool Supports(const GroupedDotParams&) { return true; }

cudaError_t LaunchProduct(const GroupedDotParams& params, int, cudaStream_t stream) {
  const unsigned columns = Tiles(params.outer, kTileN);
  // Each group may need one tile beyond its full ones, and the rows after and before all groups two more.
  const dim3 grid = params.product == GroupedDot::kWeights
                        ? dim3(columns, Tiles(params.inner, kTileM), params.num_groups)
                        : dim3(params.num_rows / kTileM + params.num_groups + 2, columns);
  const auto launch = [&](auto* kernel, int shared) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
    return Launch(kernel, grid, kThreads, shared, stream, false, params);
  };
  return params.row_scales != nullptr ? WithFp8Kernel(params.product, launch)
                                      : WithAnyKernel(params.type, params.allow_tf32, params.product, launch);
}

cudaError_t PreloadAll() {
  cudaFuncAttributes attributes;
  const auto preload = [&](auto* kernel, int) { return cudaFuncGetAttributes(&attributes, kernel); };
  cudaError_t error = cudaSuccess;
  for (GroupedDot product : {GroupedDot::kRows, GroupedDot::kRowsTransposed, GroupedDot::kWeights}) {
    for (Float type : {Float::kF16, Float::kBF16, Float::kF32}) {
      if (error == cudaSuccess) error = WithAnyKernel(type, true, product, preload);
    }
    if (error == cudaSuccess) error = WithAnyKernel(Float::kF32, false, product, preload);
    if (error == cudaSuccess) error = WithFp8Kernel(product, preload);
  }
  return error;
}

}  // namespace

const ProductEngine kAnyEngine{"any", true, RunsOn, Supports, LaunchProduct, PreloadAll};

}  // namespace jax_ep::cuda
