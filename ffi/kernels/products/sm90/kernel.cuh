// The CUTLASS kernel for each product and operand type on sm_90: its types and its launch.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <type_traits>

#include "kernels/products/launch.cuh"
#include "kernels/products/sm90/kernels.h"
#include "kernels/products/sm90/tilings.h"

namespace jax_ep::cuda::sm90 {

template <GroupedDot kProduct, Operands kOperands, typename Tiles_>
struct ProductTypes {
  static constexpr bool kScales = kOperands == Operands::kFp8;
  static constexpr bool kHasScaleLayouts = false;  // CUTLASS derives them from each group's shape
  using Tiles = Tiles_;
  using Out = std::conditional_t<kOperands == Operands::kF16, cutlass::half_t, cutlass::bfloat16_t>;
  using In = std::conditional_t<kScales, cutlass::float_e4m3_t, Out>;
  static constexpr int kInVector = kProductAlignment / sizeof(In),
                       kOutVector = kProductAlignment / sizeof(Out);

  using Row = cutlass::layout::RowMajor*;
  using Column = cutlass::layout::ColumnMajor*;
  static constexpr bool kOfWeights = kProduct == GroupedDot::kWeights;
  using LayoutA = std::conditional_t<kOfWeights && !kScales, Column, Row>;
  using LayoutB = std::conditional_t<kProduct == GroupedDot::kRowsTransposed || kScales, Column, Row>;
  // Of rows and matrices, or of two arrays of columns.
  using ScaleLayouts =
      std::conditional_t<kOfWeights,
                         cutlass::detail::Sm90BlockwiseScaleConfig<1, 1, kFp8Block, cute::GMMA::Major::MN,
                                                                   cute::GMMA::Major::MN>,
                         cutlass::detail::Sm90BlockwiseScaleConfig<
                             1, kFp8Block, kFp8Block, cute::GMMA::Major::K, cute::GMMA::Major::K>>;
  using ScaledA = cute::tuple<LayoutA, decltype(ScaleLayouts::deduce_layoutSFA())*>;
  using ScaledB = cute::tuple<LayoutB, decltype(ScaleLayouts::deduce_layoutSFB())*>;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Tiles::Tile, typename Tiles::Cluster,
      typename Tiles::StoredTile, float, float, void, Row, kOutVector, Out, Row, kOutVector,
      typename Tiles::Schedule::Epilogue>::CollectiveOp;
  static constexpr int kEpilogueBytes = sizeof(typename Epilogue::SharedStorage);
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, In, std::conditional_t<kScales, ScaledA, LayoutA>,
      kInVector, In, std::conditional_t<kScales, ScaledB, LayoutB>, kInVector, float, typename Tiles::Tile,
      typename Tiles::Cluster, cutlass::gemm::collective::StageCountAutoCarveout<kEpilogueBytes>,
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
