// The division of a product's results into tiles of two blocks.
#pragma once

#include "core/params.h"
#include "kernels/products/groups.h"
#include "kernels/threads.cuh"

namespace jax_ep::cuda::sm90 {

constexpr int kCluster = 2;
constexpr int kTileRows = 128, kTileColumns = 256;  // of one block
constexpr int kMultipliers = 2;                     // warpgroups of a block that multiply
constexpr int kBoxRows = kTileRows / kMultipliers;
constexpr int kHalves = 2, kHalfColumns = kTileColumns / kHalves;

// A tile of two blocks. If it is tall, the second block has the rows below those of the first. If it is wide,
// it has the columns beside them. A group's result is divided into tall tiles, and into wide ones if at most
// 128 rows are left, so that fewer than 128 rows of its last tiles are empty.
struct alignas(16) Tile {
  int group;       // -1: there are no more tiles
  int first_row;   // of the product of rows: in all rows; of weights: in the group's matrix
  int end_row;     // of the group's result
  int column;      // the first, in units of kTileColumns
  int is_wide;     // 0 or 1
  int begin, end;  // of the sum
  int unused;

  __device__ bool is_end() const { return group < 0; }
  // Depends on all of the tile.
  __device__ uint32_t bits() const { return group ^ first_row ^ end_row ^ column ^ is_wide ^ begin ^ end; }
};

// One block's part of a tile.
struct Part {
  int first_row, num_rows;  // at most kTileRows
  int first_column;         // may lie behind the last one

  __device__ Part(const Tile& tile, int rank) {
    first_row = tile.first_row + (tile.is_wide ? 0 : rank * kTileRows);
    num_rows = max(0, min(tile.end_row - first_row, kTileRows));
    first_column = (tile.column + (tile.is_wide ? rank : 0)) * kTileColumns;
  }
};

// What a warpgroup computes of a tile: 64 rows from first_row on, and one or two halves of the columns.
struct Work {
  int first_row, end_row;  // in the result; it stores none from end_row on
  int first_column;        // in the result
  int row, column;         // in the block's part of the tile
  int num_halves;          // of the columns, of 128 each

  __device__ Work(const GroupedDotParams& params, const Tile& tile, int rank, int warpgroup) {
    const Part part(tile, rank);
    // If there are rows for one warpgroup only, both take them, each half of the columns.
    const bool splits_columns = part.num_rows <= kBoxRows;
    row = splits_columns ? 0 : warpgroup * kBoxRows;
    column = splits_columns ? warpgroup * kHalfColumns : 0;
    const int left = params.outer - part.first_column - column;
    num_halves = max(0, min((left + kHalfColumns - 1) / kHalfColumns, splits_columns ? 1 : kHalves));
    first_row = part.first_row + row;
    end_row = part.first_row + part.num_rows;
    first_column = part.first_column + column;
  }
};

// The position of a group's matrix: its index among the redundant matrices, or among the home ones.
struct MatrixIndex {
  bool is_redundant;
  int index;

  __device__ MatrixIndex(const GroupedDotParams& params, int group) {
    is_redundant = group >= params.num_home;
    index = is_redundant ? group - params.num_home : group;
  }
};

// The tiles of a result of some rows. Those that share two columns of tiles follow each other, because they
// share that part of the second operand.
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

  // Sets the tile's column and whether it is wide, and adds to its first row.
  __device__ void Place(int index, Tile& tile) const {
    const int per_pair = 2 * tall + wide, pair = index / per_pair, at = index % per_pair;
    const bool is_wide = at >= min(2, columns - 2 * pair) * tall;
    tile.is_wide = is_wide ? 1 : 0;
    tile.column = 2 * pair + (is_wide ? 0 : at / tall);
    tile.first_row += (is_wide ? tall : at % tall) * kCluster * kTileRows;
  }
};

// Finds tiles by their index in the order of groups. Indices must grow.
template <bool kOfWeights>
class TileFinder {
 public:
  // A group's operand begins so many `row_bytes` into all rows as it has rows before it. Called by a whole
  // warp, as Find is.
  __device__ TileFinder(const GroupedDotParams& params, const GroupArrays& groups, int64_t row_bytes)
      : params_(params), groups_(groups), row_bytes_(row_bytes) {
    Read();
  }

  __device__ Tile Find(int index) {
    while (index >= begin_ + __shfl_sync(kAllLanes, end_, kWarp - 1)) {
      begin_ += __shfl_sync(kAllLanes, end_, kWarp - 1);
      base_ += kWarp;
      if (base_ >= params_.num_groups) return Tile{-1};
      Read();
    }
    const int owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, index < begin_ + end_))) - 1;
    const int before = owner == 0 ? 0 : __shfl_sync(kAllLanes, end_, owner - 1);
    const int size = __shfl_sync(kAllLanes, size_, owner);
    const int first = __shfl_sync(kAllLanes, first_, owner);
    Tile tile{base_ + owner};
    if constexpr (kOfWeights) {
      tile.end_row = params_.inner;
      tile.begin = first;
      tile.end = first + size;
    } else {
      tile.first_row = first;
      tile.end_row = first + size;
      tile.end = params_.inner;
    }
    TilesOf(size).Place(index - begin_ - before, tile);
    return tile;
  }

 private:
  // Returns the tiles of a group of `size` rows, at least one.
  __device__ GroupTiles TilesOf(int size) const {
    return GroupTiles(kOfWeights ? params_.inner : size, params_.outer);
  }

  // Reads the next 32 groups, one for each lane.
  __device__ void Read() {
    const int group = base_ + static_cast<int>(threadIdx.x) % kWarp;
    size_ = first_ = 0;
    if (group < params_.num_groups) {
      size_ = kOfWeights ? groups_.shapes[group].k : groups_.shapes[group].m;
      const int64_t bytes =
          static_cast<const uint8_t*>(groups_.a[group]) - static_cast<const uint8_t*>(params_.rows);
      first_ = static_cast<int>(bytes / row_bytes_);
    }
    end_ = SumUpToLane(size_ > 0 ? TilesOf(size_).count() : 0);
  }

  const GroupedDotParams& params_;
  const GroupArrays& groups_;
  int64_t row_bytes_;
  int base_ = 0;            // the first of 32 groups
  int begin_ = 0;           // their first tile
  int size_, first_, end_;  // of this lane's group: rows; its last tile, relative to begin_, plus one
};

}  // namespace jax_ep::cuda::sm90
