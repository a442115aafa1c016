// Waits for peers, which end when the op's time is up or the op has been given up, and what is recorded then.
#pragma once

#include "kernels/ptx/memory.cuh"

namespace jax_ep::cuda {

// How long this block has waited in the present op.
struct Clock {
  unsigned long long began;  // when a wait first lasted, in nanoseconds; 0 until then
  unsigned long long limit;  // how long all waits together may last; 0 until the host was asked
};
__device__ inline volatile Clock& BlockClock() {
  __shared__ Clock clock;
  return clock;
}

// Whether a wait of this block was in vain, so that it does not do its part of the op.
__device__ inline volatile bool& HasAbandoned() {
  __shared__ bool abandoned;
  return abandoned;
}

__device__ inline bool IsGivenUp(const Peers& peers) { return LoadFlag(&peers.own().gate) != 0; }

// What follows a wait in vain is kept out of the kernels' own code, which needs the registers.
#define JAX_EP_RARE __device__ __noinline__ inline

// Whether the op's time is up. The host is asked late, and once a block: loads from its memory take long, and
// all the more if many threads ask.
JAX_EP_RARE bool IsTimeUp(const Peers& peers) {
  constexpr unsigned long long kLong = 1'000'000;
  volatile Clock& clock = BlockClock();
  const unsigned long long now = GlobalNanoseconds(), began = clock.began;
  if (began == 0) clock.began = now;
  if (began == 0 || now < began + kLong) return false;  // another thread may have begun after `now`
  if (atomicCAS(const_cast<unsigned long long*>(&clock.limit), 0ull, ~0ull) == 0) {
    clock.limit = LoadFromHost(&peers.report->timeout_ns);
  }
  return now - began > clock.limit;
}

// Calls ready() until it is true. False if it is not, once the op's time is up or the op was given up.
// The clock is read rarely: it is slower than what is waited for. Loops that wait are not unrolled: long code
// takes long to load, which is seen in ops of few tokens.
template <typename Ready>
__device__ bool Await(const Peers& peers, Ready&& ready) {
  constexpr int kPolls = 64;
  while (true) {
#pragma unroll 1
    for (int i = 0; i < kPolls; ++i) {
      if (ready()) return true;
    }
    // What has come by the time that a peer gives up counts (Leave relies on it). When time is up, too: this
    // block may not have run for all of it, where GPUs are shared.
    if (IsGivenUp(peers) || IsTimeUp(peers)) return ready();
  }
}

// Keeps this rank from opening ops of this channel from now on. False if it was kept from that already.
JAX_EP_RARE bool CloseGate(const Peers& peers, Reason reason) {
  uint64_t* const gate = &peers.own().gate;
  for (uint64_t seen = LoadStamped(gate); static_cast<uint32_t>(seen) == 0;) {
    const uint64_t old = CompareAndSwap(gate, seen, seen | reason.word);
    if (old == seen) return true;
    seen = old;
  }
  return false;
}

// Stores this rank's reason in the gates of all ranks, in all channels; every `step`th of them. The first
// reason that comes to a gate is the one to tell.
JAX_EP_RARE void CloseGatesOfAll(const Peers& peers, int first, int step) {
  constexpr int kAll = kChannels + 1;
  const uint32_t reason = LoadFlag(&peers.own().gate);
  for (int i = first; i < peers.num_ranks * kAll; i += step) {
    uint64_t* const gate = &peers.control(i / kAll).channels[i % kAll].gate;
    if (LoadFlag(gate) == 0) StoreFlag(gate, reason);
  }
}

// Tells the host how an op failed.
JAX_EP_RARE void WriteReport(const Peers& peers, Op op, Phase phase, uint32_t epoch, uint32_t missing,
                             uint64_t other_call) {
  Report* const report = peers.report;
  report->op = static_cast<int32_t>(op);
  report->rank = peers.rank;
  report->missing = missing;
  report->epoch = epoch;
  report->reason = LoadFlag(&peers.own().gate);
  report->call = peers.call.WithBlocks(0);
  report->other_call = other_call;
  FenceSystem();
  *reinterpret_cast<volatile int32_t*>(&report->phase) = static_cast<int32_t>(phase);
  FenceSystem();
}

// Lets the op fail for a reason found here. The first one is told to the host; nothing happens if a peer has
// given up already. One thread.
JAX_EP_RARE void Fail(const Peers& peers, Op op, Phase phase, uint32_t epoch, uint32_t missing,
                      uint64_t other_call = 0) {
  if (!CloseGate(peers, Reason::Of(peers.rank, phase, missing))) return;
  if (atomicExch(&peers.control(peers.rank).recorded, 1u) != 0) return;
  WriteReport(peers, op, phase, epoch, missing, other_call);
}

// What a thread answers that has missed no rank, but must not go on.
constexpr uint32_t kKeptOut = 1u << 31;
static_assert(kMaxRanks < 31, "a bit for each rank, and one more");

// Whether no thread of the block misses a rank: bit r of `missing` says that this one does. The whole block,
// to which everything is then visible that the peers had written before what its threads waited for.
__device__ inline bool AreAllThere(const Peers& peers, Op op, Phase phase, uint32_t epoch, uint32_t missing) {
  if (!__syncthreads_or(missing != 0)) return true;
  __shared__ uint32_t all;
  if (threadIdx.x == 0) all = 0;
  __syncthreads();
  if (missing != 0) atomicOr(&all, missing);
  __syncthreads();
  if (threadIdx.x == 0) Fail(peers, op, phase, epoch, all & ~kKeptOut);
  return false;
}

// Holds the block up for a time that differs between ranks, ops and phases, and for as long as a test asks.
JAX_EP_RARE void StallFor(const Peers& peers, Phase phase, uint32_t epoch) {
  uint32_t hash = epoch * 0x9e3779b1u + static_cast<uint32_t>(peers.rank * 2 + static_cast<int>(phase));
  hash = (hash ^ hash >> 15) * 0x85ebca77u;
  hash = (hash ^ hash >> 13) * 0xc2b2ae3du;
  const uint64_t asked = LoadFromHost(&peers.report->stall_ns[phase == Phase::kEnter ? 0 : 1]);
  const uint64_t until = GlobalNanoseconds() + (hash >> 4) % peers.stress_ns + asked;
  while (GlobalNanoseconds() < until) {
  }
}

__device__ inline void Stall(const Peers& peers, Phase phase, uint32_t epoch) {
  if (peers.stress_ns != 0) StallFor(peers, phase, epoch);
}

}  // namespace jax_ep::cuda
