// The CUTLASS kernel for each product and operand type on sm_90: its tiles, its types and its launch.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/dispatch_policy.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <type_traits>

#include "kernels/products/engines.h"
#include "kernels/products/launch.cuh"

namespace jax_ep::cuda::sm90 {

// Two warpgroups share a tile.
struct Cooperative {
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
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

template <GroupedDot kProduct, Operands kOperands, typename Tiles_>
struct ProductTypes {
  static constexpr bool kScales = false, kHasScaleLayouts = false;  // fp8.cu has the products of FP8
  using Tiles = Tiles_;
  using Out = std::conditional_t<kOperands == Operands::kF16, cutlass::half_t, cutlass::bfloat16_t>;
  using In = Out;
  static constexpr int kVector = kProductAlignment / sizeof(In);

  using Row = cutlass::layout::RowMajor*;
  using Column = cutlass::layout::ColumnMajor*;
  using LayoutA = std::conditional_t<kProduct == GroupedDot::kWeights, Column, Row>;
  using LayoutB = std::conditional_t<kProduct == GroupedDot::kRowsTransposed, Column, Row>;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Tiles::Tile, typename Tiles::Cluster,
      typename Tiles::StoredTile, float, float, void, Row, kVector, Out, Row, kVector,
      typename Tiles::Schedule::Epilogue>::CollectiveOp;
  static constexpr int kEpilogueBytes = sizeof(typename Epilogue::SharedStorage);
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, In, LayoutA, kVector, In, LayoutB, kVector, float,
      typename Tiles::Tile, typename Tiles::Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<kEpilogueBytes>,
      typename Tiles::Schedule::Mainloop>::CollectiveOp;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<CuteShape>, Mainloop, Epilogue>;
};

// Only bfloat16 has more than one tiling, because each of them takes half a minute to compile.
template <GroupedDot kProduct, Operands kOperands>
constexpr bool kHasNarrowTiling = kProduct != GroupedDot::kWeights && kOperands == Operands::kBF16;
template <GroupedDot kProduct, Operands kOperands>
constexpr bool kHasTallTiling = kProduct != GroupedDot::kWeights && kOperands == Operands::kBF16;

inline int MemoryBusBits() {
  int device = 0, bits = 0;
  (void)cudaGetDevice(&device);
  (void)cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device);
  return bits;
}

// Calls f with the kernel's types for the tiling that suits a product.
template <GroupedDot kProduct, Operands kOperands, typename F>
cudaError_t WithTypes(const GroupedDotParams& params, F&& f) {
  if constexpr (kHasNarrowTiling<kProduct, kOperands>) {
    if (SuitsNarrowTiles(params.outer)) return f(ProductTypes<kProduct, kOperands, NarrowTiling>());
  }
  if constexpr (kHasTallTiling<kProduct, kOperands>) {
    const int64_t rows = params.num_rows / params.num_groups;
    if (SuitsTallTiles(kProduct, rows, params.inner, params.outer, MemoryBusBits())) {
      return f(ProductTypes<kProduct, kOperands, TallTiling>());
    }
  }
  return f(ProductTypes<kProduct, kOperands, typename TilingFor<kProduct, kOperands>::Type>());
}

template <GroupedDot kProduct, Operands kOperands>
cudaError_t ProductKernel<kProduct, kOperands>::Preload() {
  cudaError_t error = cudaSuccess;
  const auto preload = [&](auto types) {
    cudaFuncAttributes attributes;
    if (error != cudaSuccess) return;
    error = cudaFuncGetAttributes(&attributes, cutlass::device_kernel<typename decltype(types)::Kernel>);
  };
  preload(ProductTypes<kProduct, kOperands, typename TilingFor<kProduct, kOperands>::Type>());
  if constexpr (kHasNarrowTiling<kProduct, kOperands>) {
    preload(ProductTypes<kProduct, kOperands, NarrowTiling>());
  }
  if constexpr (kHasTallTiling<kProduct, kOperands>) preload(ProductTypes<kProduct, kOperands, TallTiling>());
  return error;
}

template <GroupedDot kProduct, Operands kOperands>
cudaError_t ProductKernel<kProduct, kOperands>::Launch(const GroupedDotParams& params,
                                                       const GroupArrays& groups, int num_sms,
                                                       cudaStream_t stream) {
  return WithTypes<kProduct, kOperands>(
      params, [&](auto types) { return LaunchCutlass<decltype(types)>(params, groups, num_sms, stream); });
}

}  // namespace jax_ep::cuda::sm90
