// The arguments of the pull kernel.
#pragma once

#include "kernels/protocol/session.cuh"
#include "kernels/rows/ring.cuh"

namespace jax_ep::cuda {

constexpr int kTickets = 1024;  // per block that pulls: enough that warps end together
// Tokens that are folded at a time. The first wave is small, because nothing can be pulled before it is
// folded.
constexpr int kFirstWave = 128;
constexpr int kWave = 256;

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
