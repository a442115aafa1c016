// Products of tiles on tensor cores, by instructions that all supported architectures have.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_pipeline.h>
#include <mma.h>

#include <algorithm>

#include "core/params.h"
#include "kernels/products/any/groups.cuh"
#include "kernels/threads.cuh"

namespace jax_ep::cuda {

namespace wmma = nvcuda::wmma;

// A block computes a tile of the result, and each of its warps 64 x 32 of it, from slices of 64 bytes along
// the sum.
constexpr int kTileN = 128;  // columns of a tile
constexpr int kWarpM = 64, kWarpN = 32;
constexpr int kThreads = kTileM / kWarpM * (kTileN / kWarpN) * kWarp;
constexpr int kStages = 3;
constexpr int kFragment = 16;
constexpr int kFp8Shift = 7;
static_assert(1 << kFp8Shift == kFp8Block);

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

// An operand of FP8 values (e4m3), which are multiplied by their scales. A scale belongs to 2^row_shift x
// 2^column_shift values.
struct ScaledMatrix {
  const __nv_fp8_e4m3* data;
  int64_t stride;
  int rows, columns;
  const float* scales;
  int64_t scale_row_stride, scale_column_stride;
  int row_shift, column_shift;

  __device__ float At(int row, int column) const {
    return static_cast<float>(data[row * stride + column]) *
           scales[(row >> row_shift) * scale_row_stride + (column >> column_shift) * scale_column_stride];
  }
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

  __device__ static void Load(T* to, const ScaledMatrix& from, int row0, int column0) {
    for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
      const int row = i / kColumns, column = i % kColumns;
      const bool inside = row0 + row < from.rows && column0 + column < from.columns;
      to[row * kStride + column] = inside ? from.At(row0 + row, column0 + column) : 0.0f;
    }
  }
};

// Computes the tile at (m0, n0) of the product of two matrices over `depth`, and writes it to `out` as rows
// from m0 on. kATransposed: `a` is stored [depth, m]; kBTransposed: `b` is stored [n, depth]. Called by the
// whole block.
template <typename T, bool kATransposed, bool kBTransposed, typename Operand, typename Out>
__device__ void MultiplyTile(const Operand& a, const Operand& b, int depth, int m0, int n0, Out* out,
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
        if (m < out_rows && n < out_columns) out[m * out_stride + n] = Out(patch[e]);
      }
      __syncwarp();
    }
  }
}

// Returns the shared memory of a block that multiplies tiles of T, in bytes.
template <typename T>
constexpr int SharedBytes() {
  // The larger of the two layouts counts. The padding of a row is one vector.
  constexpr int kTileK = 64 / sizeof(T), kVector = 16 / sizeof(T);
  constexpr int kLong = kTileK * (kTileM + kVector), kShort = kTileM * (kTileK + kVector);
  return kStages * 2 * std::max(kLong, kShort) * static_cast<int>(sizeof(T));
}

}  // namespace jax_ep::cuda
