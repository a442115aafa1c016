// The types of CUTLASS's kernels for grouped products on Blackwell GPUs.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <type_traits>

#include "kernels/products/engines.h"
#include "kernels/products/launch.cuh"

namespace jax_ep::cuda {

// The types of a kernel. Tiles_ has the architecture, the sizes of tiles and clusters, and CUTLASS's
// schedules.
template <typename Tiles_, GroupedDot kProduct, Operands kOperands>
struct BlackwellTypes {
  static constexpr bool kScales = kOperands == Operands::kFp8;
  using Tiles = Tiles_;
  using Arch = typename Tiles::Arch;
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
                         cutlass::detail::Sm1xxBlockwiseScaleConfig<1, 1, kFp8Block, cute::UMMA::Major::MN,
                                                                    cute::UMMA::Major::MN>,
                         cutlass::detail::Sm1xxBlockwiseScaleConfig<
                             1, kFp8Block, kFp8Block, cute::UMMA::Major::K, cute::UMMA::Major::K>>;
  using ScaledA = cute::tuple<LayoutA, typename ScaleLayouts::LayoutSFA*>;
  using ScaledB = cute::tuple<LayoutB, typename ScaleLayouts::LayoutSFB*>;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      Arch, cutlass::arch::OpClassTensorOp, typename Tiles::Tile, typename Tiles::Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Row, kOutVector, Out, Row,
      kOutVector, typename Tiles::Epilogue>::CollectiveOp;
  static constexpr int kEpilogueBytes = sizeof(typename Epilogue::SharedStorage);
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      Arch, cutlass::arch::OpClassTensorOp, In, std::conditional_t<kScales, ScaledA, LayoutA>, kInVector, In,
      std::conditional_t<kScales, ScaledB, LayoutB>, kInVector, float, typename Tiles::Tile,
      typename Tiles::Cluster, cutlass::gemm::collective::StageCountAutoCarveout<kEpilogueBytes>,
      typename Tiles::Mainloop>::CollectiveOp;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<CuteShape>, Mainloop, Epilogue>;
};

// Loads a kernel on the current device.
template <typename Types>
cudaError_t PreloadCutlass() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, cutlass::device_kernel<typename Types::Kernel>);
}

}  // namespace jax_ep::cuda
