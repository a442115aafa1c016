// The first step of an op: its rank opens it, unless the group has failed or the channel is in use.
#pragma once

#include "kernels/protocol/fail.cuh"

namespace jax_ep::cuda {

// Returns the address of Channel::holder and Channel::epoch as one word.
__device__ inline EpochWord* EndedWord(Channel& own) { return reinterpret_cast<EpochWord*>(&own.holder); }

// The first step of an op, by the last thread of each block. The constructor issues the loads, and nothing
// waits for them before Finish.
class Opening {
 public:
  // If `claims_channel`, every block claims the channel for the op's call site, so it need not wait until the
  // first block has opened the op.
  __device__ Opening(const Peers& peers, const MeshPosition* position_operand, bool claims_channel = false) {
    if (!IsOpeningThread() || peers.num_ranks == 0) return;
    Channel& own = peers.own();
    const MeshPosition position = *position_operand;
    if (blockIdx.x == 0 || claims_channel) {
      Stall(peers, Phase::kEnter, EpochOf(LoadRelaxed(EndedWord(own))) + 1);
    }
    if (claims_channel) holder_ = atomicCAS(&own.holder, 0u, peers.call.site + 1);
    last_ = LoadRelaxed(EndedWord(own));  // after the claim, from when on the epoch stays the same
    // As far as the compiler can tell, this number differs between lanes. Otherwise it would add once for all
    // lanes, and wait here for the old value.
    const uint32_t one = threadIdx.x + 2 - blockDim.x;
    gate_ = blockIdx.x == 0 ? AddEpochs(&own.gate, one) : LoadRelaxed(&own.gate);
    position_ = position;
  }

  __device__ static bool IsOpeningThread() { return threadIdx.x == blockDim.x - 1; }

  // Opens the op in the first block. In other blocks only checks whether the gate is open. Returns false if
  // the group has failed, the channel is in use, or the program runs on another mesh than the group's.
  __device__ bool Finish(const Peers& peers, Op op) const {
    const bool holds = HoldsChannel(peers);
    const bool is_open = blockIdx.x == 0 ? Open(peers, op, holds) : holds && NumberOf(gate_) == 0;
    if (!holds) RecordInUse(peers, op);
    AcquireOnDevice();  // the last op's end: its resets of the counters come before this op counts anything
    if (position_.rank == peers.rank) return is_open;
    RecordFailure(peers, op, Phase::kRank, epoch(), {}, static_cast<uint32_t>(position_.rank));
    return false;
  }
  // Returns whether no other call site has claimed the channel.
  __device__ bool HoldsChannel(const Peers& peers) const {
    return holder_ == 0 || holder_ == peers.call.site + 1;
  }
  __device__ uint32_t epoch() const { return EpochOf(last_) + 1; }
  // Returns the call as it is published.
  __device__ Call CallOf(const Peers& peers) const { return peers.call.In(position_.list); }

 private:
  __device__ bool Open(const Peers& peers, Op op, bool holds) const {
    Channel& own = peers.own();
    if (holds && gate_ == Pack(0, EpochOf(last_))) {
      StoreWord(&own.opened, peers.call.site + 1, epoch());
      return true;
    }
    (void)AddEpochs(&own.gate, ~0u);
    if (holds && NumberOf(gate_) == 0) RecordInUse(peers, op);
    return false;
  }
  // Another op of this rank uses the channel and has not ended.
  __device__ void RecordInUse(const Peers& peers, Op op) const {
    RecordFailure(peers, op, Phase::kChannel, epoch(), RankBits::Of(peers.rank));
  }

  // As they were loaded: to compute with one would wait for it.
  uint32_t holder_ = 0;      // of the channel, before this block claimed it
  EpochWord last_ = 0;       // with the epoch of the op before
  uint64_t gate_ = 0;        // before this op opened it
  MeshPosition position_{};  // according to the program
};

// Returns whether this rank has opened its op, and the op's epoch, after a reason has reached the gate.
// Called by one thread. Blocks that began while another op of this rank ended may have taken the op for an
// earlier one.
JAX_EP_RARE bool HasOpened(const Peers& peers, uint32_t* epoch) {
  Channel& own = peers.own();
  while (true) {
    const EpochWord opened = LoadRelaxed(&own.opened);
    const uint32_t last = EpochOf(opened);
    const bool in_flight = *static_cast<const volatile uint32_t*>(&own.epoch) != last;
    if (in_flight && NumberOf(opened) == peers.call.site + 1) {
      *epoch = last;
      return true;
    }
    // The thread that has added to the gate waits for nothing before it writes `opened` or takes its addition
    // back.
    if (HasEpoch(LoadRelaxed(&own.gate), last)) return false;
  }
}

}  // namespace jax_ep::cuda
