// Words with an epoch, the loop that waits for those of other ranks, and the time of an op's waits: its
// limit, and a log.
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

// Marks code that runs only after a wait has failed. It is not inlined, because the kernels need the
// registers.
#define JAX_EP_RARE __device__ __noinline__ inline

// Calls ready() until it returns true. Now and then calls gives_up(), and if that returns true, calls ready()
// once more, because where GPUs are shared this block may not have run all the time. Returns whether it was
// ready. This is the only loop that waits. gives_up() is called rarely, because clocks are slower than the
// words that are waited for. The loop is not unrolled, because long code takes long to load, which matters in
// ops for few tokens.
template <typename Ready, typename GivesUp>
__device__ bool PollUntil(Ready&& ready, GivesUp&& gives_up) {
  constexpr int kPolls = 64;
  while (true) {
#pragma unroll 1
    for (int i = 0; i < kPolls; ++i) {
      if (ready()) return true;
    }
    if (gives_up()) return ready();
  }
}

// Does the same with a time limit of its own, in nanoseconds.
template <typename Ready>
__device__ bool PollFor(uint64_t nanoseconds, Ready&& ready) {
  const uint64_t until = GlobalNanoseconds() + nanoseconds;
  return PollUntil(ready, [&] { return GlobalNanoseconds() >= until; });
}

__device__ inline void Delay(uint64_t nanoseconds) {
  PollFor(nanoseconds, [] { return false; });
}

// The time that this block has waited in the present op.
struct Clock {
  unsigned long long began;  // when a wait first lasted, in nanoseconds; 0 until then
  unsigned long long limit;  // of all waits together; 0 until the host's value was read
};
__device__ inline volatile Clock& BlockClock() {
  __shared__ Clock clock;
  return clock;
}

__device__ inline bool IsGivenUp(const Peers& peers) { return ReasonIn(&peers.own().gate) != 0; }

// Returns whether the op's time is up. The host's value is read late, and once per block, because loads from
// host memory are slow, and slower if many threads issue them.
JAX_EP_RARE bool IsTimeUp(const Peers& peers) {
  constexpr unsigned long long kLong = 1'000'000;
  volatile Clock& clock = BlockClock();
  const unsigned long long now = GlobalNanoseconds(), began = clock.began;
  if (began == 0) clock.began = now;
  if (began == 0 || now < began + kLong) return false;  // another thread may have set `began` after `now`
  if (atomicCAS(const_cast<unsigned long long*>(&clock.limit), 0ull, ~0ull) == 0) {
    clock.limit = LoadFromHost(&peers.report->timeout_ns);
  }
  return now - began > clock.limit;
}

// Waits until ready(). Returns false if the op fails before that or its time is up. Data that arrives before
// the wait ends counts, even if a peer has given up.
template <typename Ready>
__device__ bool Await(const Peers& peers, Ready&& ready) {
  return PollUntil(ready, [&] { return IsGivenUp(peers) || IsTimeUp(peers); });
}

// A log of the time that each rank was waited for, from `began` on.
struct WaitLog {
  float* wait_us = nullptr;  // [R], or null
  uint64_t began = 0;

  __device__ static WaitLog From(float* wait_us) {
    return {wait_us, wait_us == nullptr ? 0 : GlobalNanoseconds()};
  }
  __device__ void Write(int rank, uint64_t came) const {
    if (wait_us != nullptr) wait_us[rank] = came < began ? 0.0f : static_cast<float>(came - began) * 1e-3f;
  }
};

// Delays the block for a time that differs between ranks, ops and phases, plus the time that a test requests.
JAX_EP_RARE void StallFor(const Peers& peers, Phase phase, uint32_t epoch) {
  uint32_t hash = epoch * 0x9e3779b1u + static_cast<uint32_t>(peers.rank * 2 + static_cast<int>(phase));
  hash = (hash ^ hash >> 15) * 0x85ebca77u;
  hash = (hash ^ hash >> 13) * 0xc2b2ae3du;
  const uint64_t asked = LoadFromHost(&peers.report->stall_ns[phase == Phase::kEnter ? 0 : 1]);
  Delay((hash >> 4) % peers.stress_ns + asked);
}

__device__ inline void Stall(const Peers& peers, Phase phase, uint32_t epoch) {
  if (peers.stress_ns != 0) StallFor(peers, phase, epoch);
}

}  // namespace jax_ep::cuda
