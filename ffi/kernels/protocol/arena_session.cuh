// One block's view of one op of one rank, if ranks write only to each other's arenas (arena.h).
//
// A kernel makes an ArenaOpening early, then an ArenaSession, and then calls in this order:
//
//   Open          each block claims the channel, the first one opens the op, and each determines which peers
//                 this rank may write to
//   PublishCall   the last block, the leader, publishes the call
//   AwaitCall     the leader compares the calls of all ranks; or, if ranks may be left out,
//   AgreeOnRanks  all blocks call this, which also settles the ranks that take part
//   Close         this block ends; the one that ends last frees the channel
//
// In between, each block waits only for the words that it needs. No rank waits for a peer to end, because no
// peer writes to its results. Every block calls Open and Close once. The state of the session is in shared
// memory, so that the warps of a block cannot disagree.
#pragma once

#include "kernels/protocol/arena.h"
#include "kernels/protocol/session.cuh"

namespace jax_ep::cuda {

// In the arena a thread returns the ranks that it has missed as bits. This one says that it has missed none
// but must not go on.
constexpr uint32_t kAbortedBit = 1u << 31;
static_assert(kArenaRanks < 31, "a bit for each rank, and one more");

// Returns, to all threads of a block, the OR of their bits, which is nearly always 0. Called by the whole
// block; synchronizes.
__device__ inline uint32_t BlockOr(uint32_t bits) {
  if (!__syncthreads_or(bits != 0)) return 0;
  __shared__ uint32_t all;
  if (threadIdx.x == 0) all = 0;
  __syncthreads();
  if (bits != 0) atomicOr(&all, bits);
  __syncthreads();
  const uint32_t result = all;
  __syncthreads();
  return result;
}

// Fails an op on all ranks, and fills the results. Called by the block of this rank that ends last;
// synchronizes.
template <typename Fill>
__device__ __noinline__ void FailArenaOp(const Peers& peers, Op op, uint32_t epoch, Fill&& fill) {
  if (threadIdx.x == 0) {
    (void)CloseGate(peers, Reason::Of(peers.rank, Phase::kGivenUp));
    Delay(kStoresLand);
  }
  __syncthreads();
  FailEverywhere(peers, op, epoch, fill);
}

// Fills the ranks that took part, and the times that they were waited for, if an op has failed. Called by one
// block.
JAX_EP_RARE void FillAttendance(const Attendance& attendance, int num_ranks) {
  FillResult(attendance.active_after, int64_t{num_ranks} * 4);
  FillResult(attendance.wait_us, int64_t{num_ranks} * 4);
}

__device__ inline Arena& ArenaOf(const Peers& peers, int rank) {
  return *reinterpret_cast<Arena*>(&peers.control(rank) + 1);
}

// Waits until a rank has begun op `epoch`, and returns whether it has. If ranks may be left out, this waits
// for a part of the time only, so that this rank's rows are not late at the others. Called by one thread for
// the rank.
JAX_EP_RARE bool AwaitBegun(const Peers& peers, const uint32_t* begun, uint32_t epoch, bool masks) {
  constexpr int kPart = 4;
  const auto has_begun = [&] {
    const bool is_there = static_cast<int32_t>(LoadAcquire(begun) - epoch) >= 0;
    if (!is_there) __nanosleep(500);
    return is_there;
  };
  if (!masks) return Await(peers, has_begun);
  const uint64_t timeout = LoadFromHost(&peers.report->timeout_ns), now = GlobalNanoseconds();
  BlockClock().began = now;  // the part counts as time of the op
  return PollUntil(has_begun,
                   [&] { return GlobalNanoseconds() - now >= timeout / kPart || IsGivenUp(peers); });
}

// The half of the ranks' arenas that an op uses.
struct ArenaHalf {
  const Peers& peers;
  const Slots& slots;
  uint32_t number;

  __device__ ArenaHead& head(int rank) const { return ArenaOf(peers, rank).heads[number]; }
  // Returns the mailbox at rank `at` that `source` writes.
  __device__ ArenaMailbox& mailbox(int at, int source) const { return head(at).mailboxes[source]; }
  __device__ std::byte* slot(int at, int source, int token) const {
    std::byte* const first = reinterpret_cast<std::byte*>(&ArenaOf(peers, at) + 1);
    return first + number * kSlotsOfHalf + slots.offset(source, token);
  }
  // Returns a chunk of a row that travels as lines.
  __device__ uint4* chunk(int at, int source, int token, int chunk) const {
    std::byte* const first = reinterpret_cast<std::byte*>(&ArenaOf(peers, at)) + kLinesOffset;
    return reinterpret_cast<uint4*>(first + number * kLinesOfHalf + slots.offset(source, token) +
                                    chunk * kChunkLineBytes);
  }
};

// The first step of an op, by the last warp of each block; see Opening. Lane r loads the state of rank r.
struct ArenaOpening {
  Opening opening;
  uint32_t heard = 0;      // the last op in which this rank has received rank r's call
  bool is_active = false;  // rank r takes part, according to the program

