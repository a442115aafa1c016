// The arguments of the pull kernel.
#pragma once

#include "kernels/protocol/session.cuh"
#include "kernels/rows/ring.cuh"

namespace jax_ep::cuda {

// The arguments of a pull of arrays of one type. Passed by value as the kernel's parameter.
struct PullArgs : PullOperands {
  Peers peers;
  Summand summands[kMaxPayloads];
  Bias biases[kMaxBiases];
  bool adds_in_place;       // the bias lies in the result, so that tokens without rows need nothing
  int32_t num_pullers;      // blocks that pull; the others fold
  int32_t sums_per_ticket;  // of folds through rings
  Waves waves;
  RingPartition ring;
};

}  // namespace jax_ep::cuda
