// Grouped products on tensor cores: each expert's rows times its matrix, and the products of its gradients.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <mma.h>

#include <algorithm>

#include "kernels/kernels.h"
#include "kernels/launch/launch.h"
#include "kernels/threads.cuh"
#ifdef JAX_EP_WITH_CUTLASS
#include "kernels/products/products.h"
#endif

namespace jax_ep::cuda {
namespace {

namespace wmma = nvcuda::wmma;

// A block computes a tile of the result, and each of its warps 64 x 32 of it, from slices of 64 bytes along
// the sum.
constexpr int kTileM = 128, kTileN = 128;
constexpr int kWarpM = 64, kWarpN = 32;
constexpr int kThreads = kTileM / kWarpM * (kTileN / kWarpN) * kWarp;
constexpr int kStages = 3;
constexpr int kFragment = 16;

// The type as which elements of T enter the tensor cores: tf32 for float32.
template <typename T>
struct Core {
  using Type = T;
  static constexpr int kDepth = 16;
};
template <>
struct Core<float> {
  using Type = wmma::precision::tf32;
  static constexpr int kDepth = 8;
};

// An operand: a matrix in global memory, of which rows [0, rows) and columns [0, columns) are read.
template <typename T>
struct Matrix {
  const T* data;
  int64_t stride;
  int rows, columns;
};

// A slice [row0, row0 + kRows) x [column0, column0 + kColumns) of a matrix in shared memory, zero outside the
// matrix.
template <typename T, int kRows, int kColumns>
struct Slice {
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kStride = kColumns + kVector;  // the padding spreads rows over the banks
  static constexpr int kElements = kRows * kStride;

