// The failure of an op: gates are closed, the host gets a report, peers lose access to this rank's memory,
// and results are filled.
#pragma once

#include "kernels/protocol/wait.cuh"
#include "kernels/rows/fill.cuh"

namespace jax_ep::cuda {

// Prevents this rank from opening ops of this channel from now on. Returns false if the gate was closed
// already.
JAX_EP_RARE bool CloseGate(const Peers& peers, Reason reason) {
  uint64_t* const gate = &peers.own().gate;
  for (uint64_t seen = LoadRelaxed(gate); NumberOf(seen) == 0;) {
    const uint64_t old = CompareAndSwap(gate, seen, seen | reason.word);
    if (old == seen) return true;
    seen = old;
  }
  return false;
}

// Stores this rank's reason in the gates of all ranks, in all channels. This thread does so for every
// `step`th gate, from `first` on. A rank reports the first reason that reaches its gate.
JAX_EP_RARE void CloseAllGates(const Peers& peers, int first, int step) {
  constexpr int kAll = kChannels + 1;
  const uint32_t reason = ReasonIn(&peers.own().gate);
  for (int i = first; i < peers.num_ranks * kAll; i += step) {
    uint64_t* const gate = &peers.control(i / kAll).channels[i % kAll].gate;
    if (ReasonIn(gate) == 0) StoreLowerHalf(gate, reason);
  }
}

// Writes the report of a failed op for the host, `phase` last.
JAX_EP_RARE void WriteReport(const Peers& peers, Op op, Phase phase, uint32_t epoch, RankBits missing,
                             uint64_t other_call) {
  Report* const report = peers.report;
  report->op = static_cast<int32_t>(op);
  report->rank = peers.rank;
  report->missing = missing;
  report->epoch = epoch;
  report->reason = ReasonIn(&peers.own().gate);
  report->call = peers.call.WithBlocks(0);
  report->other_call = other_call;
  FenceSystem();
  *reinterpret_cast<volatile int32_t*>(&report->phase) = static_cast<int32_t>(phase);
  FenceSystem();
}

// Returns true for the first caller on this device since the group was reset. That caller writes the report.
__device__ inline bool IsFirstFailure(const Peers& peers) {
  return atomicExch(&peers.control(peers.rank).recorded, 1u) == 0;
}

// Fails the op for a reason found by this rank, and reports it if it is the first failure. Does nothing if a
// peer has given up already. Called by one thread.
JAX_EP_RARE void RecordFailure(const Peers& peers, Op op, Phase phase, uint32_t epoch, RankBits missing,
                               uint64_t other_call = 0) {
  if (!CloseGate(peers, Reason::Of(peers.rank, phase, missing)) || !IsFirstFailure(peers)) return;
  WriteReport(peers, op, phase, epoch, missing, other_call);
}

// Reports that this rank fails because another one gave up, unless it has reported a failure before.
JAX_EP_RARE void RecordGivenUp(const Peers& peers, Op op, uint32_t epoch) {
  if (IsFirstFailure(peers)) WriteReport(peers, op, Phase::kGivenUp, epoch, {}, 0);
}

// What a thread returns in place of a rank that it has missed. kNone: it has missed none. kAborted: it has
// missed none either, but must not go on.
constexpr int kNone = -1, kAborted = -2;

// Returns whether rank r can no longer access this rank's memory in op `epoch`, after a reason was stored in
// r's gate. If r has not opened the op, it never will. If it has, all of its blocks must have left. (It may
// have opened the next op after that. An op that finds the channel in use also adds to the gate for a
// moment.)
JAX_EP_RARE bool HasLeft(const Peers& peers, int r, uint32_t epoch) {
  const uint32_t last = EpochOf(LoadRelaxed(&peers.channel[r]->gate));
  if (static_cast<int32_t>(last - epoch) < 0) return true;
  if ((LoadFromHost(&peers.report->gone.words[r / kRankBits]) >> r % kRankBits & 1) != 0) return true;
  const Channel& own = peers.own();
  // A block's word of the next op implies that this one has ended.
  const auto has_left = [&](int block) {
    const EpochWord left = LoadAcquire(&own.left[r][block]);
    return HasEpoch(left, epoch) || HasEpoch(left, NextEpoch(epoch));
  };
  if (!has_left(0)) return false;
  const Mailbox& mailbox = peers.mailbox(peers.rank, r);
  const EpochWord low = LoadRelaxed(&mailbox.words[0][0]), high = LoadRelaxed(&mailbox.words[0][1]);
  // Either the first block has failed before it published the op, so no other block went on, or it is
  // publishing the next op.
  if (!HasEpoch(low, epoch) || !HasEpoch(high, epoch)) return true;
  const int blocks = Call::BlocksOf(high << 32 | NumberOf(low));
  for (int block = 1; block < blocks; ++block) {
    if (!has_left(block)) return false;
  }
  return true;
}

// Stops the GPU, because a rank may still write to this one at any time, and no program may continue with
// that memory. Returns if the processes of all those ranks turn out to have ended.
JAX_EP_RARE void StopGpu(const Peers& peers, Op op, uint32_t epoch, const RankSet& inside) {
  // Time limits for the host to notice that a process has ended, and to read the report, in nanoseconds.
  constexpr uint64_t kUntilNoticed = 2'000'000'000, kUntilRead = 1'000'000'000;
  const auto are_gone = [&] {
    bool all_gone = true;
    for (int i = 0; i < kMaxRanks / kRankBits; ++i) {
      all_gone &= (inside.words[i] & ~LoadFromHost(&peers.report->gone.words[i])) == 0;
    }
    return all_gone;
  };
  if (PollFor(kUntilNoticed, are_gone)) return;
  (void)IsFirstFailure(peers);
  WriteReport(peers, op, Phase::kStuck, epoch, inside.FirstBits(), 0);
  Delay(kUntilRead);
  Trap();
}

// Closes the gates of all ranks, and waits until those that have opened this op have left, because they have
// the addresses of this rank's memory. Called by the whole block; synchronizes.
JAX_EP_RARE void RevokeAccess(const Peers& peers, Op op, uint32_t epoch) {
  __shared__ RankSet inside;
  __shared__ bool is_any_inside;
  CloseAllGates(peers, threadIdx.x, blockDim.x);
  if (threadIdx.x == 0) inside = {}, is_any_inside = false;
  __syncthreads();
  for (int r = threadIdx.x; r < peers.num_ranks; r += blockDim.x) {
    if (r == peers.rank) continue;
    // Either the peer finds the reason when it adds to its gate, or the loads in HasLeft find that it has
    // already added.
    uint64_t* const gate = &peers.channel[r]->gate;
    if (ReasonIn(gate) == 0) StoreLowerHalf(gate, ReasonIn(&peers.own().gate));
    FenceSeqCst();
    const uint64_t timeout = LoadFromHost(&peers.report->timeout_ns);
    if (PollFor(timeout, [&] { return HasLeft(peers, r, epoch); })) continue;
    atomicOr(&inside.words[r / kRankBits], 1u << r % kRankBits);
    is_any_inside = true;
  }
  __syncthreads();
  if (threadIdx.x == 0 && is_any_inside) StopGpu(peers, op, epoch, inside);
  __syncthreads();
}

// Fills a result of an op that failed. Bytes of 0xff are NaN as floats and -1 as integers. Called by a whole
// block.
JAX_EP_RARE void FillResult(void* data, int64_t bytes, unsigned char value = 0xff) {
  if (data == nullptr) return;
  FillBytes(static_cast<std::byte*>(data), bytes, value, threadIdx.x, blockDim.x);
}

}  // namespace jax_ep::cuda
