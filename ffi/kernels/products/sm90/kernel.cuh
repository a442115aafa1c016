// The CUTLASS kernel for each product and operand type: its types and its launch.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>
#include <cutlass/gemm/kernel/tile_scheduler_params.h>

#include <algorithm>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <type_traits>

#include "kernels/launch/launch.h"
#include "kernels/products/sm90/groups.h"
#include "kernels/products/sm90/tilings.h"

namespace jax_ep::cuda {

template <GroupedDot kProduct, Operands kOperands>
struct ProductTypes {
  static constexpr bool kScales = kOperands == Operands::kFp8;
  using Tiles = typename TilingFor<kProduct, kOperands>::Type;
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
      cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<GroupShape>, Mainloop, Epilogue>;
};

template <GroupedDot kProduct, Operands kOperands>
cudaError_t ProductKernel<kProduct, kOperands>::Preload() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes,
                               cutlass::device_kernel<typename ProductTypes<kProduct, kOperands>::Kernel>);
}

template <GroupedDot kProduct, Operands kOperands>
cudaError_t ProductKernel<kProduct, kOperands>::Launch(const GroupedDotParams& params,
                                                       const GroupArrays& groups, int num_sms,
                                                       cudaStream_t stream) {
  using Types = ProductTypes<kProduct, kOperands>;
  using Kernel = typename Types::Kernel;
  using In = typename Types::In;
  using StrideA = typename Kernel::InternalStrideA;
  using StrideB = typename Kernel::InternalStrideB;
  using StrideD = typename Kernel::InternalStrideD;
  static_assert(sizeof(StrideA) == sizeof(int64_t) && sizeof(StrideB) == sizeof(int64_t) &&
                    sizeof(StrideD) == sizeof(int64_t),
                "a stride is one number");
  constexpr int kClusterM = cute::size<0>(typename Types::Tiles::Cluster{});
  constexpr int kClusterN = cute::size<1>(typename Types::Tiles::Cluster{});
  constexpr int kCluster = kClusterM * kClusterN;

  typename Kernel::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  arguments.problem_shape = {params.num_groups, groups.shapes, nullptr};
  arguments.mainloop.ptr_A = reinterpret_cast<const In**>(groups.a);
  arguments.mainloop.dA = reinterpret_cast<StrideA*>(groups.a_strides);
  arguments.mainloop.ptr_B = reinterpret_cast<const In**>(groups.b);
  arguments.mainloop.dB = reinterpret_cast<StrideB*>(groups.b_strides);
  if constexpr (Types::kScales) {
    // The layouts stay null: CUTLASS derives them from each group's shape.
    arguments.mainloop.ptr_SFA = groups.a_scales;
    arguments.mainloop.ptr_SFB = groups.b_scales;
  }
  arguments.epilogue = {{},
                        nullptr,
                        nullptr,
                        reinterpret_cast<typename Types::Out**>(groups.d),
                        reinterpret_cast<StrideD*>(groups.d_strides)};
  arguments.hw_info.sm_count = std::max(num_sms / kCluster, 1) * kCluster;
  // Tiles of one column run one after another, because they share the group's matrix, the larger operand.
  arguments.scheduler = {1, cutlass::gemm::kernel::detail::RasterOrderOptions::AlongM};
  if (!Kernel::can_implement(arguments) ||
      static_cast<int64_t>(Kernel::get_workspace_size(arguments)) > groups.descriptor_bytes) {
    return cudaErrorInvalidValue;
  }
  const auto kernel_params = Kernel::to_underlying_arguments(arguments, groups.descriptors);

  const auto kernel = cutlass::device_kernel<Kernel>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kClusterM, kClusterN, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = Kernel::get_grid_shape(kernel_params);
  config.blockDim = Kernel::get_block_shape();
  config.dynamicSmemBytes = Kernel::SharedStorageSize;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return LaunchAs(config, kernel, kernel_params);
}

}  // namespace jax_ep::cuda