  __device__ static void Load(T* to, const Matrix<T>& from, int row0, int column0) {
    const bool aligned = from.stride % kVector == 0 && reinterpret_cast<uintptr_t>(from.data) % 16 == 0;
    for (int i = threadIdx.x; i < kRows * kColumns / kVector; i += kThreads) {
      const int row = i / (kColumns / kVector), column = i % (kColumns / kVector) * kVector;
      T* destination = to + row * kStride + column;
      const int left = row0 + row < from.rows ? from.columns - column0 - column : 0;
      const T* source = from.data + (row0 + row) * from.stride + column0 + column;
      if (aligned && left >= kVector) {
        __pipeline_memcpy_async(destination, source, 16);
      } else {
        for (int j = 0; j < kVector; ++j) destination[j] = j < left ? source[j] : T(0.0f);
      }
    }
  }
};

// Computes the tile at (m0, n0) of the product of two matrices over `depth`, and writes it to `out` as rows
// from m0 on. kATransposed: `a` is stored [depth, m]; kBTransposed: `b` is stored [n, depth]. Called by the
// whole block.
template <typename T, bool kATransposed, bool kBTransposed>
__device__ void MultiplyTile(const Matrix<T>& a, const Matrix<T>& b, int depth, int m0, int n0, T* out,
                             int64_t out_stride, int out_rows, int out_columns) {
  constexpr int kTileK = 64 / sizeof(T), kDepth = Core<T>::kDepth;
  using SliceA = Slice<T, kATransposed ? kTileK : kTileM, kATransposed ? kTileM : kTileK>;
  using SliceB = Slice<T, kBTransposed ? kTileN : kTileK, kBTransposed ? kTileK : kTileN>;
  using LayoutA = std::conditional_t<kATransposed, wmma::col_major, wmma::row_major>;
  using LayoutB = std::conditional_t<kBTransposed, wmma::col_major, wmma::row_major>;
  extern __shared__ __align__(128) std::byte shared[];
  T* const slices = reinterpret_cast<T*>(shared);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int warp_m = warp / (kTileN / kWarpN) * kWarpM, warp_n = warp % (kTileN / kWarpN) * kWarpN;
  const int steps = (depth + kTileK - 1) / kTileK;

  const auto load = [&](int step) {
    if (step < steps) {
      T* to = slices + step % kStages * (SliceA::kElements + SliceB::kElements);
      const int k0 = step * kTileK;
      SliceA::Load(to, a, kATransposed ? k0 : m0, kATransposed ? m0 : k0);
      SliceB::Load(to + SliceA::kElements, b, kBTransposed ? n0 : k0, kBTransposed ? k0 : n0);
    }
    __pipeline_commit();
  };

  wmma::fragment<wmma::accumulator, kFragment, kFragment, kDepth, float> sums[kWarpM / kFragment]
                                                                             [kWarpN / kFragment];
  for (auto& row : sums) {
    for (auto& sum : row) wmma::fill_fragment(sum, 0.0f);
  }
  for (int stage = 0; stage < kStages - 1; ++stage) load(stage);
  for (int step = 0; step < steps; ++step) {
    __pipeline_wait_prior(kStages - 2);
    __syncthreads();  // this slice has arrived, and the next one to load is no longer read
    load(step + kStages - 1);
    const T* slice_a = slices + step % kStages * (SliceA::kElements + SliceB::kElements);
    const T* slice_b = slice_a + SliceA::kElements;
#pragma unroll
    for (int k = 0; k < kTileK; k += kDepth) {
      using Type = typename Core<T>::Type;
      wmma::fragment<wmma::matrix_a, kFragment, kFragment, kDepth, Type, LayoutA> left[kWarpM / kFragment];
      wmma::fragment<wmma::matrix_b, kFragment, kFragment, kDepth, Type, LayoutB> right[kWarpN / kFragment];
      const auto fill = [](auto& fragment, const T* from, int stride) {
        wmma::load_matrix_sync(fragment, from, stride);
        if constexpr (std::is_same_v<T, float>) {
          for (float& x : fragment.x) x = wmma::__float_to_tf32(x);
        }
      };
#pragma unroll
      for (int i = 0; i < kWarpM / kFragment; ++i) {
        const int m = warp_m + i * kFragment;
        fill(left[i], slice_a + (kATransposed ? k * SliceA::kStride + m : m * SliceA::kStride + k),
             SliceA::kStride);
      }
#pragma unroll
      for (int j = 0; j < kWarpN / kFragment; ++j) {
        const int n = warp_n + j * kFragment;
        fill(right[j], slice_b + (kBTransposed ? n * SliceB::kStride + k : k * SliceB::kStride + n),
             SliceB::kStride);
      }
#pragma unroll
      for (int i = 0; i < kWarpM / kFragment; ++i) {
#pragma unroll
        for (int j = 0; j < kWarpN / kFragment; ++j)
          wmma::mma_sync(sums[i][j], left[i], right[j], sums[i][j]);
      }
    }
  }
  __pipeline_wait_prior(0);
  __syncthreads();  // the slices are free: each warp passes its results through a part of them
  float* patch = reinterpret_cast<float*>(shared) + warp * kFragment * kFragment;
#pragma unroll
  for (int i = 0; i < kWarpM / kFragment; ++i) {
#pragma unroll
    for (int j = 0; j < kWarpN / kFragment; ++j) {
      wmma::store_matrix_sync(patch, sums[i][j], kFragment, wmma::mem_row_major);
      __syncwarp();
      for (int e = lane; e < kFragment * kFragment; e += kWarp) {
        const int m = m0 + warp_m + i * kFragment + e / kFragment;
        const int n = n0 + warp_n + j * kFragment + e % kFragment;
        if (m < out_rows && n < out_columns) out[m * out_stride + n] = T(patch[e]);
      }
      __syncwarp();
    }
  }
}

// Returns a group's size clamped to [0, num_rows]. A program may pass any sizes, and sums of 32 clamped ones
// must not overflow.
__device__ int RowsOf(int size, int num_rows) { return min(max(size, 0), num_rows); }

// Returns the first row of the first group.
__device__ int FirstRow(const GroupedDotParams& params) {
  return params.first_row == nullptr ? 0 : RowsOf(*params.first_row, params.num_rows);
}

// The group of a block's tile, and its rows. Each group starts with a new tile, so that no tile has rows of
// two groups. Tiles after those of the last group cover the rows after all groups, then those before them, as
// group L.
struct TileOfRows {
  int group;
  int first, last;  // rows of the tile lie in [first, last)
};

__device__ TileOfRows FindTile(const GroupedDotParams& params, int tile) {
  const int num_groups = params.num_groups, num_rows = params.num_rows, first_row = FirstRow(params);
  __shared__ TileOfRows tile_rows;
  if (threadIdx.x < kWarp) {
    const int lane = threadIdx.x;
    int row = first_row, first_tile = 0;
    bool is_found = false;
    for (int base = 0; base < num_groups && !is_found; base += kWarp) {
      const int size = base + lane < num_groups ? RowsOf(params.group_sizes[base + lane], num_rows) : 0;
      int end = size, tiles = (size + kTileM - 1) / kTileM;
      const int group_tiles = tiles;
      for (int step = 1; step < kWarp; step *= 2) {
        const int before = __shfl_up_sync(kAllLanes, end, step);
        const int tiles_before = __shfl_up_sync(kAllLanes, tiles, step);
        if (lane >= step) end += before, tiles += tiles_before;
      }
      const int begin_tile = first_tile + tiles - group_tiles;
      const bool contains_tile = tile >= begin_tile && tile < begin_tile + group_tiles;
      if (contains_tile) {
        const int begin = row + end - size;
        tile_rows = {base + lane, begin + (tile - begin_tile) * kTileM, min(begin + size, num_rows)};
      }
      is_found = __any_sync(kAllLanes, contains_tile);
      row = min(row + __shfl_sync(kAllLanes, end, kWarp - 1), num_rows);
      first_tile += __shfl_sync(kAllLanes, tiles, kWarp - 1);
    }
    if (!is_found && lane == 0) {
      const int after = tile - first_tile, before = after - (num_rows - row + kTileM - 1) / kTileM;
      tile_rows = before < 0 ? TileOfRows{num_groups, row + after * kTileM, num_rows}
                             : TileOfRows{num_groups, before * kTileM, first_row};
    }
  }
  __syncthreads();
  return tile_rows;
}

// Computes out [rows, n]: rows times the matrix of their group, [k, n], or [n, k] if kTransposed.
template <typename T, bool kTransposed>
__global__ void __launch_bounds__(kThreads) RowsKernel(GroupedDotParams params) {
  const TileOfRows tile = FindTile(params, blockIdx.x);
  if (tile.first >= tile.last) return;
  const int K = params.inner, N = params.outer, n0 = blockIdx.y * kTileN;
  T* out = static_cast<T*>(params.out) + int64_t{tile.first} * N;
  const int rows = min(kTileM, tile.last - tile.first);
  if (tile.group == params.num_groups) {
    for (int i = threadIdx.x; i < rows * kTileN; i += kThreads) {
      if (n0 + i % kTileN < N) out[int64_t{i / kTileN} * N + n0 + i % kTileN] = T(0.0f);
    }
    return;
  }
  const Matrix<T> a{static_cast<const T*>(params.rows) + int64_t{tile.first} * K, K, rows, K};
  const T* weights = static_cast<const T*>(params.others) + int64_t{tile.group} * K * N;
  const Matrix<T> b = kTransposed ? Matrix<T>{weights, K, N, K} : Matrix<T>{weights, N, K, N};
  MultiplyTile<T, false, kTransposed>(a, b, K, 0, n0, out, N, rows, N);
}

// Computes out [L, k, n]: for each group its rows [., k], transposed, times its others [., n].
template <typename T>
__global__ void __launch_bounds__(kThreads) WeightsKernel(GroupedDotParams params) {
  __shared__ int begin;
  if (threadIdx.x < kWarp) {
    int before = 0;
    for (int g = threadIdx.x; g < blockIdx.z; g += kWarp) {
      before = min(before + RowsOf(params.group_sizes[g], params.num_rows), params.num_rows);
    }
    before = __reduce_add_sync(kAllLanes, before);
    if (threadIdx.x == 0) begin = min(FirstRow(params) + before, params.num_rows);
  }
  __syncthreads();
  const int K = params.inner, N = params.outer;
  const int rows = min(RowsOf(params.group_sizes[blockIdx.z], params.num_rows), params.num_rows - begin);
  const Matrix<T> a{static_cast<const T*>(params.rows) + int64_t{begin} * K, K, rows, K};
  const Matrix<T> b{static_cast<const T*>(params.others) + int64_t{begin} * N, N, rows, N};
  T* out = static_cast<T*>(params.out) + int64_t{blockIdx.z} * K * N;
  MultiplyTile<T, true, false>(a, b, rows, blockIdx.y * kTileM, blockIdx.x * kTileN, out, N, K, N);
}

template <typename T>
constexpr int SharedBytes() {
  // The larger of the two layouts counts. The padding of a row is one vector.
  constexpr int kTileK = 64 / sizeof(T), kVector = 16 / sizeof(T);
  constexpr int kLong = kTileK * (kTileM + kVector), kShort = kTileM * (kTileK + kVector);
  return kStages * 2 * std::max(kLong, kShort) * static_cast<int>(sizeof(T));
}

template <typename T, typename F>
cudaError_t WithKernel(GroupedDot product, F&& f) {
  switch (product) {
    case GroupedDot::kRows:
      return f(RowsKernel<T, false>, SharedBytes<T>());
    case GroupedDot::kRowsTransposed:
      return f(RowsKernel<T, true>, SharedBytes<T>());
    default:
      return f(WeightsKernel<T>, SharedBytes<T>());
  }
}

template <typename F>
cudaError_t WithKernel(Float type, GroupedDot product, F&& f) {
  switch (type) {
    case Float::kF16:
      return WithKernel<__half>(product, f);
    case Float::kBF16:
      return WithKernel<__nv_bfloat16>(product, f);
    default:
      return WithKernel<float>(product, f);
  }
}

int Tiles(int64_t size, int tile) { return static_cast<int>((size + tile - 1) / tile); }

}  // namespace

// Uses the kernels of this file if CUTLASS's do not support the product.
cudaError_t LaunchGroupedDot(const GroupedDotParams& params, [[maybe_unused]] const Device& device,
                             cudaStream_t stream) {
#ifdef JAX_EP_WITH_CUTLASS
  if (SupportsProduct(params)) return LaunchProduct(params, device.num_sms, stream);
#endif
  if (params.row_scales != nullptr) return cudaErrorNotSupported;
  const unsigned columns = Tiles(params.outer, kTileN);
  // Each group may need one tile beyond its full ones, and the rows after and before all groups two more.
  const dim3 grid = params.product == GroupedDot::kWeights
                        ? dim3(columns, Tiles(params.inner, kTileM), params.num_groups)
                        : dim3(params.num_rows / kTileM + params.num_groups + 2, columns);
  return WithKernel(params.type, params.product, [&](auto* kernel, int shared) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
    return Launch(kernel, grid, kThreads, shared, stream, false, params);
  });
}

cudaError_t PreloadGroupedDot() {
  cudaFuncAttributes attributes;
#ifdef JAX_EP_WITH_CUTLASS
  cudaError_t error = PreloadProducts();
#else
  cudaError_t error = cudaSuccess;
#endif
  for (Float type : {Float::kF16, Float::kBF16, Float::kF32}) {
    for (GroupedDot product : {GroupedDot::kRows, GroupedDot::kRowsTransposed, GroupedDot::kWeights}) {
      if (error != cudaSuccess) return error;
      error = WithKernel(type, product,
                         [&](auto* kernel, int) { return cudaFuncGetAttributes(&attributes, kernel); });
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
