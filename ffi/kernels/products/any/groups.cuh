// The rows of groups and tiles, which each block locates on its own. A program may pass any sizes, so sums of
// them have 64 bits.
#pragma once

#include "core/params.h"
#include "kernels/threads.cuh"

namespace jax_ep::cuda {

constexpr int kTileM = 128;  // rows of a tile

// Returns the first row of the first group.
__device__ inline int FirstRow(const GroupedDotParams& params) {
  return params.first_row == nullptr ? 0 : min(max(*params.first_row, 0), params.num_rows);
}

// The group of a block's tile, and its rows. Each group starts with a new tile, so that no tile has rows of
// two groups. Tiles after those of the last group cover the rows after all groups, then those before them, as
// group L. With rows_per_group a tile may also have empty rows of its group.
struct TileOfRows {
  int group;
  int first, last;  // rows of the tile lie in [first, last)
  int filled_end;   // those from here on belong to no group
};

// Returns the number of tiles of `rows` rows.
__device__ inline int TilesOf(int rows) { return rows / kTileM + static_cast<int>(rows % kTileM != 0); }

// Returns the rows of a tile if each group has rows_per_group rows, and so as many tiles.
__device__ inline TileOfRows FindPaddedTile(const GroupedDotParams& params, int tile) {
  const int rows = params.rows_per_group, group = tile / TilesOf(rows);
  if (group >= params.num_groups) return {params.num_groups, 0, 0, 0};
  const int begin = group * rows;
  return {group, begin + tile % TilesOf(rows) * kTileM, begin + rows,
          begin + SizeOfGroup(params.group_sizes, group, rows)};
}

// Returns the rows of a tile. Called by the whole block.
__device__ inline TileOfRows FindTile(const GroupedDotParams& params, int tile) {
  if (params.rows_per_group > 0) return FindPaddedTile(params, tile);
  const int num_groups = params.num_groups, num_rows = params.num_rows, first_row = FirstRow(params);
  __shared__ TileOfRows tile_rows;
  if (threadIdx.x < kWarp) {
    const int lane = threadIdx.x;
    int row = first_row, first_tile = 0;
    bool is_found = false;
    for (int base = 0; base < num_groups && !is_found; base += kWarp) {
      const int size = base + lane < num_groups ? max(params.group_sizes[base + lane], 0) : 0;
      const long long end = SumUpToLane<long long>(size);
      // Rows past the last one count for no group, so there are never more tiles than blocks.
      const auto within = [&](long long at) {
        return static_cast<int>(min(at, static_cast<long long>(num_rows)));
      };
      const int begin = within(row + end - size), rows = within(row + end) - begin;
      const int group_tiles = TilesOf(rows);
      const int tiles = SumUpToLane(group_tiles);
      const int begin_tile = first_tile + tiles - group_tiles;
      const bool contains_tile = tile >= begin_tile && tile < begin_tile + group_tiles;
      if (contains_tile) {
        const int end = begin + rows;
        tile_rows = {base + lane, begin + (tile - begin_tile) * kTileM, end, end};
      }
      is_found = __any_sync(kAllLanes, contains_tile);
      row = __shfl_sync(kAllLanes, begin + rows, kWarp - 1);
      first_tile += __shfl_sync(kAllLanes, tiles, kWarp - 1);
    }
    if (!is_found && lane == 0) {
      const int after = tile - first_tile, before = after - TilesOf(num_rows - row);
      tile_rows = before < 0                    ? TileOfRows{num_groups, row + after * kTileM, num_rows, 0}
                  : before < TilesOf(first_row) ? TileOfRows{num_groups, before * kTileM, first_row, 0}
                                                : TileOfRows{num_groups, 0, 0, 0};
    }
  }
  __syncthreads();
  return tile_rows;
}

// The rows of a group.
struct RowRange {
  int begin, rows;
};

// Returns the rows of a group, if groups follow each other, and the size of each is rounded up to a multiple
// of `multiple`. Called by the whole block.
__device__ inline RowRange FindRows(const GroupedDotParams& params, int group, int multiple) {
  const auto size = [&](int g) -> long long {
    const long long rows = SizeOfGroup(params.group_sizes, g, params.rows_per_group);
    return (rows + multiple - 1) / multiple * multiple;
  };
  __shared__ int begin;
  if (threadIdx.x < kWarp) {
    long long before = 0;
    for (int g = threadIdx.x; g < group; g += kWarp) before += size(g);
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) before += __shfl_xor_sync(kAllLanes, before, lanes);
    const long long first = FirstRow(params) + before;
    if (threadIdx.x == 0) begin = static_cast<int>(min(first, static_cast<long long>(params.num_rows)));
  }
  __syncthreads();
  return {begin, static_cast<int>(min(size(group), static_cast<long long>(params.num_rows - begin)))};
}

}  // namespace jax_ep::cuda
