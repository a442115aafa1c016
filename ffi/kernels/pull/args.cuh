// The arguments of the pull kernel.
#pragma once

#include "kernels/protocol/session.cuh"
#include "kernels/rows/ring.cuh"

namespace jax_ep::cuda {

// A pull of arrays of one type. By value in the kernel's parameters.
struct PullArgs {
  Shape shape;
  Peers peers;
  const MeshPlace* place_operand;
  HandleArrays handle;
  Summand summands[kMaxPayloads];
  int32_t num_summands;
  int32_t num_pullers;  // blocks that pull; the others fold
  bool folds;
  Waves waves;
  RingPlan ring;
  const float* row_weights;
  Bias biases[kMaxBiases];
  int32_t num_biases;
  const float* arrived_weights;
  float* topk_weights;
};

}  // namespace jax_ep::cuda
