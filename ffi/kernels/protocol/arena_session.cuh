// One block's view of one op of one rank, if ranks write only to each other's arenas (arena.h).
//
// A kernel makes an ArenaOpening early, then an ArenaSession, and then calls in this order:
//
//   Open          each block claims the channel, the first one opens the op, and each determines which peers
//                 this rank may write to
//   PublishCall   the last block, the leader, publishes the call
//   AwaitCalls    the leader compares the calls of all ranks; or, if ranks may be left out,
//   AgreeOnRanks  all blocks call this, which also settles the ranks that take part
//   Close         this block ends; the one that ends last frees the channel
//
// In between, each block waits only for the words that it needs. No rank waits for a peer to end, because no
// peer writes to its results. Every block calls Open and Close once. The state of the session is in shared
// memory, so that the warps of a block cannot disagree. It also has the ranks that the block's threads have
// missed. A thread that misses a rank, or that must not go on, returns true.
//
// A session has kRankWords words with a bit for each rank: one if they suffice, otherwise those of any group.
// Where the lanes of a warp stand for ranks, in this file, lane l stands for each r with r % kWarp == l.
#pragma once

#include "kernels/protocol/arena.h"
#include "kernels/protocol/session.cuh"

namespace jax_ep::cuda {

static_assert(kRankBits == kWarp, "a lane stands for one rank of each word");

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
  return *reinterpret_cast<Arena*>(reinterpret_cast<std::byte*>(peers.channel[rank]) + peers.arena_offset);
}

// Returns whether a rank has begun op `epoch`.
__device__ inline bool HasBegun(const Peers& peers, int rank, uint32_t epoch) {
  return static_cast<int32_t>(LoadAcquire(&ArenaOf(peers, peers.rank).begun[rank]) - epoch) >= 0;
}

// Waits until the `doubtful` ones of some ranks have begun op `epoch`, each lane for those that it stands
// for. If ranks may be left out, it waits for a part of the time only, so that this rank's rows are not late
// at the others. Returns the ranks without those that have not begun. Called by a warp.
template <int kRankWords>
JAX_EP_RARE RankWords<kRankWords> AwaitBegun(const Peers& peers, RankWords<kRankWords> ranks,
                                             const RankWords<kRankWords> doubtful, uint32_t epoch,
                                             bool masks) {
  constexpr int kPart = 4;
  const int lane = threadIdx.x % kWarp;
  const auto is_awaited = [&](int word) {
    return (doubtful.words[word] >> lane & 1) != 0 && !HasBegun(peers, word * kRankBits + lane, epoch);
  };
  const auto have_begun = [&] {
    bool all = true;
    for (int w = 0; w < kRankWords; ++w) all &= !is_awaited(w);
    if (!all) __nanosleep(500);
    return all;
  };
  if (masks) {
    const uint64_t timeout = LoadFromHost(&peers.report->timeout_ns), now = GlobalNanoseconds();
    BlockClock().began = now;  // the part counts as time of the op
    (void)PollUntil(have_begun,
                    [&] { return GlobalNanoseconds() - now >= timeout / kPart || IsGivenUp(peers); });
  } else {
    (void)Await(peers, have_begun);
  }
  __syncwarp();
  for (int w = 0; w < kRankWords; ++w) ranks.words[w] &= ~__ballot_sync(kAllLanes, is_awaited(w));
  return ranks;
}

// The half of the ranks' arenas that an op uses.
struct ArenaHalf {
  const Peers& peers;
  const Slots& slots;
  int number;

  // Returns the mailbox at rank `at` that `source` writes.
  __device__ ArenaMailbox& mailbox(int at, int source) const {
    return ArenaOf(peers, at).mailbox(source, number);
  }
  __device__ std::byte* slot(int at, int source, int token) const {
    return reinterpret_cast<std::byte*>(&ArenaOf(peers, at)) + slots.offset(source, number, token);
  }
  // Returns a chunk of a row that travels as lines.
  __device__ uint4* chunk(int at, int source, int token, int chunk) const {
    return reinterpret_cast<uint4*>(slot(at, source, token) + chunk * kChunkLineBytes);
  }
};

// The first step of an op, by the last warp of each block; see Opening. Each lane loads the state of its
// ranks.
template <int kRankWords>
struct ArenaOpening {
  Opening opening;
  uint32_t heard[kRankWords] = {};  // the last op in which this rank has received each rank's call
  bool is_active[kRankWords] = {};  // each rank takes part, according to the program

