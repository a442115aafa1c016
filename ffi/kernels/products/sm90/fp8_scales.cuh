// The scales of FP8 operands: in shared memory, on the way there, and in the sums.
#pragma once

#include "kernels/products/sm90/tiles.cuh"
#include "kernels/ptx/bulk.cuh"

namespace jax_ep::cuda::sm90 {

// The scales of a stage. A matrix has one for 128 columns, and transposed rows have one for each.
template <bool kOfWeights>
struct Scales {
  float rows[kTileRows];
  float columns[kOfWeights ? kTileColumns : kHalves];
};

// The scales of a tile of rows times matrices: a row's scales follow each other, as those of 128 rows of a
// matrix do.
struct ScalesOfRows {
  const float* rows[kTileRows / kWarp];
  const float* columns;

  __device__ ScalesOfRows(const GroupedDotParams& params, const Tile& tile, const Part& part, int lane) {
    const int64_t blocks = params.inner / kFp8Block;
    for (int i = 0; i < kTileRows / kWarp; ++i) {
      rows[i] = params.row_scales + min(part.first_row + i * kWarp + lane, params.num_rows - 1) * blocks;
    }
    const int block_row = min(part.first_column / kFp8Block + lane, params.outer / kFp8Block - 1);
    columns = params.OfGroup(params.other_scales, params.redundant_scales, tile.group,
                             params.outer / kFp8Block * blocks) +
              block_row * blocks;
  }

  __device__ void Load(int block, int lane, Scales<false>& to) const {
    for (int i = 0; i < kTileRows / kWarp; ++i) CopyFloat(&to.rows[i * kWarp + lane], rows[i] + block);
    if (lane < kHalves) CopyFloat(&to.columns[lane], columns + block);
  }
};

// The scales of a tile of a matrix's gradient: those of 128 rows of all columns follow each other.
struct ScalesOfColumns {
  const float* rows;
  const float* columns[kHalves];
  int64_t inner, outer;

  __device__ ScalesOfColumns(const GroupedDotParams& params, const Tile& tile, const Part& part, int lane)
      : inner(params.inner), outer(params.outer) {
    rows = params.row_scales + tile.begin / kFp8Block * inner + part.first_row + 4 * lane;
    for (int half = 0; half < kHalves; ++half) {
      const int column = min(part.first_column + half * kFp8Block, params.outer - kFp8Block);
      columns[half] = params.other_scales + tile.begin / kFp8Block * outer + column + 4 * lane;
    }
  }

  __device__ void Load(int block, int lane, Scales<true>& to) const {
    CopyFloats(&to.rows[4 * lane], rows + block * inner);
    for (int half = 0; half < kHalves; ++half) {
      CopyFloats(&to.columns[half * kFp8Block + 4 * lane], columns[half] + block * outer);
    }
  }
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
