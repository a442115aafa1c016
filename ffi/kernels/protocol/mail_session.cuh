// One op of one rank, as one block sees it, where ranks write to each other's arenas only (arena.h).
//
// A kernel begins a MailOpening early, makes a MailSession, and then calls in this order:
//
//   Open         the rank opens the op, and finds out which peers it may write to
//   PublishCall  the last block, the leader, publishes the call
//   AwaitCall    the leader compares what all ranks call. Or, where ranks may be left out, every block calls
//   AgreeOnRanks which also settles the ranks that take part
//   Close        this block ends; the one that ends last frees the channel
//
// In between each block waits only for the words that it needs. Nobody waits for a peer to end, because no
// peer writes to this rank's results. Every block calls Open and Close once. What the session knows lies in
// shared memory, so that the warps of a block cannot disagree.
#pragma once

#include "kernels/protocol/arena.h"
#include "kernels/protocol/session.cuh"

namespace jax_ep::cuda {

// Returns the bits that any thread of a block has, in all of them; nearly always there are none. The whole
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

// Fails an op on all ranks, and fills the results. The block of this rank that ends last; synchronizes.
template <typename Fill>
__device__ __noinline__ void GiveUpMail(const Peers& peers, Op op, uint32_t epoch, Fill&& fill) {
  // After this time, in nanoseconds, what blocks had stored before they ended is in this device's memory, so
  // that fill() overwrites it. Ordered by time, because a fence in each block would slow down every op.
  constexpr uint64_t kStoresLand = 1'000'000;
  if (threadIdx.x == 0) {
    (void)CloseGate(peers, Reason::Of(peers.rank, Phase::kGivenUp, 0));
    Delay(kStoresLand);
  }
  __syncthreads();
  EndUnopened(peers, op, epoch, fill);
}

// Fills which ranks took part, and how long they were waited for, of an op that failed. One block.
JAX_EP_RARE void FillAttendance(const Attendance& attendance, int num_ranks) {
  FillResult(attendance.active_after, int64_t{num_ranks} * 4);
  FillResult(attendance.wait_us, int64_t{num_ranks} * 4);
}

__device__ inline Arena& ArenaOf(const Peers& peers, int rank) {
  return *reinterpret_cast<Arena*>(&peers.control(rank) + 1);
}

// One half of the ranks' arenas, which an op uses.
struct ArenaHalf {
  const Peers& peers;
  const Slots& slots;
  uint32_t number;

  __device__ ArenaHead& head(int rank) const { return ArenaOf(peers, rank).heads[number]; }
  // Mail at rank `at` that `source` writes.
  __device__ Mailbox& mail(int at, int source) const { return head(at).mail[source]; }
  __device__ std::byte* slot(int at, int source, int token) const {
    std::byte* const first = reinterpret_cast<std::byte*>(&ArenaOf(peers, at) + 1);
    return first + number * kSlotsOfHalf + slots.offset(source, token);
  }
};

// The first step of an op, by the last warp of each block, as Opening. Lane r loads what is known of rank r.
struct MailOpening {
  Opening opening;
  uint32_t heard = 0;      // the last op in which this rank has heard of rank r
  bool is_active = false;  // rank r takes part, according to the program

  __device__ MailOpening(const Peers& peers, const MeshPosition* position_operand,
                         const Attendance& attendance)
      : opening(peers, position_operand) {
    const int r = threadIdx.x % kWarp;
    if (!IsOpeningWarp() || r >= peers.num_ranks) return;
    heard = ArenaOf(peers, peers.rank).heard[r];
    is_active = attendance.is_active(r);
  }
  __device__ static bool IsOpeningWarp() { return threadIdx.x / kWarp == blockDim.x / kWarp - 1; }
};

class MailSession {
 public:
  __device__ MailSession(const Peers& peers, Op op, const Attendance& attendance, const Slots& slots)
      : peers_(peers), op_(op), attendance_(attendance), slots_(slots) {}

