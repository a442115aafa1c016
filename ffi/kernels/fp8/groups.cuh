// The rows of groups that become FP8. A program may pass any sizes, so sums of them have 64 bits.
#pragma once

#include "core/params.h"
#include "kernels/threads.cuh"

namespace jax_ep::cuda {

constexpr int kTile = kFp8Block;

// Returns the number of rows in all groups. Called by whole warps.
__device__ inline int64_t CountRows(const int32_t* group_sizes, int num_groups, int num_rows) {
  if (group_sizes == nullptr) return num_rows;
  long long count = 0;
  for (int group = static_cast<int>(threadIdx.x) % kWarp; group < num_groups; group += kWarp) {
    count += max(group_sizes[group], 0);
  }
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) count += __shfl_xor_sync(kAllLanes, count, lanes);
  return min(static_cast<long long>(num_rows), count);
}

// The rows of a tile.
struct TileRows {
  int64_t first;  // -1: the tile belongs to no group
  int count;      // at most 128; fewer at the end of a group, and none past all rows
};

// Returns the rows of a tile. With groups, each begins with a new tile. Called by a warp.
__device__ inline TileRows FindRows(const int32_t* group_sizes, int num_groups, int rows_per_group,
                                    int num_rows, int tile) {
  const auto limited = [&](int64_t first, int64_t count) -> TileRows {
    return {first, static_cast<int>(max(int64_t{0}, min(min(count, int64_t{kTile}), num_rows - first)))};
  };
  if (group_sizes == nullptr) return limited(int64_t{tile} * kTile, kTile);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t rows = 0;  // before the 32 groups
  int tiles = 0;
  for (int base = 0; base < num_groups; base += kWarp) {
    const int size = base + lane < num_groups ? SizeOfGroup(group_sizes, base + lane, rows_per_group) : 0;
    const int own = size / kTile + static_cast<int>(size % kTile != 0);
    long long end = size;
    int last = own;
    for (int step = 1; step < kWarp; step *= 2) {
      const long long rows_before = __shfl_up_sync(kAllLanes, end, step);
      const int tiles_before = __shfl_up_sync(kAllLanes, last, step);
      if (lane >= step) end += rows_before, last += tiles_before;
    }
    const int index = tile - tiles - (last - own);  // among the tiles of this lane's group
    const unsigned found = __ballot_sync(kAllLanes, index >= 0 && index < own);
    if (found != 0) {
      const int from = __ffs(static_cast<int>(found)) - 1;
      const long long begin = rows_per_group > 0 ? int64_t{base + lane} * rows_per_group : rows + end - size;
      const long long first = begin + int64_t{index} * kTile;
      return limited(__shfl_sync(kAllLanes, first, from),
                     __shfl_sync(kAllLanes, static_cast<long long>(size) - int64_t{index} * kTile, from));
    }
    rows += __shfl_sync(kAllLanes, end, kWarp - 1);
    tiles += __shfl_sync(kAllLanes, last, kWarp - 1);  // at most `tile`, or it would be found
  }
  return {-1, 0};
}

}  // namespace jax_ep::cuda
