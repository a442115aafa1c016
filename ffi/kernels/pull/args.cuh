// The arguments of the pull kernel.
#pragma once

#include "kernels/protocol/session.cuh"
#include "kernels/rows/ring.cuh"

namespace jax_ep::cuda {

// A pull of arrays of one type. By value in the kernel's parameters.
struct PullArgs : PullOperands {
  Peers peers;
  Summand summands[kMaxPayloads];
  Bias biases[kMaxBiases];
  int32_t num_pullers;  // blocks that pull; the others fold
  Waves waves;
  RingPlan ring;
};

}  // namespace jax_ep::cuda
