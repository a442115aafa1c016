// How products are cut into tiles.
#pragma once

#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/dispatch_policy.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>

#include "core/params.h"
#include "kernels/products/sm90/groups.h"

namespace jax_ep::cuda {

// Two warpgroups share a tile.
struct Cooperative {
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};

// The same for FP8. The sums are scaled after each 128 elements, so that a thread holds its part of a tile
// twice: tiles are smaller for that.
struct Fp8Cooperative {
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};

// Each of two warpgroups has a tile of its own, and writes it while the other multiplies.
struct Pingpong {
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};

// A tile of kM x kN of the result, in steps of kK along the sum, of which kStoredM x kStoredN are written at
// a time. The blocks of a cluster load once what their tiles share; a group's tiles are rounded up to whole
// clusters.
template <typename Schedule_, int kM, int kN, int kK, int kClusterM, int kClusterN, int kStoredM,
          int kStoredN>
struct Tiling {
  using Schedule = Schedule_;
  using Tile = cute::Shape<cute::Int<kM>, cute::Int<kN>, cute::Int<kK>>;
  using Cluster = cute::Shape<cute::Int<kClusterM>, cute::Int<kClusterN>, cute::_1>;
  using StoredTile = cute::Shape<cute::Int<kStoredM>, cute::Int<kStoredN>>;
};

// Timed beside thirty others on an H200: docs/performance.md. A cluster lies along the columns where the rows
// of a group are the rows of the result: along those it would round each group up to twice the tile.
template <GroupedDot kProduct, Operands kOperands>
struct TilingFor {
  using Type = Tiling<Cooperative, 128, 256, 64, 1, 2, 128, 64>;
};

// Here rows are what is summed over, and tiles cover a group's matrix: a short sum leaves much to write.
template <Operands kOperands>
struct TilingFor<GroupedDot::kWeights, kOperands> {
  using Type = Tiling<Pingpong, 128, 192, 64, 2, 1, 64, 64>;
};

template <GroupedDot kProduct>
struct TilingFor<kProduct, Operands::kFp8> {
  using Type = Tiling<Fp8Cooperative, 128, 128, 128, 1, 2, 128, 32>;
};

}  // namespace jax_ep::cuda