  // The whole block; synchronizes. Returns false if the block must not go on with the op.
  __device__ bool Open(const MailOpening& mail_opening) const {
    if (MailOpening::IsOpeningWarp()) {
      bool fails = false;
      if (Opening::IsOpeningThread()) {
        BlockClock().began = 0;
        BlockClock().limit = 0;
        fails = !mail_opening.opening.Finish(peers_, op_);
        if (!fails && blockIdx.x > 0) fails = !AwaitOpening(mail_opening.opening.epoch());
      }
      fails = __ballot_sync(kAllLanes, fails) != 0;
      const uint32_t epoch = __shfl_sync(kAllLanes, mail_opening.opening.epoch(), kWarp - 1);
      const unsigned active = __ballot_sync(kAllLanes, mail_opening.is_active);
      const uint32_t ranks = (active >> peers_.rank & 1) != 0 ? active : 0;
      const uint32_t writable = fails ? 0 : FindWritable(epoch, ranks, mail_opening.heard);
      if (Opening::IsOpeningThread())
        state_of_block() = {epoch, mail_opening.opening.call(), ranks, writable, !fails, fails};
    }
    __syncthreads();
    return state_of_block().is_open;
  }

  __device__ uint32_t epoch() const { return state_of_block().epoch; }
  // Bit r: rank r takes part, as far as is known. None if this rank does not.
  __device__ uint32_t ranks() const { return state_of_block().ranks; }
  __device__ bool has_all_ranks() const { return ranks() == (1u << peers_.num_ranks) - 1; }
  // Those of them to whose arenas this rank may write.
  __device__ uint32_t writable() const { return state_of_block().writable; }
  __device__ bool may_write(int r) const { return (writable() >> r & 1) != 0; }
  // Whether this block has missed something it needs.
  __device__ bool has_failed() const { return state_of_block().has_failed; }
  // The leader compares all ranks' calls, and settles which ranks take part where some may be left out.
  __device__ static bool is_leader() { return blockIdx.x == gridDim.x - 1; }

  __device__ ArenaHalf half() const { return {peers_, slots_, epoch() % 2}; }

  // As one thread: waits for a word of this op. Many warps wait at the same time. They pause in between, so
  // that what they wait for is not delayed.
  __device__ bool AwaitWord(const EpochWord* word) const {
    constexpr unsigned kPauseNs = 20;
    return Await(peers_, [&] {
      const bool is_there = HasEpoch(LoadAcquire(word), epoch());
      if (!is_there) __nanosleep(kPauseNs);
      return is_there;
    });
  }

  // Publishes this rank's call, and reports to the host if a rank is left out. The leader; each thread for a
  // rank.
  __device__ void PublishCall() const {
    const int r = threadIdx.x;
    if (r == 0 && !has_all_ranks()) peers_.report->left_out = 1;
    if (r >= peers_.num_ranks || !may_write(r)) return;
    const uint64_t word = call().WithBlocks(0);
    EpochWord* const there = half().mail(r, peers_.rank).call;
    StoreWord(&there[0], static_cast<uint32_t>(word), epoch());
    StoreWord(&there[1], static_cast<uint32_t>(word >> 32), epoch());
  }

