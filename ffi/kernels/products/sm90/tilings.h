// The division of products into tiles.
#pragma once

#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/dispatch_policy.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>

#include "kernels/products/sm90/kernels.h"

namespace jax_ep::cuda::sm90 {

// Two warpgroups share a tile.
struct Cooperative {
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};

// Two warpgroups share a tile of FP8 operands. The sums are scaled after each 128 elements, for which a
// thread needs two copies of its part of the tile. Therefore the tiles are smaller.
struct Fp8Cooperative {
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};

// Each of two warpgroups has a tile of its own, and stores it while the other one multiplies.
struct Pingpong {
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};

// The sizes of tiles: kM x kN of the result, kK elements of the sum per step, and kStoredM x kStoredN
// elements per store. The blocks of a cluster load the operand that their tiles share only once. A group's
// tiles are rounded up to whole clusters.
template <typename Schedule_, int kM, int kN, int kK, int kClusterM, int kClusterN, int kStoredM,
          int kStoredN>
struct Tiling {
  using Schedule = Schedule_;
  using Tile = cute::Shape<cute::Int<kM>, cute::Int<kN>, cute::Int<kK>>;
  using Cluster = cute::Shape<cute::Int<kClusterM>, cute::Int<kClusterN>, cute::_1>;
  using StoredTile = cute::Shape<cute::Int<kStoredM>, cute::Int<kStoredN>>;
};

// The fastest tiling measured (docs/performance.md). If the rows of a group are rows of the result, a cluster
// spans columns. If it spanned rows, each group would be rounded up to two tiles.
template <GroupedDot kProduct, Operands kOperands>
struct TilingFor {
  using Type = Tiling<Cooperative, 128, 256, 64, 1, 2, 128, 64>;
};

// The columns of a cluster's tiles in the tiling above, and in NarrowTiling.
constexpr int kWideColumns = 512, kNarrowColumns = 384;
using NarrowTiling = Tiling<Pingpong, 128, 192, 64, 1, 2, 64, 64>;

// Returns whether clusters of NarrowTiling cover a result with so many fewer columns that they are faster,
// although they are slower per column: 768 columns are two of them, or one and a half wide ones.
constexpr bool SuitsNarrowTiles(int columns) {
  const auto covered = [&](int cluster) { return (columns + cluster - 1) / cluster * cluster; };
  return 4 * covered(kNarrowColumns) <= 3 * covered(kWideColumns);
}
static_assert(SuitsNarrowTiles(768) && SuitsNarrowTiles(kNarrowColumns) && !SuitsNarrowTiles(kWideColumns));

// Two tiles of one column share the loads of the matrix. If they are in different clusters, they
// probably drift apart during a long sum, and read the matrix from memory several times. Groups are rounded
// up to 256 rows.
using TallTiling = Tiling<Cooperative, 128, 256, 64, 2, 1, 128, 64>;

// Returns whether TallTiling is faster for a product whose operand has `rows` rows for each group, on a GPU
// whose memory has a bus of `memory_bits` (docs/tuning.md). An H100's has 5120 bits. That of an H200, with
// 6144 bits, is fast enough for the other tilings.
constexpr bool SuitsTallTiles(GroupedDot product, int64_t rows, int inner, int columns, int memory_bits) {
  const bool has_few_rows = rows >= 128 && rows < 512 && inner >= 4096;
  const bool has_many_rows = rows >= 512 && rows <= 1536 && inner >= 5120 && product == GroupedDot::kRows;
  return (has_few_rows || has_many_rows) && columns <= 8192 && memory_bits <= 5120;
}

// Here the sum goes over rows, and tiles cover a group's matrix. A short sum leaves many bytes to store.
template <Operands kOperands>
struct TilingFor<GroupedDot::kWeights, kOperands> {
  using Type = Tiling<Pingpong, 128, 192, 64, 2, 1, 64, 64>;
};

template <>
struct TilingFor<GroupedDot::kRowsTransposed, Operands::kFp8> {
  using Type = Tiling<Fp8Cooperative, 128, 128, 128, 1, 2, 128, 64>;
};

template <>
struct TilingFor<GroupedDot::kWeights, Operands::kFp8> {
  using Type = Tiling<Fp8Cooperative, 128, 128, 128, 2, 1, 128, 64>;
};

}  // namespace jax_ep::cuda::sm90
