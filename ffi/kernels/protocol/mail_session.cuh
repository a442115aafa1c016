// How the ranks meet in an op that goes through the arena: they open it, tell each other what they call, and
// then only wait for what they need. Nobody waits for a peer to end.
#pragma once

#include "kernels/protocol/fail.cuh"
#include "kernels/protocol/fill.cuh"
#include "kernels/small/args.cuh"

namespace jax_ep::cuda {

// How this rank takes part in an op. The same in all threads of a block.
struct Visit {
  bool open;
  uint32_t epoch;
  Call call;          // as this rank tells of it
  uint32_t ranks;     // bit r: rank r takes part, as far as is known; none where this rank itself does not
  uint32_t writable;  // those of them whose arena this rank may write to
  bool failed;        // this block has missed what it needs
};

// The ranks that the program says take part.
__device__ inline uint32_t ActiveRanks(const SlotArgs& args) {
  const int lane = threadIdx.x % kWarp, R = args.shape.num_ranks;
  const bool takes_part = lane < R && args.attendance.is_active(lane);
  const unsigned ranks = __ballot_sync(kAllLanes, takes_part);
  return ranks >> args.peers.rank & 1 ? ranks : 0;
}

// Whether a rank has begun op `epoch`, so that it has ended all before: as one thread for that rank.
__device__ inline bool HasBegun(const SlotArgs& args, int r, uint32_t epoch) {
  const uint32_t begun = LoadAcquire(&args.arena(args.peers.rank).begun[r]);
  return static_cast<int32_t>(begun - epoch) >= 0;
}

// The ranks, of those that take part, that this rank may write to: those that it has heard of in the op
// before, and others once they have begun this one. Where ranks may be left out they have a part of the time
// for that, so that what this rank sends to others does not come too late. Each warp.
__device__ inline uint32_t FindWritable(const SlotArgs& args, const Visit& visit, uint32_t heard) {
  constexpr int kPart = 4;
  const int lane = threadIdx.x % kWarp;
  const uint32_t doubtful = visit.ranks & ~heard;
  if (doubtful == 0) return visit.ranks;
  bool writable = (visit.ranks & heard) >> lane & 1;
  if (doubtful >> lane & 1) {
    const auto has_begun = [&] { return HasBegun(args, lane, visit.epoch); };
    const uint64_t time = LoadFromHost(&args.peers.report->timeout_ns) / (args.attendance.masks ? kPart : 1);
    const uint64_t until = GlobalNanoseconds() + time;
    while (!(writable = has_begun()) && GlobalNanoseconds() < until && !IsGivenUp(args.peers)) {
      __nanosleep(500);
    }
    // Once more: this block may not have run for all of that time.
    writable = writable || has_begun();
  }
  __syncwarp();
  return __ballot_sync(kAllLanes, writable);
}

// Waits until the first block has opened this op. False if it does not: the gate is closed, or this block has
// begun while another op of the rank was ending, and so has taken this one for an earlier one. The wait needs
// no time-out, because the first block waits for nobody before that; and a rank that stalls there must only
// be late for the others, not let the op fail.
__device__ inline bool AwaitOpening(const Peers& peers, uint32_t epoch) {
  while (true) {
    const Stamped opened = LoadStamped(&peers.own().opened);
    if (opened == Stamp(peers.call.site + 1, epoch)) return true;
    const bool is_later = static_cast<int32_t>(static_cast<uint32_t>(opened >> 32) - epoch) > 0;
    if (is_later || IsGivenUp(peers)) return false;
  }
}

// Opens the op for this rank. The whole block.
__device__ inline Visit OpenSlots(const SlotArgs& args, Op op) {
  const Peers& peers = args.peers;
  const int lane = threadIdx.x % kWarp, R = args.shape.num_ranks;
  Visit visit{};
  const State state = LoadState(peers, args.place_operand);
  const uint32_t last = lane < R ? args.arena(peers.rank).heard[lane] : 0;
  visit.call = state.call;
  visit.ranks = ActiveRanks(args);
  bool open = Begin(peers, op, state, &visit.epoch);
  if (open && blockIdx.x > 0) open = __syncthreads_or(threadIdx.x == 0 && AwaitOpening(peers, visit.epoch));
  visit.open = open;
  if (!open) return visit;
  // Before anybody waits for this rank to have begun.
  if (args.presides() && threadIdx.x < R && (visit.ranks >> threadIdx.x & 1) != 0) {
    StoreRelaxed(&args.arena(threadIdx.x).begun[peers.rank], visit.epoch);
  }
  __syncwarp();
  // A block that comes late may find that the last one has heard of the peer in this op already.
  const bool was_heard = lane < R && (last == visit.epoch - 1 || last == visit.epoch);
  visit.writable = FindWritable(args, visit, __ballot_sync(kAllLanes, was_heard));
  return visit;
}

// Waits as one thread for a word of the present op. Many warps wait at the same time: they pause in between,
// so that what they wait for is not held up.
__device__ inline bool AwaitWordOf(const Peers& peers, const Stamped* word, uint32_t epoch) {
  constexpr unsigned kPauseNs = 20;
  return Await(peers, [&] {
    const bool there = IsOf(LoadStampedAcquire(word), epoch);
    if (!there) __nanosleep(kPauseNs);
    return there;
  });
}

// Tells every rank what this one calls. One block, which also tells the host where a rank is left out.
__device__ inline void TellCall(const SlotArgs& args, const Visit& visit) {
  const int r = threadIdx.x;
  if (r == 0 && visit.ranks != (1u << args.shape.num_ranks) - 1) args.peers.report->left_out = 1;
  if (r >= args.shape.num_ranks || (visit.writable >> r & 1) == 0) return;
  const uint64_t call = visit.call.WithBlocks(0);
  Stamped* const there = args.mail(r, args.peers.rank, visit.epoch).call;
  StoreStamped(&there[0], static_cast<uint32_t>(call), visit.epoch);
  StoreStamped(&there[1], static_cast<uint32_t>(call >> 32), visit.epoch);
}

// As one thread for each rank: waits for its call. Bit r of the result: this thread has missed rank r. A rank
// that calls something else fails the op.
__device__ inline uint32_t AwaitCall(const SlotArgs& args, Op op, const Visit& visit, int r,
                                     const WaitLog& log) {
  const Peers& peers = args.peers;
  if (r >= args.shape.num_ranks) return 0;
  log.Note(r, 0);
  if ((visit.ranks >> r & 1) == 0) return 0;
  const Stamped* const words = args.mail(peers.rank, r, visit.epoch).call;
  Stamped low, high;
  uint64_t came = 0;
  const bool there = Await(peers, [&] {
    low = LoadStamped(&words[0]);
    high = LoadStamped(&words[1]);
    const bool both = IsOf(low, visit.epoch) && IsOf(high, visit.epoch);
    if (both && log.wait_us != nullptr) came = GlobalNanoseconds();
    return both;
  });
  if (!there && log.wait_us != nullptr) came = GlobalNanoseconds();
  if (r != peers.rank) log.Note(r, came);  // nobody waits for itself
  if (!there) return 1u << r;
  args.arena(peers.rank).heard[r] = visit.epoch;
  const uint64_t call = high << 32 | static_cast<uint32_t>(low);
  // The sites of ops that ranks may miss are each rank's own.
  const bool any_site = args.attendance.active_ranks != nullptr;
  if (any_site ? Call::Of(call).hash == visit.call.hash : Call::Of(call) == visit.call) return 0;
  Fail(peers, op, Phase::kCall, visit.epoch, 1u << r, AsFrom(peers, visit.call, call));
  return kKeptOut;
}

// The bits that any thread of a block has, in all of them. Nearly always there are none.
__device__ inline uint32_t BlockOr(uint32_t bits) {
  if (!__syncthreads_or(bits != 0)) return 0;
  __shared__ uint32_t all;
  if (threadIdx.x == 0) all = 0;
  __syncthreads();
  if (bits != 0) atomicOr(&all, bits);
  __syncthreads();
  const uint32_t found = all;
  __syncthreads();
  return found;
}

// Notes that a block has missed ranks; the bits are the same in all of its threads.
__device__ inline void Miss(const SlotArgs& args, Op op, Visit& visit, Phase phase, uint32_t missing) {
  if (missing == 0) return;
  visit.failed = true;
  const uint32_t ranks = missing & ~kKeptOut;
  if (threadIdx.x == 0 && ranks != 0) Fail(args.peers, op, phase, visit.epoch, ranks);
}

// Where ranks may be left out, the block that presides alone waits for peers: first for their calls, then for
// what else this rank expects, by await_rest(ranks), which returns those that were missed. All blocks then go
// by its verdict, and find there what they need. The whole block.
template <typename AwaitRest>
__device__ void AgreeOnRanks(const SlotArgs& args, Op op, Visit& visit, const WaitLog& log,
                             AwaitRest&& await_rest) {
  const Peers& peers = args.peers;
  SlotHead& head = args.head(peers.rank, visit.epoch);
  if (args.presides()) {
    const uint32_t late = BlockOr(AwaitCall(args, op, visit, threadIdx.x, log));
    uint32_t missing = late & ~kKeptOut;
    visit.failed = __syncthreads_or((late & kKeptOut) != 0 || IsGivenUp(peers));
    if (!visit.failed) missing |= BlockOr(await_rest(visit.ranks & ~missing));
    visit.failed |= __syncthreads_or(IsGivenUp(peers));
    visit.ranks &= ~missing;
    if (threadIdx.x == 0) {
      if (missing != 0) peers.report->left_out = 1;
      StoreStampedRelease(&head.verdict, visit.ranks, visit.epoch);
    }
    return;
  }
  // That block's wait is bounded; and if it has not found the op open, that is for the gate.
  __shared__ uint32_t found;
  if (threadIdx.x == 0) {
    Stamped seen;
    while (!IsOf(seen = LoadStampedAcquire(&head.verdict), visit.epoch) && !IsGivenUp(peers)) {
      __nanosleep(100);
    }
    found = IsOf(seen, visit.epoch) ? static_cast<uint32_t>(seen) : 0;
  }
  __syncthreads();
  visit.ranks = found;
  visit.failed = __syncthreads_or(IsGivenUp(peers));
}

// Tells who took part: as the program said, where this rank itself did not. As a thread for each rank.
__device__ inline void WriteActive(const SlotArgs& args, const Visit& visit) {
  const int r = threadIdx.x;
  if (r >= args.shape.num_ranks || args.attendance.active_after == nullptr) return;
  const bool asked = args.attendance.is_active(r);
  args.attendance.active_after[r] = visit.ranks == 0 ? asked : visit.ranks >> r & 1;
}

// What an op that failed leaves of who took part. One block.
JAX_EP_RARE void FillAttendance(const SlotArgs& args) {
  const int64_t bytes = int64_t{args.shape.num_ranks} * 4;
  FillResult(args.attendance.active_after, bytes);
  FillResult(args.attendance.wait_us, bytes);
}

// Lets the op fail on all ranks, and fills the results. One block, after the others have ended.
template <typename Fill>
__device__ __noinline__ void Abandon(const Peers& peers, Op op, uint32_t epoch, Fill&& fill) {
  constexpr uint64_t kSoon = 1'000'000;  // nanoseconds, after which all that blocks had stored is in memory
  if (threadIdx.x == 0) {
    CloseGate(peers, Reason::Of(peers.rank, Phase::kGivenUp, 0));
    for (const uint64_t until = GlobalNanoseconds() + kSoon; GlobalNanoseconds() < until;) {
    }
  }
  __syncthreads();
  KeepOut(peers, op, epoch, false);
  if (threadIdx.x == 0 && atomicExch(&peers.control(peers.rank).recorded, 1u) == 0) {
    WriteReport(peers, op, Phase::kGivenUp, epoch, 0, 0);
  }
  __syncthreads();
  fill();
}

// Ends a block. The one that ends last ends the op: no peer writes to this rank's results, so where a block
// has failed it can fill them at once. The blocks' stores are not fenced before they are counted: only an op
// that has failed needs to know that they have come, and can wait for it.
template <typename Fill>
__device__ void EndSlots(const SlotArgs& args, Op op, const Visit& visit, Fill&& fill) {
  constexpr uint32_t kFailed = 1u << 16;  // counts blocks that have failed, above those that have ended
  const Peers& peers = args.peers;
  Channel& own = peers.own();
  __shared__ bool last, any_failed;
  Stall(peers, Phase::kLeave, visit.epoch);
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t ended = atomicAdd(&own.ended, visit.failed ? kFailed + 1 : 1);
    last = ended % kFailed == gridDim.x - 1;
    any_failed = visit.failed || ended >= kFailed;
    if (last) own.ended = 0;
  }
  __syncthreads();
  if (!last) return;
  if (any_failed) Abandon(peers, op, visit.epoch, fill);
  if (threadIdx.x == 0) CountEpoch(own, visit.epoch);
}

// Ends a block that has not found the op open: the group has failed, or another op is using the arena.
template <typename Fill>
__device__ __noinline__ void EndUnopened(const SlotArgs& args, Op op, Visit visit, Fill&& fill) {
  __shared__ Standing standing;
  __shared__ uint32_t found;
  if (threadIdx.x == 0) {
    // Also where this block has only waited too long: the op must not be opened any more.
    CloseGate(args.peers, Reason::Of(args.peers.rank, Phase::kGivenUp, 0));
    found = visit.epoch;
    standing = FindStanding(args.peers, &found);
  }
  __syncthreads();
  visit.epoch = found;
  visit.failed = true;
  if (standing == Standing::kOpened) {
    EndSlots(args, op, visit, fill);
  } else if (blockIdx.x == gridDim.x - 1) {
    Abandon(args.peers, op, found, fill);  // no block of this op has written anything
  }
}

}  // namespace jax_ep::cuda
