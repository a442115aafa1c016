// Words with an epoch, and epochs.
#pragma once

#include "kernels/protocol/control.h"
#include "kernels/ptx/memory.cuh"

namespace jax_ep::cuda {

JAX_EP_HD inline EpochWord Pack(uint32_t number, uint32_t epoch) {
  return static_cast<EpochWord>(epoch) << 32 | number;
}
JAX_EP_HD inline uint32_t EpochOf(EpochWord word) { return static_cast<uint32_t>(word >> 32); }
JAX_EP_HD inline uint32_t NumberOf(EpochWord word) { return static_cast<uint32_t>(word); }

// Returns whether a word has this epoch. Epochs are compared for equality only. A word may be left from any
// earlier epoch, but never from a later one, because a peer writes the next epoch only after this rank has
// left the present one.
__device__ inline bool HasEpoch(EpochWord word, uint32_t epoch) { return EpochOf(word) == epoch; }

__device__ inline void StoreWord(EpochWord* word, uint32_t number, uint32_t epoch) {
  StoreRelaxed(word, Pack(number, epoch));
}
__device__ inline void StoreWordRelease(EpochWord* word, uint32_t number, uint32_t epoch) {
  StoreRelease(word, Pack(number, epoch));
}

// The last epoch. After it epochs continue at 2, because 0 stands for no op, and consecutive epochs must
// differ in parity.
constexpr uint32_t kLastEpoch = 0xffffffffu;
__device__ inline uint32_t NextEpoch(uint32_t epoch) { return epoch == kLastEpoch ? 2 : epoch + 1; }

// Returns the Reason's word in a gate, or 0.
__device__ inline uint32_t ReasonIn(const uint64_t* gate) { return NumberOf(LoadRelaxed(gate)); }

// Adds to the epoch of a gate, modulo 2^32, and returns the gate's old value. Nothing waits for it before
// that is used.
__device__ inline uint64_t AddEpochs(uint64_t* gate, uint32_t epochs) {
  return AddRelaxed(gate, Pack(0, epochs));
}

}  // namespace jax_ep::cuda
