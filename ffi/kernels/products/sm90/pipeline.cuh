// What the kernels of this folder have in common: the warps of a block, its ring of stages, and its operands.
#pragma once

#include <algorithm>

#include "kernels/launch/launch.h"
#include "kernels/products/sm90/results.cuh"
#include "kernels/products/sm90/tensor_map.h"
#include "kernels/products/sm90/tiles.cuh"
#include "kernels/ptx/hopper.cuh"

namespace jax_ep::cuda::sm90 {

// The first warpgroup loads operands and hands out tiles. The others multiply.
constexpr int kThreads = (1 + kMultipliers) * kWarpgroup;
constexpr int kWarps = kMultipliers * kWarpgroup / kWarp;  // that multiply
constexpr uint16_t kBothBlocks = 3;
constexpr int kMostSharedBytes = 227 * 1024;  // of a block

// A stage of a ring, and the parity of its phases.
template <int kStages>
struct Position {
  int stage = 0, phase = 0;

  __device__ void Advance() {
    stage = (stage + 1) % kStages;
    if (stage == 0) phase ^= 1;
  }
};

// The barriers of a ring of stages, in the shared memory of each block: of those that are full, and of those
// that may be filled again.
template <int kStages>
struct Ring {
  uint64_t full[kStages], empty[kStages];

  // Called by one thread. `loads`: arrivals that fill a stage.
  __device__ void Init(int loads) {
    for (uint64_t& barrier : full) InitBarrier(&barrier, loads);
    for (uint64_t& barrier : empty) InitBarrier(&barrier, kCluster * kWarps);
  }

  // Releases a stage to the loads of both blocks, once it `is_read`. Called by each multiplying warp.
  __device__ void Release(int stage, bool is_read = true) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    ArriveInBlock(&empty[stage], lane % kCluster, is_read && lane < kCluster);
  }

  // Releases the stages of so many blocks of a sum, of which this warpgroup computes nothing.
  __device__ void Skip(int num_blocks, Position<kStages>& position) {
    for (int block = 0; block < num_blocks; ++block, position.Advance()) {
      WaitForLoad(&full[position.stage], position.phase);
      Release(position.stage);
    }
  }
};

// Launches a kernel on so many SMs. Its arguments follow the stream.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchClusters(void (*kernel)(Parameters...), int shared_bytes, int num_sms, cudaStream_t stream,
                           const Arguments&... arguments) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  const int blocks = std::max(num_sms / kCluster, 1) * kCluster;
  return Launch(kernel, dim3(blocks), kThreads, shared_bytes, stream, false, arguments...);
}

// Descriptions of the operands and the result. Matrices and gradients have a second one for redundant groups.
struct Maps {
  CUtensorMap rows, columns[2], out[2];
};

// Describes the operands and the result of a product whose operands have elements of so many bytes, and are
// loaded in these boxes. `is_transposed`: the operands of a gradient of matrices are.
inline cudaError_t Describe(const GroupedDotParams& params, int element_bytes, bool is_transposed,
                            Box of_rows, Box of_columns, Maps& maps) {
  cudaError_t error = cudaSuccess;
  const auto describe = [&](const Matrices& matrices, Box box, CUtensorMap& map) {
    if (error == cudaSuccess && matrices.count > 0) error = DescribeMatrices(matrices, box, map);
  };
  const auto operand = [&](const void* data, int64_t rows, int64_t width) {
    return Matrices(element_bytes, data, 1, rows, width);
  };
  const auto result = [&](void* data, int64_t count, int64_t rows, CUtensorMap& map) {
    describe({sizeof(uint16_t), data, count, rows, params.outer}, {kStoredRows, kStoredColumns}, map);
  };
  const int64_t home = params.num_home, redundant = params.num_groups - params.num_home;
  const int64_t rows = params.num_rows, inner = params.inner, outer = params.outer;
  if (params.product == GroupedDot::kWeights) {
    describe(is_transposed ? operand(params.rows, inner, rows) : operand(params.rows, rows, inner), of_rows,
             maps.rows);
    describe(is_transposed ? operand(params.others, outer, rows) : operand(params.others, rows, outer),
             of_columns, maps.columns[0]);
    result(params.out, home, inner, maps.out[0]);
    result(params.redundant, redundant, inner, maps.out[1]);
    return error;
  }
  const bool along_sum = params.product == GroupedDot::kRowsTransposed;
  const auto matrices = [&](const void* data, int64_t count) {
    const int64_t height = along_sum ? outer : inner, width = along_sum ? inner : outer;
    const int64_t row_stride = along_sum ? inner : params.matrix_width;
    return Matrices(element_bytes, data, count, height, width, row_stride, inner * params.matrix_width);
  };
  describe(operand(params.rows, rows, inner), of_rows, maps.rows);
  describe(matrices(params.others, home), of_columns, maps.columns[0]);
  describe(matrices(params.redundant, redundant), of_columns, maps.columns[1]);
  result(params.out, 1, rows, maps.out[0]);
  return error;
}

}  // namespace jax_ep::cuda::sm90