  __device__ ArenaOpening(const Peers& peers, const MeshPosition* position_operand,
                          const Attendance& attendance)
      : opening(peers, position_operand, true) {
    const int r = threadIdx.x % kWarp;
    if (!IsOpeningWarp() || r >= peers.num_ranks) return;
    heard = ArenaOf(peers, peers.rank).heard[r];
    is_active = attendance.is_active(r);
  }
  __device__ static bool IsOpeningWarp() { return threadIdx.x / kWarp == blockDim.x / kWarp - 1; }
};

class ArenaSession {
 public:
  __device__ ArenaSession(const Peers& peers, Op op, const Attendance& attendance, const Slots& slots)
      : peers_(peers), op_(op), attendance_(attendance), slots_(slots) {}

  // Opens the op. Returns false if the block must not go on with it. In blocks other than the first, true
  // does not mean that the op is open: if the first block finds the gate closed, the others go on until they
  // find it closed, too. Called by the whole block; synchronizes.
  __device__ bool Open(const ArenaOpening& arena_opening) {
    if (ArenaOpening::IsOpeningWarp()) {
      bool fails = false;
      if (Opening::IsOpeningThread()) {
        BlockClock().began = 0;
        BlockClock().limit = 0;
        fails = !arena_opening.opening.Finish(peers_, op_);
      }
      fails = __ballot_sync(kAllLanes, fails) != 0;
      const uint32_t epoch = __shfl_sync(kAllLanes, arena_opening.opening.epoch(), kWarp - 1);
      const unsigned active = __ballot_sync(kAllLanes, arena_opening.is_active);
      const uint32_t ranks = (active >> peers_.rank & 1) != 0 ? active : 0;
      const uint32_t writable = fails ? 0 : FindWritable(epoch, ranks, arena_opening.heard);
      // Unless ranks may be left out, the op fails without one that has not begun in time.
      const uint32_t missing = fails || attendance_.masks ? 0 : ranks & ~writable;
      fails |= missing != 0;
      if (Opening::IsOpeningThread()) {
        if (missing != 0) RecordFailure(peers_, op_, Phase::kEnter, epoch, RankBits{0, missing});
        const bool holds_channel = arena_opening.opening.HoldsChannel(peers_);
        const Call call = arena_opening.opening.CallOf(peers_);
        state_of_block() = {epoch, call, ranks, writable, holds_channel, !fails, fails};
      }
    }
    __syncthreads();
    const State& state = state_of_block();
    epoch_ = state.epoch;
    ranks_ = state.ranks;
    writable_ = state.writable;
    return state.is_open;
  }

  __device__ uint32_t epoch() const { return epoch_; }
  // Returns the ranks that take part, as far as is known: bit r stands for rank r. Returns 0 if this rank
  // takes no part.
  __device__ uint32_t ranks() const { return ranks_; }
  __device__ bool has_all_ranks() const { return ranks() == (1u << peers_.num_ranks) - 1; }
  // Returns those of them whose arenas this rank may write to.
  __device__ uint32_t writable() const { return writable_; }
  __device__ bool may_write(int r) const { return (writable() >> r & 1) != 0; }
  // Returns whether this block has missed something that it needs.
  __device__ bool has_failed() const { return state_of_block().has_failed; }
  // Returns true for the leader. It compares the calls of all ranks and, if ranks may be left out, decides
  // which ones take part.
  __device__ static bool is_leader() { return blockIdx.x == gridDim.x - 1; }

  __device__ ArenaHalf half() const { return {peers_, slots_, epoch() % 2}; }

  // Waits until ready(), for something that a peer sends in this op. Many warps wait at the same time, and
  // pause between loads so that they do not delay what they wait for. Called by one thread.
  template <typename Ready>
  __device__ bool AwaitArrival(Ready&& ready) const {
    constexpr unsigned kPauseNs = 20;
    return Await(peers_, [&] {
      const bool is_there = ready();
      if (!is_there) __nanosleep(kPauseNs);
      return is_there;
    });
  }
  // Waits for a word of this op. Called by one thread.
  __device__ bool AwaitWord(const EpochWord* word) const {
    const uint32_t now = epoch();
    return AwaitArrival([&] { return HasEpoch(LoadAcquire(word), now); });
  }