  // As one thread for each rank r: waits for its call. Returns bit r if this thread has missed it. A rank
  // that calls something else fails the op.
  __device__ uint32_t AwaitCall(int r, const WaitLog& log) const {
    if (r >= peers_.num_ranks) return 0;
    log.Write(r, 0);
    if ((ranks() >> r & 1) == 0) return 0;
    const EpochWord* const words = half().mail(peers_.rank, r).call;
    EpochWord low, high;
    uint64_t came = 0;
    const bool is_there = Await(peers_, [&] {
      low = LoadRelaxed(&words[0]);
      high = LoadRelaxed(&words[1]);
      const bool both = HasEpoch(low, epoch()) && HasEpoch(high, epoch());
      if (both && log.wait_us != nullptr) came = GlobalNanoseconds();
      return both;
    });
    if (!is_there && log.wait_us != nullptr) came = GlobalNanoseconds();
    if (r != peers_.rank) log.Write(r, came);  // nobody waits for itself
    if (!is_there) return 1u << r;
    ArenaOf(peers_, peers_.rank).heard[r] = epoch();
    const uint64_t word = high << 32 | NumberOf(low);
    // The sites of ops that ranks may miss are each rank's own.
    const bool any_site = attendance_.active_ranks != nullptr;
    if (any_site ? Call::Of(word).hash == call().hash : Call::Of(word) == call()) return 0;
    RecordFailure(peers_, op_, Phase::kCall, epoch(), 1u << r, ForHost(peers_, call(), word));
    return kAborted;
  }