  __device__ ArenaOpening(const Peers& peers, const MeshPosition* position_operand,
                          const Attendance& attendance)
      : opening(peers, position_operand, true) {
    if (!IsOpeningWarp()) return;
#pragma unroll
    for (int w = 0; w < kRankWords; ++w) {
      const int r = w * kRankBits + static_cast<int>(threadIdx.x) % kWarp;
      if (r >= peers.num_ranks) break;
      heard[w] = ArenaOf(peers, peers.rank).heard[r];
      is_active[w] = attendance.is_active(r);
    }
  }
  __device__ static bool IsOpeningWarp() { return threadIdx.x / kWarp == blockDim.x / kWarp - 1; }
};

template <int kRankWords>
class ArenaSession {
 public:
  using Ranks = RankWords<kRankWords>;

  __device__ ArenaSession(const Peers& peers, Op op, const Attendance& attendance, const Slots& slots)
      : peers_(peers), op_(op), attendance_(attendance), slots_(slots) {}

  // Opens the op. Returns false if the block must not go on with it. In blocks other than the first, true
  // does not mean that the op is open: if the first block finds the gate closed, the others go on until they
  // find it closed, too. Called by the whole block; synchronizes.
  __device__ bool Open(const ArenaOpening<kRankWords>& arena_opening) {
    if (ArenaOpening<kRankWords>::IsOpeningWarp()) {
      bool fails = false;
      if (Opening::IsOpeningThread()) {
        BlockClock().began = 0;
        BlockClock().limit = 0;
        fails = !arena_opening.opening.Finish(peers_, op_);
      }
      fails = __ballot_sync(kAllLanes, fails) != 0;
      const uint32_t epoch = __shfl_sync(kAllLanes, arena_opening.opening.epoch(), kWarp - 1);
      Ranks active;
#pragma unroll
      for (int w = 0; w < kRankWords; ++w) {
        active.words[w] = __ballot_sync(kAllLanes, arena_opening.is_active[w]);
      }
      const Ranks ranks = active.Has(peers_.rank) ? active : Ranks{};
      const Ranks writable = fails ? Ranks{} : FindWritable(epoch, ranks, arena_opening.heard);
      // Unless ranks may be left out, the op fails without one that has not begun in time.
      const Ranks missing = fails || attendance_.masks ? Ranks{} : ranks.Without(writable);
      fails |= !missing.IsEmpty();
      if (Opening::IsOpeningThread()) {
        if (!missing.IsEmpty()) RecordFailure(peers_, op_, Phase::kEnter, epoch, missing.FirstBits());
        const bool holds_channel = arena_opening.opening.HoldsChannel(peers_);
        const Call call = arena_opening.opening.CallOf(peers_);
        state_of_block() = {epoch, call, ranks, writable, {}, holds_channel, !fails, fails};
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
  // Returns the ranks that take part, as far as is known, or none if this rank takes no part.
  __device__ const Ranks& ranks() const { return ranks_; }
  __device__ bool has_all_ranks() const { return ranks() == Ranks::Below(peers_.num_ranks); }
  // Returns those of them whose arenas this rank may write to.
  __device__ const Ranks& writable() const { return writable_; }
  __device__ bool may_write(int r) const { return writable().Has(r); }
  // Returns whether this block has missed something that it needs.
  __device__ bool has_failed() const { return state_of_block().has_failed; }
  // Returns true for the leader. It compares the calls of all ranks and, if ranks may be left out, decides
  // which ones take part.
  __device__ static bool is_leader() { return blockIdx.x == gridDim.x - 1; }

  __device__ ArenaHalf half() const { return {peers_, slots_, static_cast<int>(epoch() % 2)}; }

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

  // Publishes this rank's call, and reports to the host if a rank is left out. Called by the leader.
  __device__ void PublishCall() const {
    if (threadIdx.x == 0 && !has_all_ranks()) peers_.report->left_out = 1;
#pragma unroll 1
    for (int r = threadIdx.x; r < peers_.num_ranks; r += blockDim.x) {
      if (!may_write(r)) continue;
      const uint64_t word = call().WithBlocks(0);
      EpochWord* const there = half().mailbox(r, peers_.rank).call;
      StoreWord(&there[0], static_cast<uint32_t>(word), epoch());
      StoreWord(&there[1], static_cast<uint32_t>(word >> 32), epoch());
    }
  }

  // Notes that this thread has missed a rank. Returns true.
  __device__ __noinline__ static bool Miss(int r) {
    atomicOr(&state_of_block().missed.words[r / kRankBits], 1u << r % kRankBits);
    return true;
  }
  // Returns, to all threads, whether any thread of the block has missed a rank or must not go on. Nearly
  // always none has. Called by the whole block; synchronizes.
  __device__ static bool HasAnyMissed(bool has_missed) { return __syncthreads_or(has_missed) != 0; }
  // Returns the ranks that threads of the block have missed. Called by the whole block, after HasAnyMissed;
  // synchronizes.
  __device__ Ranks Missed() const {
    const Ranks missed = state_of_block().missed;
    __syncthreads();
    return missed;
  }

  // Waits for the calls of every `step`th rank, from `first` on; a step is at least kRankBits. A rank that
  // calls a different op fails the op. Returns true if this thread has missed a rank or the op has failed.
  // Called by all threads of the leader, or by one of its warps.
  __device__ bool AwaitCalls(int first, int step, const WaitLog& log) const {
    bool is_expected[kRankWords], has_failed = false;
#pragma unroll
    for (int i = 0; i < kRankWords; ++i) {
      const int r = first + i * step;
      is_expected[i] = r < peers_.num_ranks && ranks().Has(r);
      if (r < peers_.num_ranks) log.Write(r, 0);
    }
    const auto take_those = [&](auto&& take) {
      bool all_taken = true;
#pragma unroll
      for (int i = 0; i < kRankWords; ++i) {
        is_expected[i] = is_expected[i] && !take(first + i * step);
        all_taken &= !is_expected[i];
      }
      return all_taken;
    };
    const auto log_now = [&](int r) {  // a rank does not wait for itself
      if (log.wait_us != nullptr && r != peers_.rank) log.Write(r, GlobalNanoseconds());
    };
    const auto take_call = [&](int r) {
      const EpochWord* const words = half().mailbox(peers_.rank, r).call;
      const EpochWord low = LoadRelaxed(&words[0]), high = LoadRelaxed(&words[1]);
      if (!HasEpoch(low, epoch()) || !HasEpoch(high, epoch())) return false;
      log_now(r);
      ArenaOf(peers_, peers_.rank).heard[r] = epoch();
      has_failed |= !IsSameCall(r, high << 32 | NumberOf(low));
      return true;
    };
    if (Await(peers_, [&] { return take_those(take_call); })) return has_failed;
    (void)take_those([&](int r) {
      log_now(r);
      return Miss(r);
    });
    return true;
  }

  // Settles which ranks take part, if ranks may be left out. Only the leader waits for peers: first for their
  // calls, then, in await_rest(ranks), for everything else that this rank expects. The leader then writes its
  // verdict, which all blocks follow. Everything from the remaining ranks has arrived by then. Called by the
  // whole block; synchronizes.
  template <typename AwaitRest>
  __device__ void AgreeOnRanks(const WaitLog& log, AwaitRest&& await_rest) {
    State& state = state_of_block();
    EpochWord* const verdict = ArenaOf(peers_, peers_.rank).verdicts[epoch() % 2];
    if (is_leader()) {
      (void)AwaitCalls(threadIdx.x, blockDim.x, log);
      bool fails = HasAnyMissed(IsGivenUp(peers_));
      if (!fails) {
        await_rest(ranks().Without(Missed()));
        fails = HasAnyMissed(IsGivenUp(peers_));
      }
      const Ranks missed = Missed();
      const bool misses_own = missed.Has(peers_.rank);  // without its own rows it cannot go on
      fails |= misses_own;
      if (threadIdx.x == 0) {
        if (misses_own) RecordFailure(peers_, op_, Phase::kWave, epoch(), RankBits::Of(peers_.rank));
        state.ranks = ranks().Without(missed);
        state.missed = {};
        state.has_failed = fails;
        if (!missed.IsEmpty()) peers_.report->left_out = 1;
        for (int w = 0; w < kRankWords; ++w) StoreWordRelease(&verdict[w], state.ranks.words[w], epoch());
      }
      __syncthreads();
      ranks_ = state.ranks;
      return;
    }
    if (threadIdx.x == 0) {
      // This wait has no time-out. The leader's has one, and if the leader has not found the op open, the
      // gate is closed.
      Ranks seen{};
      const auto is_there = [&] {
        bool there = true;
        for (int w = 0; w < kRankWords; ++w) {
          const EpochWord word = LoadAcquire(&verdict[w]);
          there &= HasEpoch(word, epoch());
          seen.words[w] = NumberOf(word);
        }
        if (!there) __nanosleep(100);
        return there;
      };
      const bool came = PollUntil(is_there, [&] { return IsGivenUp(peers_); });
      state.ranks = came ? seen : Ranks{};
      state.has_failed = IsGivenUp(peers_);
    }
    __syncthreads();
    ranks_ = state.ranks;
  }

  // Returns whether any thread of the block has missed a rank or must not go on, and then records it. Called
  // by the whole block; synchronizes, but the block must do so again before it reads has_failed.
  __device__ bool RecordMissing(Phase phase, bool has_missed) const {
    if (!HasAnyMissed(has_missed)) return false;
    if (threadIdx.x == 0) {
      State& state = state_of_block();
      state.has_failed = true;
      if (!state.missed.IsEmpty()) RecordFailure(peers_, op_, phase, epoch(), state.missed.FirstBits());
    }
    return true;
  }

  // Writes which ranks took part, or, if this rank did not, what the program specified. Called by the leader.
  __device__ void WriteActive() const {
    if (attendance_.active_after == nullptr) return;
#pragma unroll 1
    for (int r = threadIdx.x; r < peers_.num_ranks; r += blockDim.x) {
      attendance_.active_after[r] = ranks().IsEmpty() ? attendance_.is_active(r) : ranks().Has(r);
    }
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
  // The session's state in shared memory, written by one thread at a time, except that any thread may add to
  // `missed`.
  struct State {
    uint32_t epoch;
    Call call;
    Ranks ranks, writable;
    Ranks missed;        // by threads of the block (Miss)
    bool holds_channel;  // no other call site had claimed it
    bool is_open;        // the result of Open
    bool has_failed;
  };
  __device__ static State& state_of_block() {
    __shared__ State state;
    return state;
  }

  __device__ Call call() const { return state_of_block().call; }

  // Returns whether the call that rank r has published is this one. Otherwise the op fails.
  __device__ bool IsSameCall(int r, uint64_t word) const {
    // If ranks may miss ops, each rank numbers its call sites independently.
    const bool any_site = attendance_.active_ranks != nullptr;
    if (any_site ? Call::Of(word).hash == call().hash : Call::Of(word) == call()) return true;
    RecordFailure(peers_, op_, Phase::kCall, epoch(), RankBits::Of(r), ForHost(peers_, call(), word));
    return false;
  }

  // Returns the participating ranks that this rank may write to: those that it has heard from in the previous
  // op, and others once they have begun this one. Called by the warp that opens the op.
  __device__ Ranks FindWritable(uint32_t epoch, const Ranks& ranks,
                                const uint32_t (&heard)[kRankWords]) const {
    const int lane = threadIdx.x % kWarp, R = peers_.num_ranks;
    // This comes before any wait for a peer to have begun, because the peer may wait for this rank.
#pragma unroll
    for (int w = 0; w < kRankWords && is_leader(); ++w) {
      const int r = w * kRankBits + lane;
      if ((ranks.words[w] >> lane & 1) != 0) StoreRelaxed(&ArenaOf(peers_, r).begun[peers_.rank], epoch);
    }
    __syncwarp();
    Ranks doubtful;
#pragma unroll
    for (int w = 0; w < kRankWords; ++w) {
      // A block that comes late may find that the leader has already heard from the peer in this op.
      const bool was_heard = w * kRankBits + lane < R && (heard[w] == epoch - 1 || heard[w] == epoch);
      doubtful.words[w] = ranks.words[w] & ~__ballot_sync(kAllLanes, was_heard);
    }
    return doubtful.IsEmpty() ? ranks : AwaitBegun(peers_, ranks, doubtful, epoch, attendance_.masks);
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
  uint32_t epoch_ = 0;
  Ranks ranks_{}, writable_{};
};

}  // namespace jax_ep::cuda
