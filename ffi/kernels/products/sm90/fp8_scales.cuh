// The scales of FP8 operands: in shared memory, on the way there, and in the sums.
#pragma once

#include "kernels/products/sm90/tensor_map.h"
#include "kernels/products/sm90/tiles.cuh"
#include "kernels/ptx/hopper.cuh"

namespace jax_ep::cuda::sm90 {

// Loads begin at multiples of 16 bytes, but groups at any row.
constexpr int kScalesAtOnce = 4;

// The scales of a stage. A matrix has one for 128 columns, and transposed rows have one for each.
template <bool kOfWeights>
struct alignas(128) Scales {
  static constexpr int kRows = kTileRows + (kOfWeights ? 0 : kScalesAtOnce);

  float rows[kRows];  // from a multiple of kScalesAtOnce on, and from the tile's first row on, respectively
  float columns[kOfWeights ? kTileColumns : kHalves];
};

// Descriptions of scales, of which a load takes those of a tile: of rows, and of 128 transposed columns.
struct ScaleMaps {
  CUtensorMap rows, columns;
};

inline cudaError_t DescribeScales(const GroupedDotParams& params, const GroupArrays& groups,
                                  ScaleMaps& maps) {
  const int64_t rows = params.num_rows, blocks = rows / kFp8Block;
  if (params.product != GroupedDot::kWeights) {
    return DescribeScales(groups.transposed_scales, params.inner / kFp8Block, rows, (rows + 3) / 4 * 4,
                          Scales<false>::kRows, maps.rows);
  }
  const cudaError_t error =
      DescribeScales(params.row_scales, blocks, params.inner, params.inner, Scales<true>::kRows, maps.rows);
  if (error != cudaSuccess) return error;
  return DescribeScales(params.other_scales, blocks, params.outer, params.outer, kHalfColumns, maps.columns);
}

// Loads the scales of a tile. Called by one thread, before it arrives at the stage's barrier.
template <bool kOfWeights>
class ScaleLoader {
 public:
  static constexpr uint32_t kBytes =
      sizeof(float) * (Scales<kOfWeights>::kRows + (kOfWeights ? kTileColumns : 0));
  // How often Load arrives at the barrier.
  static constexpr int kArrivals = kOfWeights ? 0 : 1;

  __device__ ScaleLoader(const GroupedDotParams& params, const ScaleMaps& maps, const Tile& tile,
                         const Part& part)
      : maps_(maps), first_block_(tile.begin / kFp8Block), part_(part) {
    if constexpr (!kOfWeights) {
      const int64_t blocks = params.inner / kFp8Block;
      const float* const group = params.OfGroup(params.other_scales, params.redundant_scales, tile.group,
                                                params.matrix_width / kFp8Block * blocks);
      for (int half = 0; half < kHalves; ++half) {
        const int row = min(part.first_column / kFp8Block + half, params.outer / kFp8Block - 1);
        of_matrix_[half] = group + row * blocks;
      }
    }
  }

  // Loads those of a block of the sum. The barrier expects kBytes.
  __device__ void Load(int block, Scales<kOfWeights>& to, uint64_t* barrier) const {
    const int row = first_block_ + block;
    LoadBox(to.rows, &maps_.rows, part_.first_row / kScalesAtOnce * kScalesAtOnce, row, 0, barrier);
    for (int half = 0; half < kHalves; ++half) {
      if constexpr (kOfWeights) {
        const int first = half * kHalfColumns;
        LoadBox(&to.columns[first], &maps_.columns, part_.first_column + first, row, 0, barrier);
      } else {
        CopyFloat(&to.columns[half], of_matrix_[half] + block);
      }
    }
    if constexpr (!kOfWeights) ArriveAfterCopies(barrier);
  }

 private:
  const ScaleMaps& maps_;
  int first_block_;
  const Part& part_;
  const float* of_matrix_[kHalves];  // a matrix has them along the sum
};

// Scales the sums of products and adds them up.
__device__ inline void Promote(const float (&of_rows)[2], const float* of_columns, const float (&part)[64],
                               float (&sums)[64]) {
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
    const float2 of_pair = *reinterpret_cast<const float2*>(of_columns + 2 * i);
    sums[i] += part[i] * (of_rows[0] * of_pair.x);
    sums[i + 1] += part[i + 1] * (of_rows[0] * of_pair.y);
    sums[i + 2] += part[i + 2] * (of_rows[1] * of_pair.x);
    sums[i + 3] += part[i + 3] * (of_rows[1] * of_pair.y);
  }
}
__device__ inline void Promote(const float (&of_rows)[2], float of_columns, const float (&part)[64],
                               float (&sums)[64]) {
  const float scale[2] = {of_rows[0] * of_columns, of_rows[1] * of_columns};
#pragma unroll
  for (int i = 0; i < 64; ++i) sums[i] += part[i] * scale[i % 4 / 2];
}

}  // namespace jax_ep::cuda::sm90
