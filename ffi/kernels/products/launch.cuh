// The launch of a CUTLASS kernel for grouped products.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>
#include <cutlass/gemm/kernel/tile_scheduler_params.h>

#include <algorithm>
#include <cute/tensor.hpp>
#include <type_traits>

#include "kernels/launch/launch.h"
#include "kernels/products/groups.h"

namespace jax_ep::cuda {

using CuteShape = cute::Shape<int, int, int>;
static_assert(sizeof(GroupShape) == sizeof(CuteShape) && alignof(GroupShape) == alignof(CuteShape));

// Launches Types::Kernel, whose operands are Types::In, and whose clusters are Types::Tiles::Cluster.
template <typename Types>
cudaError_t LaunchCutlass(const GroupedDotParams& params, const GroupArrays& groups, int num_sms,
                          cudaStream_t stream) {
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
  arguments.problem_shape = {params.num_groups, reinterpret_cast<CuteShape*>(groups.shapes), nullptr};
  arguments.mainloop.ptr_A = reinterpret_cast<const In**>(groups.a);
  arguments.mainloop.dA = reinterpret_cast<StrideA*>(groups.a_strides);
  arguments.mainloop.ptr_B = reinterpret_cast<const In**>(groups.b);
  arguments.mainloop.dB = reinterpret_cast<StrideB*>(groups.b_strides);
  if constexpr (Types::kScales) {
    arguments.mainloop.ptr_SFA = groups.a_scales;
    arguments.mainloop.ptr_SFB = groups.b_scales;
  }
  if constexpr (Types::kScales) {
    using LayoutA = std::remove_reference_t<decltype(*arguments.mainloop.layout_SFA)>;
    using LayoutB = std::remove_reference_t<decltype(*arguments.mainloop.layout_SFB)>;
    static_assert(sizeof(LayoutA) == sizeof(ScaleLayout) && sizeof(LayoutB) == sizeof(ScaleLayout));
    arguments.mainloop.layout_SFA = reinterpret_cast<LayoutA*>(groups.a_scale_layouts);
    arguments.mainloop.layout_SFB = reinterpret_cast<LayoutB*>(groups.b_scale_layouts);
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
