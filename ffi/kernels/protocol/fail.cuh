// How a rank gives up an op: so that afterwards nobody touches its memory, and nobody takes what is there for
// results.
#pragma once

#include "kernels/protocol/session.cuh"

namespace jax_ep::cuda {

// What a kernel that fails is to its channel.
enum class Standing : int {
  kOpened,  // its rank has opened its op
  kNever,   // has not, and never will
  kStray,   // has not, and another op of the rank is in the channel
};

// As one thread of a kernel that fails, after a reason has come to the gate. Finds the op's epoch, too:
// blocks that began while another op ended here may have taken it for an earlier one.
JAX_EP_RARE Standing FindStanding(const Peers& peers, uint32_t* epoch) {
  Channel& own = peers.own();
  while (true) {
    const Stamped opened = LoadStamped(&own.opened);
    const uint32_t noted = static_cast<uint32_t>(opened >> 32);
    const bool in_flight = *static_cast<const volatile uint32_t*>(&own.epoch) != noted;
    if (in_flight && static_cast<uint32_t>(opened) == peers.call.site + 1) {
      *epoch = noted;
      return Standing::kOpened;
    }
    // What has been added to the gate is noted, or taken back, by the thread that did so, which waits for
    // nobody.
    if (IsOf(LoadStamped(&own.gate), noted)) {
      return in_flight ? Standing::kStray : Standing::kNever;
    }
  }
}

// Whether rank r can no longer touch this rank's memory in this op, after a reason was stored in its gate. If
// it has not opened the op, it never will. If it has, all of its blocks must have left. (It may have opened
// the next op after that; and an op that finds the channel in use adds to the gate for a moment.)
JAX_EP_RARE bool IsOut(const Peers& peers, int r, uint32_t epoch) {
  const uint32_t last = static_cast<uint32_t>(LoadStamped(&peers.channel[r]->gate) >> 32);
  if (static_cast<int32_t>(last - epoch) < 0) return true;
  if ((LoadFromHost(&peers.report->gone) >> r & 1) != 0) return true;
  const Channel& own = peers.own();
  // A block's word of the next op says that this one has ended.
  const auto has_left = [&](int block) {
    const Stamped left = LoadStampedAcquire(&own.left[r][block]);
    return IsOf(left, epoch) || IsOf(left, NextEpoch(epoch));
  };
  if (!has_left(0)) return false;
  const Stamped low = LoadStamped(&own.mail[r].words[0][0]), high = LoadStamped(&own.mail[r].words[0][1]);
  // The first block has failed before it told of the op, which no other block does; or it tells of the next
  // one.
  if (!IsOf(low, epoch) || !IsOf(high, epoch)) return true;
  const int blocks = Call::BlocksOf(high << 32 | static_cast<uint32_t>(low));
  for (int block = 1; block < blocks; ++block) {
    if (!has_left(block)) return false;
  }
  return true;
}

// Stops the GPU: a rank may still write here at any time, so no program may go on with this memory. Returns
// if the processes of all those ranks turn out to have ended.
JAX_EP_RARE void StopGpu(const Peers& peers, Op op, uint32_t epoch, uint32_t inside) {
  // Nanoseconds until the host knows that a process has ended, and until it has read the report.
  constexpr uint64_t kToBeMissed = 2'000'000'000, kToBeTold = 1'000'000'000;
  bool is_up;
  const uint64_t missed_at = GlobalNanoseconds() + kToBeMissed;
  do {
    is_up = GlobalNanoseconds() >= missed_at;  // before the look: this block may not run for all of that time
    if ((inside & ~LoadFromHost(&peers.report->gone)) == 0) return;
  } while (!is_up);
  atomicExch(&peers.control(peers.rank).recorded, 1u);
  WriteReport(peers, op, Phase::kStuck, epoch, inside, 0);
  for (const uint64_t until = GlobalNanoseconds() + kToBeTold; GlobalNanoseconds() < until;) {
  }
  Trap();
}

// Keeps all ranks from opening ops of the group from now on. Where this rank has opened the present one,
// peers may know of its memory: waits until those are out that have opened it too. The whole block.
JAX_EP_RARE void KeepOut(const Peers& peers, Op op, uint32_t epoch, bool opened) {
  const int r = threadIdx.x;
  CloseGatesOfAll(peers, r, blockDim.x);
  __shared__ uint32_t inside;
  if (r == 0) inside = 0;
  __syncthreads();
  if (opened && r < peers.num_ranks && r != peers.rank) {
    uint64_t* const gate = &peers.channel[r]->gate;
    // Either the peer finds the reason when it adds to its gate, or the loads below find that it has done so
    // before.
    if (LoadFlag(gate) == 0) StoreFlag(gate, LoadFlag(&peers.own().gate));
    FenceTotal();
    const uint64_t until = GlobalNanoseconds() + LoadFromHost(&peers.report->timeout_ns);
    bool out;
    while (!(out = IsOut(peers, r, epoch)) && GlobalNanoseconds() < until) __nanosleep(1000);
    // Once more: this block may not have run for all of that time.
    if (!out && !IsOut(peers, r, epoch)) atomicOr(&inside, 1u << r);
  }
  __syncthreads();
  if (r == 0 && inside != 0) StopGpu(peers, op, epoch, inside);
  __syncthreads();
}

// Ends an op that has failed, as its last block. fill() overwrites the results once nobody writes to them any
// more.
template <typename Fill>
__device__ __noinline__ void GiveUp(const Peers& peers, Op op, uint32_t epoch, Standing standing,
                                    Fill&& fill) {
  constexpr uint64_t kSoon = 1'000'000, kLong = 2'000'000'000;  // nanoseconds
  Channel& own = peers.own();
  if (threadIdx.x == 0) {
    // A peer's block may have left without its part before that peer's reason comes here.
    for (const uint64_t until = GlobalNanoseconds() + kSoon;
         !IsGivenUp(peers) && GlobalNanoseconds() < until;) {
    }
    CloseGate(peers, Reason::Of(peers.rank, Phase::kGivenUp, 0));
  }
  __syncthreads();
  KeepOut(peers, op, epoch, standing == Standing::kOpened);
  if (threadIdx.x == 0) {
    // The other blocks of this kernel end by themselves: no wait for a peer goes on once the gate is closed.
    // Only where another op of the rank may be in the channel, the count can be wrong.
    const uint64_t longest = min(kLong, 4 * LoadFromHost(&peers.report->timeout_ns));
    const uint64_t until = GlobalNanoseconds() + (standing == Standing::kNever ? longest : kSoon);
    const auto ended = [&] {
      if (standing != Standing::kOpened && GlobalNanoseconds() > until) return true;
      return standing != Standing::kStray && LoadAcquire(&own.ended) >= gridDim.x - 1;
    };
    while (!ended()) {
    }
    if (atomicExch(&peers.control(peers.rank).recorded, 1u) == 0) {
      WriteReport(peers, op, Phase::kGivenUp, epoch, 0, 0);
    }
  }
  __syncthreads();
  fill();
  if (threadIdx.x == 0 && standing == Standing::kOpened) own.epoch = epoch;
}

// Ends a block of an op that has failed before the ranks have met. Nothing is told, and nothing counted, of
// an op that does not own the channel.
template <typename Fill>
__device__ __noinline__ void FailBlock(const Peers& peers, Op op, uint32_t epoch, Fill&& fill) {
  __shared__ Standing standing;
  __shared__ uint32_t found;
  if (threadIdx.x == 0) {
    found = epoch;
    standing = FindStanding(peers, &found);
  }
  __syncthreads();
  if (standing == Standing::kOpened) LeavePeers(peers, found, false);
  if (blockIdx.x == gridDim.x - 1) GiveUp(peers, op, found, standing, fill);
  if (standing != Standing::kStray) End(peers);
}

}  // namespace jax_ep::cuda