  // Where ranks may be left out, the leader alone waits for peers: first for their calls, then for what else
  // this rank expects, by await_rest(ranks), which returns the ranks that this thread has missed. It writes
  // its verdict, by which all blocks then go, and everything of those ranks is there. The whole block;
  // synchronizes.
  template <typename AwaitRest>
  __device__ void AgreeOnRanks(const WaitLog& log, AwaitRest&& await_rest) const {
    State& state = state_of_block();
    EpochWord* const verdict = &half().head(peers_.rank).verdict;
    if (is_leader()) {
      const uint32_t late = BlockOr(AwaitCall(threadIdx.x, log));
      uint32_t missing = late & ~kAborted;
      bool fails = __syncthreads_or((late & kAborted) != 0 || IsGivenUp(peers_));
      if (!fails) missing |= BlockOr(await_rest(ranks() & ~missing));
      fails |= __syncthreads_or(IsGivenUp(peers_)) != 0;
      if (threadIdx.x == 0) {
        state.ranks &= ~missing;
        state.has_failed = fails;
        if (missing != 0) peers_.report->left_out = 1;
        StoreWordRelease(verdict, state.ranks, epoch());
      }
      __syncthreads();
      return;
    }
    if (threadIdx.x == 0) {
      // Without a time-out: the leader's wait has one, and if it has not found the op open the gate is
      // closed.
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
  }

  // Records that the block has missed ranks; the bits are the same in all of its threads. Returns whether
  // there are any. The whole block, which must synchronize before it looks at has_failed.
  __device__ bool RecordMissing(Phase phase, uint32_t missing) const {
    if (missing == 0) return false;
    if (threadIdx.x == 0) {
      state_of_block().has_failed = true;
      const uint32_t ranks = missing & ~kAborted;
      if (ranks != 0) RecordFailure(peers_, op_, phase, epoch(), ranks);
    }
    return true;
  }

  // Writes which ranks took part; what the program said, if this rank did not. Each thread for a rank.
  __device__ void WriteActive() const {
    const int r = threadIdx.x;
    if (r >= peers_.num_ranks || attendance_.active_after == nullptr) return;
    attendance_.active_after[r] = ranks() == 0 ? attendance_.is_active(r) : ranks() >> r & 1;
  }

  // Ends the block. The block of this rank that ends last frees the channel; if any has failed, fill() first
  // overwrites the results. The blocks' stores are not fenced before they are counted (GiveUpMail). The whole
  // block; synchronizes.
  template <typename Fill>
  __device__ void Close(Fill&& fill) const {
    __shared__ BlocksEnded ended;
    Channel& own = peers_.own();
    if (!state_of_block().is_open && !SettleUnopened(fill)) return;
    Stall(peers_, Phase::kLeave, epoch());
    __syncthreads();
    if (threadIdx.x == 0) {
      ended =
          BlocksEnded::From(atomicAdd(&own.ended, has_failed() ? BlocksEnded::kFailed + 1 : 1), has_failed());
      if (ended.is_last) own.ended = 0;
    }
    __syncthreads();
    if (!ended.is_last) return;
    if (ended.any_failed) GiveUpMail(peers_, op_, epoch(), fill);
    if (threadIdx.x == 0) FreeChannel(own, epoch());
  }

 private:
  // In shared memory, written by one thread at a time.
  struct State {
    uint32_t epoch;
    Call call;
    uint32_t ranks, writable;
    bool is_open, has_failed;
  };
  __device__ static State& state_of_block() {
    __shared__ State state;
    return state;
  }

  __device__ Call call() const { return state_of_block().call; }

  // Waits until the first block has opened this op. Returns false if it does not: the gate is closed, or this
  // block has begun while another op of the rank was ending, and so has taken this one for an earlier one.
  // The wait has no time-out, because the first block waits for nobody before that. A rank that is delayed
  // there must only be late for the others, and not fail the op.
  __device__ bool AwaitOpening(uint32_t epoch) const {
    EpochWord opened;
    const auto is_open = [&] {
      opened = LoadRelaxed(&peers_.own().opened);
      return opened == Pack(peers_.call.site + 1, epoch);
    };
    return PollUntil(is_open,
                     [&] { return static_cast<int32_t>(EpochOf(opened) - epoch) > 0 || IsGivenUp(peers_); });
  }

  // Returns the ranks, of those that take part, that this rank may write to: those that it has heard of in
  // the op before, and others once they have begun this one. Where ranks may be left out, they have a part of
  // the time for that, so that what this rank sends to others does not come too late. The warp that opens the
  // op.
  __device__ uint32_t FindWritable(uint32_t epoch, uint32_t ranks, uint32_t heard) const {
    constexpr int kPart = 4;
    const int r = threadIdx.x % kWarp, R = peers_.num_ranks;
    // Before anybody waits for this rank to have begun.
    if (is_leader() && (ranks >> r & 1) != 0) StoreRelaxed(&ArenaOf(peers_, r).begun[peers_.rank], epoch);
    __syncwarp();
    // A block that comes late may find that the leader has heard of the peer in this op already.
    const bool was_heard = r < R && (heard == epoch - 1 || heard == epoch);
    const uint32_t doubtful = ranks & ~__ballot_sync(kAllLanes, was_heard);
    if (doubtful == 0) return ranks;
    bool writable = (ranks >> r & 1) != 0;
    if ((doubtful >> r & 1) != 0) {
      const uint32_t* const begun = &ArenaOf(peers_, peers_.rank).begun[r];
      const auto has_begun = [&] {
        const bool is_there = static_cast<int32_t>(LoadAcquire(begun) - epoch) >= 0;
        if (!is_there) __nanosleep(500);
        return is_there;
      };
      const uint64_t timeout = LoadFromHost(&peers_.report->timeout_ns);
      const uint64_t until = GlobalNanoseconds() + timeout / (attendance_.masks ? kPart : 1);
      writable = PollUntil(has_begun, [&] { return GlobalNanoseconds() >= until || IsGivenUp(peers_); });
    }
    __syncwarp();
    return __ballot_sync(kAllLanes, writable);
  }

  // Ends a block that has not found the op open: the group has failed, or another op is using the arena.
  // Returns true if this rank has opened the op after all, which then has failed. The whole block;
  // synchronizes.
  template <typename Fill>
  __device__ bool SettleUnopened(Fill&& fill) const {
    __shared__ bool is_opened;
    if (threadIdx.x == 0) {
      // Also where this block has only taken the op for an earlier one: it must not be opened any more.
      (void)CloseGate(peers_, Reason::Of(peers_.rank, Phase::kGivenUp, 0));
      is_opened = HasOpened(peers_, &state_of_block().epoch);
    }
    __syncthreads();
    if (is_opened) return true;
    // No block of this op has written anything.
    if (is_leader()) EndUnopened(peers_, op_, epoch(), fill);
    return false;
  }

  const Peers& peers_;
  Op op_;
  const Attendance& attendance_;
  const Slots& slots_;
};

}  // namespace jax_ep::cuda
