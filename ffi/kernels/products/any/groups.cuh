// The rows of groups and tiles, which each block locates on its own.
#pragma once

#include "core/params.h"
#include "kernels/products/any/multiply.cuh"

namespace jax_ep::cuda {

// Returns a group's size clamped to [0, num_rows]. A program may pass any sizes, and sums of 32 clamped ones
// must not overflow.
__device__ inline int RowsOf(int size, int num_rows) { return min(max(size, 0), num_rows); }

// Returns the first row of the first group.
__device__ inline int FirstRow(const GroupedDotParams& params) {
  return params.first_row == nullptr ? 0 : RowsOf(*params.first_row, params.num_rows);
}

// The group of a block's tile, and its rows. Each group starts with a new tile, so that no tile has rows of
// two groups. Tiles after those of the last group cover the rows after all groups, then those before them, as
// group L.
struct TileOfRows {
  int group;
  int first, last;  // rows of the tile lie in [first, last)
};

__device__ inline TileOfRows FindTile(const GroupedDotParams& params, int tile) {
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

// The rows of a group.
struct RowRange {
  int begin, rows;
};

// Returns the rows of a group, if the size of each group is rounded up to a multiple of `multiple`. Called by
// the whole block.
__device__ inline RowRange FindRows(const GroupedDotParams& params, int group, int multiple) {
  const auto size = [&](int g) {
    const int rows = RowsOf(params.group_sizes[g], params.num_rows);
    return RowsOf((rows + multiple - 1) / multiple * multiple, params.num_rows);
  };
  __shared__ int begin;
  if (threadIdx.x < kWarp) {
    int before = 0;
    for (int g = threadIdx.x; g < group; g += kWarp) before = min(before + size(g), params.num_rows);
    before = __reduce_add_sync(kAllLanes, before);
    if (threadIdx.x == 0) begin = min(FirstRow(params) + before, params.num_rows);
  }
  __syncthreads();
  return {begin, min(size(group), params.num_rows - begin)};
}

}  // namespace jax_ep::cuda