  // Publishes this rank's call, and reports to the host if a rank is left out. Called by the leader, with one
  // thread for each rank.
  __device__ void PublishCall() const {
    const int r = threadIdx.x;
    if (r == 0 && !has_all_ranks()) peers_.report->left_out = 1;
    if (r >= peers_.num_ranks || !may_write(r)) return;
    const uint64_t word = call().WithBlocks(0);
    EpochWord* const there = half().mailbox(r, peers_.rank).call;
    StoreWord(&there[0], static_cast<uint32_t>(word), epoch());
    StoreWord(&there[1], static_cast<uint32_t>(word >> 32), epoch());
  }

  // Waits for the call of rank r. Returns bit r if this thread has missed it. A rank that calls a different
  // op fails the op. Called by one thread for each rank.
  __device__ uint32_t AwaitCall(int r, const WaitLog& log) const {
    if (r >= peers_.num_ranks) return 0;
    log.Write(r, 0);
    if ((ranks() >> r & 1) == 0) return 0;
    const EpochWord* const words = half().mailbox(peers_.rank, r).call;
    const uint32_t now = epoch();
    EpochWord low, high;
    uint64_t came = 0;
    const bool is_there = Await(peers_, [&] {
      low = LoadRelaxed(&words[0]);
      high = LoadRelaxed(&words[1]);
      const bool both = HasEpoch(low, now) && HasEpoch(high, now);
      if (both && log.wait_us != nullptr) came = GlobalNanoseconds();
      return both;
    });
    if (!is_there && log.wait_us != nullptr) came = GlobalNanoseconds();
    if (r != peers_.rank) log.Write(r, came);  // a rank does not wait for itself
    if (!is_there) return 1u << r;
    ArenaOf(peers_, peers_.rank).heard[r] = now;
    const uint64_t word = high << 32 | NumberOf(low);
    // If ranks may miss ops, each rank numbers its call sites independently.
    const bool any_site = attendance_.active_ranks != nullptr;
    if (any_site ? Call::Of(word).hash == call().hash : Call::Of(word) == call()) return 0;
    RecordFailure(peers_, op_, Phase::kCall, epoch(), RankBits::Of(r), ForHost(peers_, call(), word));
    return kAbortedBit;
  }

  // Settles which ranks take part, if ranks may be left out. Only the leader waits for peers: first for their
  // calls, then, in await_rest(ranks), for everything else that this rank expects. await_rest returns the
  // ranks that this thread has missed. The leader then writes its verdict, which all blocks follow.
  // Everything from the remaining ranks has arrived by then. Called by the whole block; synchronizes.
  template <typename AwaitRest>
  __device__ void AgreeOnRanks(const WaitLog& log, AwaitRest&& await_rest) {
    State& state = state_of_block();
    EpochWord* const verdict = &half().head(peers_.rank).verdict;
    if (is_leader()) {
      const uint32_t late = BlockOr(AwaitCall(threadIdx.x, log));
      uint32_t missing = late & ~kAbortedBit;
      bool fails = __syncthreads_or((late & kAbortedBit) != 0 || IsGivenUp(peers_));
      if (!fails) missing |= BlockOr(await_rest(ranks() & ~missing));
      fails |= __syncthreads_or(IsGivenUp(peers_)) != 0;
      const bool misses_own = (missing >> peers_.rank & 1) != 0;  // without its own rows it cannot go on
      fails |= misses_own;
      if (threadIdx.x == 0) {
        if (misses_own) RecordFailure(peers_, op_, Phase::kWave, epoch(), RankBits::Of(peers_.rank));
        state.ranks &= ~missing;
        state.has_failed = fails;
        if (missing != 0) peers_.report->left_out = 1;
        StoreWordRelease(verdict, state.ranks, epoch());
      }
      __syncthreads();
      ranks_ = state.ranks;
      return;
    }
    if (threadIdx.x == 0) {
      // This wait has no time-out. The leader's has one, and if the leader has not found the op open, the
      // gate is closed.
      EpochWord seen;
      const auto is_there = [&] {
        const bool there = HasEpoch(seen = LoadAcquire(verdict), epoch());
        if (!there) __nanosleep(100);
        return there;
      };
      const bool came = PollUntil(is_there, [&] { return IsGivenUp(peers_); });
      state.ranks = came ? NumberOf(seen) : 0;
      state.has_failed = IsGivenUp(peers_);
    }
    __syncthreads();
    ranks_ = state.ranks;
  }

