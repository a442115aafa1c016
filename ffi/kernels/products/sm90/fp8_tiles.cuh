// The division of an FP8 product's result into tiles of two blocks.
#pragma once

#include "core/params.h"
#include "kernels/products/groups.h"
#include "kernels/threads.cuh"

namespace jax_ep::cuda::sm90 {

constexpr int kCluster = 2;
constexpr int kTileRows = 128, kTileColumns = 256;  // of one block

// A tile of two blocks. If it is tall, the second block has the rows below those of the first. If it is wide,
// it has the columns beside them. A group is divided into tall tiles, and into wide ones if at most 128 rows
// are left, so that fewer than 128 rows of the group's last tiles are empty.
struct Tile {
  int group;      // -1: there are no more tiles
  int first_row;  // in all rows
  int end_row;    // the group's
  int column;     // the first, in units of kTileColumns
  bool is_wide;

  __device__ bool is_end() const { return group < 0; }
};

__device__ inline int4 Pack(const Tile& tile) {
  return {tile.group, tile.first_row, tile.end_row, 2 * tile.column + (tile.is_wide ? 1 : 0)};
}
__device__ inline Tile Unpack(int4 packed) {
  return {packed.x, packed.y, packed.z, packed.w / 2, packed.w % 2 != 0};
}

// One block's part of a tile.
struct Part {
  int first_row, num_rows;  // at most kTileRows
  int first_column;         // may lie behind the last one

  __device__ Part(const GroupedDotParams&, const Tile& tile, int rank) {
    first_row = tile.first_row + (tile.is_wide ? 0 : rank * kTileRows);
    num_rows = max(0, min(tile.end_row - first_row, kTileRows));
    first_column = (tile.column + (tile.is_wide ? rank : 0)) * kTileColumns;
  }
};

// The tiles of a group of some rows. Those that share two columns of tiles follow each other, because they
// share that part of the group's matrix.
struct GroupTiles {
  int columns, tall;  // numbers of columns, and of tall tiles in each
  int wide;           // number of wide tiles in two columns, 0 or 1

  __device__ GroupTiles(int rows, int outer) {
    columns = (outer + kTileColumns - 1) / kTileColumns;
    const int rest = rows % (kCluster * kTileRows);
    tall = rows / (kCluster * kTileRows) + (rest > kTileRows ? 1 : 0);
    wide = rest > 0 && rest <= kTileRows ? 1 : 0;
  }
  __device__ int count() const { return columns * tall + (columns + 1) / 2 * wide; }

  __device__ Tile At(int group, int first_row, int rows, int index) const {
    const int per_pair = 2 * tall + wide, pair = index / per_pair, at = index % per_pair;
    const bool is_wide = at >= min(2, columns - 2 * pair) * tall;
    Tile tile{group, first_row, first_row + rows, 2 * pair, is_wide};
    if (is_wide) {
      tile.first_row += tall * kCluster * kTileRows;
    } else {
      tile.first_row += at % tall * kCluster * kTileRows;
      tile.column += at / tall;
    }
    return tile;
  }
};

// Finds tiles by their index in the order of groups. Indices must grow.
class TileFinder {
 public:
  // Called by a whole warp, as Find is.
  __device__ TileFinder(const GroupedDotParams& params, const GroupArrays& groups)
      : params_(params), groups_(groups) {
    Read();
  }

  __device__ Tile Find(int index) {
    while (index >= begin_ + __shfl_sync(kAllLanes, end_, kWarp - 1)) {
      begin_ += __shfl_sync(kAllLanes, end_, kWarp - 1);
      base_ += kWarp;
      if (base_ >= params_.num_groups) return Tile{-1, 0, 0, 0, false};
      Read();
    }
    const int owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, index < begin_ + end_))) - 1;
    const int before = owner == 0 ? 0 : __shfl_sync(kAllLanes, end_, owner - 1);
    const int rows = __shfl_sync(kAllLanes, rows_, owner);
    const int first_row = __shfl_sync(kAllLanes, first_row_, owner);
    return GroupTiles(rows, params_.outer).At(base_ + owner, first_row, rows, index - begin_ - before);
  }

 private:
  // Reads the next 32 groups, one for each lane.
  __device__ void Read() {
    const int group = base_ + static_cast<int>(threadIdx.x) % kWarp;
    rows_ = first_row_ = 0;
    if (group < params_.num_groups) {
      rows_ = groups_.shapes[group].m;
      const auto* const rows = static_cast<const uint8_t*>(params_.rows);
      first_row_ = static_cast<int>((static_cast<const uint8_t*>(groups_.a[group]) - rows) / params_.inner);
    }
    end_ = GroupTiles(rows_, params_.outer).count();
    for (int step = 1; step < kWarp; step *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end_, step);
      if (static_cast<int>(threadIdx.x) % kWarp >= step) end_ += before;
    }
  }

  const GroupedDotParams& params_;
  const GroupArrays& groups_;
  int base_ = 0;                // the first of 32 groups
  int begin_ = 0;               // their first tile
  int rows_, first_row_, end_;  // of this lane's group; its last tile, relative to begin_, plus one
};

}  // namespace jax_ep::cuda::sm90
