// The way of a tile's results from registers to the result.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/products/sm90/tiles.cuh"
#include "kernels/ptx/hopper.cuh"

namespace jax_ep::cuda::sm90 {

// A warp stores its rows in parts of so many columns.
constexpr int kStoredRows = 16, kStoredColumns = 64;
constexpr int kStoredVectors = kStoredColumns * sizeof(uint16_t) / sizeof(uint4);  // of a row
constexpr int kPackedWords = kStoredRows * kStoredColumns / (2 * kWarp);           // of a lane

// A part of a warp's results, on its way out, swizzled as a tensor store reads them.
struct alignas(1024) Staged {
  uint4 rows[kStoredRows][kStoredVectors];
};

// Where a warp's results go.
struct Target {
  const CUtensorMap* map;
  int matrix;  // its index in the map
  int first_row, end_row, first_column;

  Target() = default;
  // `maps`: of the home matrices or all rows, and of redundant matrices.
  __device__ Target(const GroupedDotParams& params, const CUtensorMap (&maps)[2], const Tile& tile,
                    const Work& work, bool of_weights) {
    const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) % kWarpgroup / kWarp, 0);
    const MatrixIndex index(params, of_weights ? tile.group : 0);
    map = &maps[of_weights && index.is_redundant ? 1 : 0];
    matrix = of_weights ? index.index : 0;
    first_row = work.first_row + warp * kStoredRows;
    end_row = work.end_row;
    first_column = work.first_column;
  }
};

// Returns two sums as elements of the result.
template <typename T>
__device__ uint32_t Pack(float first, float second) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// Stores a part of a warp's results, from the target's first column on. The store may still read `staged`
// when this returns; two of them take turns.
template <bool kOfWeights, int kWords>
__device__ void StorePart(const GroupedDotParams& params, const Target& target,
                          const uint32_t (&words)[kWords], Staged& staged) {
  static_assert(kWords >= kPackedWords);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, row = lane % kStoredRows;
  const int column = target.first_column;
  auto& rows = staged.rows;
  WaitForStoresRead<1>();
  __syncwarp();
  // The position of 16 bytes depends on the row, so that 8 rows lie in different banks.
#pragma unroll
  for (int vector = 0; vector < kStoredVectors; vector += 2) {
    const int i = 2 * vector;
    StoreMatrices(&rows[row][(vector + lane / 16) ^ row % 8], words[i], words[i + 1], words[i + 2],
                  words[i + 3]);
  }
  if (kOfWeights || target.first_row + kStoredRows <= target.end_row) {
    FenceBulkShared();
    __syncwarp();
    StoreBox(target.map, column, target.first_row, target.matrix, rows, lane == 0);
  } else {  // the rows behind are another group's
    __syncwarp();
    auto* const out = static_cast<uint16_t*>(params.out);
    constexpr int kElements = sizeof(uint4) / sizeof(uint16_t);
    for (int i = lane; i < kStoredRows * kStoredVectors; i += kWarp) {
      const int at = i / kStoredVectors, vector = i % kStoredVectors;
      const int64_t to_row = target.first_row + at, to_column = column + vector * kElements;
      if (to_row >= target.end_row || to_column >= params.outer) continue;
      *reinterpret_cast<uint4*>(out + to_row * params.outer + to_column) = rows[at][vector ^ at % 8];
    }
  }
  CommitStores();
}

}  // namespace jax_ep::cuda::sm90