  // Records that the block has missed ranks. The bits are the same in all threads. Returns whether there are
  // any. Called by the whole block, which must synchronize before it reads has_failed.
  __device__ bool RecordMissing(Phase phase, uint32_t missing) const {
    if (missing == 0) return false;
    if (threadIdx.x == 0) {
      state_of_block().has_failed = true;
      const uint32_t ranks = missing & ~kAbortedBit;
      if (ranks != 0) RecordFailure(peers_, op_, phase, epoch(), RankBits{0, ranks});
    }
    return true;
  }

  // Writes which ranks took part, or, if this rank did not, what the program specified. Called with one
  // thread for each rank.
  __device__ void WriteActive() const {
    const int r = threadIdx.x;
    if (r >= peers_.num_ranks || attendance_.active_after == nullptr) return;
    attendance_.active_after[r] = ranks() == 0 ? attendance_.is_active(r) : ranks() >> r & 1;
  }

  // Ends the block. The block of this rank that ends last frees the channel. If any block has failed, fill()
  // first overwrites the results. The blocks' stores are not fenced before they are counted (see
  // FailArenaOp). Called by the whole block; synchronizes.
  template <typename Fill>
  __device__ void Close(Fill&& fill) {
    Channel& own = peers_.own();
    if (!state_of_block().holds_channel && !SettleWithoutClaim(fill)) return;
    Stall(peers_, Phase::kLeave, epoch());
    __syncthreads();
    const BlockEnd end = CountEnd(own, has_failed(), state_of_block().is_open);
    if (!end.is_last) return;
    bool is_opened = true;
    if (end.any_failed) {
      if (end.none_started) {
        FailEverywhere(peers_, op_, epoch(), fill);
      } else {
        FailArenaOp(peers_, op_, epoch(), fill);
      }
      is_opened = LoadRelaxed(&own.opened) == Pack(peers_.call.site + 1, epoch());
    }
    if (threadIdx.x != 0) return;
    if (is_opened) {
      FreeChannel(own, epoch());
    } else {
      PublishEnd(own, epoch() - 1);  // gives the claim back; no op has ended
    }
  }

 private:
  // The session's state in shared memory, written by one thread at a time.
  struct State {
    uint32_t epoch;
    Call call;
    uint32_t ranks, writable;
    bool holds_channel;  // no other call site had claimed it
    bool is_open;        // the result of Open
    bool has_failed;
  };
  __device__ static State& state_of_block() {
    __shared__ State state;
    return state;
  }

  __device__ Call call() const { return state_of_block().call; }

  // Returns the participating ranks that this rank may write to: those that it has heard from in the previous
  // op, and others once they have begun this one. Called by the warp that opens the op.
  __device__ uint32_t FindWritable(uint32_t epoch, uint32_t ranks, uint32_t heard) const {
    const int r = threadIdx.x % kWarp, R = peers_.num_ranks;
    // This comes before any wait for a peer to have begun, because the peer may wait for this rank.
    if (is_leader() && (ranks >> r & 1) != 0) StoreRelaxed(&ArenaOf(peers_, r).begun[peers_.rank], epoch);
    __syncwarp();
    // A block that comes late may find that the leader has already heard from the peer in this op.
    const bool was_heard = r < R && (heard == epoch - 1 || heard == epoch);
    const uint32_t doubtful = ranks & ~__ballot_sync(kAllLanes, was_heard);
    if (doubtful == 0) return ranks;
    bool writable = (ranks >> r & 1) != 0;
    if ((doubtful >> r & 1) != 0) {
      writable = AwaitBegun(peers_, &ArenaOf(peers_, peers_.rank).begun[r], epoch, attendance_.masks);
    }
    __syncwarp();
    return __ballot_sync(kAllLanes, writable);
  }

  // Ends a block that has found the channel in use by another op. The group has then failed. Returns true if
  // this rank has opened the block's op all the same, so that the block's end counts. Otherwise this block
  // fills the results, because the ends of the op's blocks never add up: some may have come after the other
  // op had ended, and gone on until they found the gate closed. Called by the whole block; synchronizes.
  template <typename Fill>
  __device__ bool SettleWithoutClaim(Fill&& fill) {
    __shared__ bool is_opened;
    if (threadIdx.x == 0) is_opened = HasOpened(peers_, &state_of_block().epoch);
    __syncthreads();
    epoch_ = state_of_block().epoch;
    if (!is_opened) FailArenaOp(peers_, op_, epoch(), fill);
    return is_opened;
  }

  const Peers& peers_;
  Op op_;
  const Attendance& attendance_;
  const Slots& slots_;
  // Of all threads, read from the state when the block synchronized.
  uint32_t epoch_ = 0, ranks_ = 0, writable_ = 0;
};

}  // namespace jax_ep::cuda
