// One block's view of one op of one rank, if ranks access each other's arrays.
//
// A kernel makes an Opening early, then a Session, and then calls in this order:
//
//   Open       the rank opens the op: from now on its peers must wait for it before they return
//   Publish    the first block publishes the call and the addresses of this rank's arrays
//   Meet       all ranks have published the same call, so peers' arrays may be accessed
//   Leave      this block no longer accesses them
//   AwaitLeft  the last block waits until all blocks of all ranks have left
//   Close      this block ends; the block of this rank that ends last frees the channel
//
// The first and the last block are those with the lowest and the highest number. FinishShare and AwaitWave
// may be called from Open to Close, because they only use control blocks.
//
// A block that cannot go on calls Abort in place of Leave and Close. The state of the session is in shared
// memory, so that the warps of a block cannot disagree. docs/protocol.md describes what each step guarantees.
#pragma once

#include "kernels/protocol/opening.cuh"
#include "kernels/protocol/waves.cuh"

namespace jax_ep::cuda {

// Returns another rank's call in the form that the host has registered, as if it came from this rank's list.
// `own_call` is this rank's call as it is published.
__device__ inline uint64_t ForHost(const Peers& peers, const Call& own_call, uint64_t call) {
  return call ^ static_cast<uint64_t>(own_call.hash ^ peers.call.hash) << 32;
}

// Returned to all threads of a block when its end has been counted.
struct BlockEnd {
  bool is_last;       // all blocks of this rank have ended
  bool any_failed;    // this one or one that ended before it
  bool none_started;  // all of them found that the op could not be opened
};

// Counts the end of a block. Its stores are not fenced before that (see kStoresLand). Called by the whole
// block, which has synchronized; synchronizes.
__device__ inline BlockEnd CountEnd(Channel& own, bool failed, bool started = true) {
  constexpr uint32_t kFailed = 1u << 10;   // counts failed blocks, above those that have ended
  constexpr uint32_t kStarted = 1u << 20;  // counts those that started
  static_assert(kMaxBlocks < kFailed, "the counts do not overlap");
  __shared__ BlockEnd end;
  if (threadIdx.x == 0) {
    const uint32_t added = 1 + (failed ? kFailed : 0) + (started ? kStarted : 0);
    const uint32_t ended = atomicAdd(&own.ended, added) + added;
    end = {ended % kFailed == gridDim.x, ended / kFailed % kFailed != 0, ended < kStarted};
    if (end.is_last) own.ended = 0;
  }
  __syncthreads();
  return end;
}

// Time in nanoseconds after which the stores of blocks that have ended are in this device's memory, so that
// fill() overwrites them. They are ordered by time, because a fence in each block would slow down every op.
constexpr uint64_t kStoresLand = 1'000'000;

// Publishes which op of this rank has ended last. An op that finds it finds the counters reset.
__device__ inline void PublishEnd(Channel& own, uint32_t epoch) {
  StoreReleaseOnDevice(EndedWord(own), Pack(0, epoch));
}

// Frees the channel for the next op. Called by one thread of the block that ends last.
__device__ inline void FreeChannel(Channel& own, uint32_t epoch) {
  if (epoch == kLastEpoch) {
    epoch = 1;
    (void)AddEpochs(&own.gate, 2);  // so that its epoch also becomes 1
    StoreWord(&own.opened, 0, 1);
  }
  PublishEnd(own, epoch);  // last, because an op may open from now on
}

// Ends an op that was opened and has failed. fill() overwrites the results once nothing else writes to them.
// Called by the block of this rank that ends last; synchronizes.
template <typename Fill>
__device__ __noinline__ void GiveUp(const Peers& peers, Op op, uint32_t epoch, bool counts_ends,
                                    Fill&& fill) {
  // A peer's block may have left without doing its part before the peer's reason arrives. The report is
  // better with that reason, and nothing else depends on this time.
  constexpr uint64_t kReasonComes = 1'000'000;  // nanoseconds
  if (threadIdx.x == 0) {
    PollFor(kReasonComes, [&] { return IsGivenUp(peers); });
    (void)CloseGate(peers, Reason::Of(peers.rank, Phase::kGivenUp));
  }
  __syncthreads();
  RevokeAccess(peers, op, epoch);
  if (threadIdx.x == 0) {
    if (counts_ends) Delay(kStoresLand);
    if (!counts_ends) PollUntil([&] { return HasLeft(peers, peers.rank, epoch); }, [] { return false; });
    RecordGivenUp(peers, op, epoch);
  }
  __syncthreads();
  fill();
}

// Fails an op on all ranks, reports it, and fills the results. No peer may have addresses of this rank.
// Called by one block.
template <typename Fill>
__device__ __noinline__ void FailEverywhere(const Peers& peers, Op op, uint32_t epoch, Fill&& fill) {
  CloseAllGates(peers, threadIdx.x, blockDim.x);
  if (threadIdx.x == 0) RecordGivenUp(peers, op, epoch);
  fill();
}

class Session {
 public:
  // `counts_ends`: blocks work on this rank's results after they have left, so their ends are counted. If
  // they do not, the last block ends last, because it waits until all blocks have left.
  __device__ Session(const Peers& peers, Op op, bool counts_ends)
      : peers_(peers), op_(op), counts_ends_(counts_ends) {}

  // Opens the op. Returns false if the block must not go on with it. In blocks other than the first, true
  // does not yet mean that the op is open (see AwaitOpened). Called by the whole block; synchronizes.
  __device__ bool Open(const Opening& opening) {
    if (Opening::IsOpeningThread()) {
      BlockClock().began = 0;
      BlockClock().limit = 0;
      const bool failed = !opening.Finish(peers_, op_);
      state_of_block() = {opening.epoch(), opening.CallOf(peers_), failed};
    }
    __syncthreads();
    epoch_ = state_of_block().epoch;
    return !has_failed();
  }

  __device__ uint32_t epoch() const { return epoch_; }
  // Returns whether the block cannot do its part of the op. Valid for the whole block once it has
  // synchronized.
  __device__ bool has_failed() const { return state_of_block().has_failed; }

  // Publishes the call and the addresses of this rank's arrays: the first `num_buffers` of `outgoing` in
  // shared memory. Called by the first block. Results of earlier kernels are visible to all devices by now.
  __device__ void Publish(Published& outgoing, int num_buffers) const {
    const int count = Published::Count(num_buffers);
    for (int i = threadIdx.x; i < peers_.num_ranks * count; i += blockDim.x) {
      const uint64_t word =
          i % count == 0 ? call().WithBlocks(gridDim.x) : outgoing.Word(i % count, num_buffers);
      EpochWord* const there = peers_.mailbox(i / count, peers_.rank).words[i % count];
      StoreWord(&there[0], static_cast<uint32_t>(word), epoch());
      StoreWord(&there[1], static_cast<uint32_t>(word >> 32), epoch());
    }
  }

  // Waits until all ranks have published this op, and copies what they publish to shared memory. Threads that
  // have missed no rank also call also(), which returns the rank that they miss there, kNone or kAborted.
  // Without peers, only also() is called. Returns false if a rank did not come in time or called a different
  // op. Otherwise the block also sees everything that the peers had written before the words that its threads
  // waited for. Called by the whole block; synchronizes.
  template <typename Also>
  __device__ bool Meet(int num_buffers, Published* all, const WaitLog& log, Also&& also) const {
    int missed = peers_.num_ranks == 0 ? kNone : ReadPublished(num_buffers, all, log);
    if (missed == kNone) missed = also();
    return Agree(Phase::kEnter, missed);
  }
  __device__ bool Meet(int num_buffers, Published* all) const {
    return Meet(num_buffers, all, {}, [] { return kNone; });
  }

  // Waits until ready(). Returns false once the op has failed or its time is up. Called by one thread.
  template <typename Ready>
  __device__ bool Await(Ready&& ready) const {
    return cuda::Await(peers_, ready);
  }

  // Waits until the first block has opened this op. Returns false if it cannot be opened.
  __device__ bool AwaitOpened() const {
    return Await([&] { return IsOpenedNow(); });
  }
  // Returns whether the first block has opened this op, without waiting. Until it has, this block may belong
  // to an op that finds the channel in use.
  __device__ bool IsOpenedNow() const { return LoadRelaxed(&peers_.own().opened) == OpenedWord(); }

  // Waits until every rank has finished a wave. Returns false if that did not happen in time; the block then
  // has not done its part. Called by a warp.
  __device__ bool AwaitWave(int wave) const {
    const int lane = threadIdx.x % kWarp;
    const uint32_t* const flags = peers_.own().wave_done[wave];
    const uint32_t now = epoch();
    unsigned missing = 0;
    for (int first = 0; first < peers_.num_ranks && missing == 0; first += kWarp) {
      // A peer may already fold for the next op while this rank still spreads, because the peer has ended
      // this op.
      const auto has_come = [&] {
        const uint32_t seen = LoadAcquire(&flags[first + lane]);
        const bool is_there = seen == now || seen == NextEpoch(now);
        if (!is_there) __nanosleep(200);  // many warps wait for the same word
        return is_there;
      };
      const bool late = first + lane < peers_.num_ranks && !Await(has_come);
      missing = __ballot_sync(kAllLanes, late);
      if (missing != 0 && lane == 0) {
        RecordFailure(peers_, op_, Phase::kWave, epoch(), RankBits{first / kWarp, missing});
        state_of_block().has_failed = true;
      }
      __syncwarp();  // makes what each lane has acquired visible to all
    }
    return missing == 0;
  }

  // Reports to every peer when this rank has finished a wave, whose work its blocks share. Called for each of
  // the `num_shares`, by one warp of the block that has done the share, after the threads that did it have
  // synchronized with this warp.
  __device__ void FinishShare(int wave, int num_shares) const {
    if (threadIdx.x % kWarp != 0) return;
    const EpochWord opened = LoadRelaxed(&peers_.own().opened);  // arrives while the fence waits
    // The threads' work comes before the share is counted, and all shares come before the report to the
    // peers.
    FenceSystem();
    // A rank that folds has not met its peers yet. An op that finds the channel in use must not report
    // anything to them.
    if (opened != OpenedWord() && !AwaitOpened()) return;
    const unsigned most = static_cast<unsigned>(num_shares) - 1;
    if (atomicInc(&peers_.own().wave_shares[wave], most) != most) return;  // back to 0 with the last
    FenceSystem();
    for (int r = 0; r < peers_.num_ranks; ++r)
      StoreRelaxed(&peers_.channel[r]->wave_done[wave][peers_.rank], epoch());
  }

  // Reports to every peer that this block no longer accesses the peers' memory or reads what they have
  // published, and whether it has done its part. A peer that gives up waits for this report. Called by the
  // whole block; synchronizes.
  __device__ void Leave() const {
    if (blockIdx.x == gridDim.x - 1) Stall(peers_, Phase::kLeave, epoch());
    __syncthreads();
    for (int r = threadIdx.x; r < peers_.num_ranks; r += blockDim.x) {
      StoreWordRelease(&peers_.channel[r]->left[peers_.rank][blockIdx.x], has_failed() ? kBroken : kWhole,
                       epoch());
    }
  }

  // Waits until every block of every rank has left. Returns false if that did not happen in time, or if a
  // block has not done its part. Called by the last block, after it has left; synchronizes.
  __device__ bool AwaitLeft(const Published* all) const { return AwaitLeftOf(*this, all); }

  // Ends the block. The block of this rank that ends last frees the channel. If any block has failed, fill()
  // first overwrites the results; by then no other block and no peer writes to them. Called by the whole
  // block; synchronizes.
  template <typename Fill>
  __device__ void Close(Fill&& fill) const {
    Channel& own = peers_.own();
    __syncthreads();
    const BlockEnd end = counts_ends_ ? CountEnd(own, has_failed())
                                      : BlockEnd{blockIdx.x == gridDim.x - 1, has_failed(), false};
    if (!end.is_last) return;
    if (end.any_failed) GiveUp(peers_, op_, epoch(), counts_ends_, fill);
    if (threadIdx.x != 0) return;
    // No request is in flight any more. Blocks whose ends are counted have settled theirs before. Those of
    // other blocks come before the words by which they left, which this block has acquired.
    for (uint32_t& sent : own.sent) TicketCounter{&sent}.Reset();
    for (uint32_t* next : {&own.spread, &own.cleared}) TicketCounter{next}.Reset();
    FreeChannel(own, epoch());
  }

  // Ends a block that does not go on with the op, whether or not its rank has opened it. If it has not, no
  // block waits for another one, so take_back() overwrites the results that this block has written, and the
  // last block overwrites all of them. Called by the whole block; synchronizes.
  template <typename Fill, typename TakeBack>
  __device__ void Abort(Fill&& fill, TakeBack&& take_back) const {
    AbortBlock(peers_, op_, counts_ends_, fill, take_back);
  }
  template <typename Fill>
  __device__ void Abort(Fill&& fill) const {
    AbortBlock(peers_, op_, counts_ends_, fill, [] {});
  }

 private:
  // The session's state in shared memory, written by one thread at a time.
  struct State {
    uint32_t epoch;
    Call call;
    bool has_failed;
  };
  __device__ static State& state_of_block() {
    __shared__ State state;
    return state;
  }

  __device__ Call call() const { return state_of_block().call; }
  __device__ EpochWord OpenedWord() const { return Pack(peers_.call.site + 1, epoch()); }

  // Ends the block as Abort does. It is not a member, because the object would then need an address, and
  // would be kept in memory in the whole kernel.
  template <typename Fill, typename TakeBack>
  __device__ __noinline__ static void AbortBlock(const Peers& peers, Op op, bool counts_ends, Fill&& fill,
                                                 TakeBack&& take_back) {
    __shared__ bool is_opened;
    Session session(peers, op, counts_ends);
    __syncthreads();
    if (threadIdx.x == 0) is_opened = HasOpened(peers, &state_of_block().epoch);
    __syncthreads();
    session.epoch_ = state_of_block().epoch;
    if (is_opened) {
      session.Leave();
      session.Close(fill);
      return;
    }
    take_back();
    if (blockIdx.x == gridDim.x - 1) FailEverywhere(peers, op, session.epoch(), fill);
  }

  // Waits as AwaitLeft does. Kept out of the kernels' own code, which needs the registers.
  __device__ __noinline__ static bool AwaitLeftOf(const Session session, const Published* all) {
    const Peers& peers = session.peers_;
    const Channel& own = peers.own();
    const uint32_t now = session.epoch();
    int missed = kNone, stride = 1;
    for (int r = 0; r < peers.num_ranks; ++r) stride = max(stride, Call::BlocksOf(all[r].call));
    for (int i = threadIdx.x; i < peers.num_ranks * stride && missed == kNone; i += blockDim.x) {
      const int r = i / stride, block = i % stride;
      if (block >= Call::BlocksOf(all[r].call)) continue;
      EpochWord seen;
      if (!session.Await([&] { return HasEpoch(seen = LoadAcquire(&own.left[r][block]), now); })) {
        missed = r;
      } else if (NumberOf(seen) != kWhole) {
        missed = kAborted;
      }
    }
    return session.Agree(Phase::kLeave, missed);
  }

  // Returns true if no thread of the block has missed a rank. `missed` is the rank that this thread has
  // missed, kNone or kAborted. Otherwise the op fails. Called by the whole block; synchronizes.
  __device__ bool Agree(Phase phase, int missed) const {
    if (!__syncthreads_or(missed != kNone)) return true;
    __shared__ RankSet all;
    if (threadIdx.x == 0) all = {};
    __syncthreads();
    if (missed >= 0) atomicOr(&all.words[missed / kRankBits], 1u << missed % kRankBits);
    __syncthreads();
    if (threadIdx.x == 0) {
      const RankBits ranks = all.FirstBits();
      // Where only a peer has failed, its reason is about to reach this rank.
      if (ranks.bits != 0) RecordFailure(peers_, op_, phase, epoch(), ranks);
      state_of_block().has_failed = true;
    }
    return false;
  }

  // Waits for one published word of rank r. Sets `came` to the time when it was found.
  __device__ bool AwaitWord(int r, int number, uint64_t* word, uint64_t* came = nullptr) const {
    const EpochWord* const words = peers_.mailbox(peers_.rank, r).words[number];
    const uint32_t now = epoch();
    EpochWord low, high;
    const bool is_there = Await([&] {
      low = LoadRelaxed(&words[0]);
      high = LoadAcquire(&words[1]);
      const bool both = HasEpoch(low, now) && HasEpoch(high, now);
      if (both && came != nullptr) *came = GlobalNanoseconds();
      return both;
    });
    *word = high << 32 | NumberOf(low);
    return is_there;
  }

  // Logs when each rank's call arrives, if there are more ranks than lanes. Called by the first warp.
  __device__ __noinline__ static void LogArrivals(const Session session, const WaitLog log) {
    const Peers& peers = session.peers_;
    const uint32_t now = session.epoch();
    uint32_t expected = 0;  // bit i: this lane's i-th rank has not come
    for (int r = threadIdx.x; r < peers.num_ranks; r += kWarp) expected |= 1u << r / kWarp;
    const auto log_those = [&](auto&& has_come) {
      for (int r = threadIdx.x; r < peers.num_ranks; r += kWarp) {
        if ((expected >> r / kWarp & 1) == 0 || !has_come(r)) continue;
        log.Write(r, r == peers.rank ? 0 : GlobalNanoseconds());  // a rank does not wait for itself
        expected &= ~(1u << r / kWarp);
      }
      return expected == 0;
    };
    (void)session.Await([&] {
      return log_those([&](int r) {
        const EpochWord* const words = peers.mailbox(peers.rank, r).words[0];
        return HasEpoch(LoadRelaxed(&words[0]), now) && HasEpoch(LoadRelaxed(&words[1]), now);
      });
    });
    log_those([](int) { return true; });
    __syncwarp();
  }

  // Waits until every rank has published its call, and fails the op if they do not all call the same one.
  // Returns a rank that this thread has missed, kNone or kAborted. Called by the first warp.
  __device__ int CompareCalls(Published* all, const WaitLog& log) const {
    const int lane = threadIdx.x, R = peers_.num_ranks;
    const bool logs = log.wait_us != nullptr && R <= kWarp;
    if (log.wait_us != nullptr && !logs) LogArrivals(*this, log);
    int missed = kNone;
    for (int first = 0; first < R; first += kWarp) {
      const int r = first + lane;
      uint64_t word = call().WithBlocks(0), came = 0;
      const bool late = r < R && !AwaitWord(r, 0, &word, logs ? &came : nullptr);
      if (r < R && logs) log.Write(r, r == peers_.rank ? 0 : came);  // a rank does not wait for itself
      const unsigned others = __ballot_sync(kAllLanes, !late && !(Call::Of(word) == call()));
      if (r < R) all[r].call = word;
      if (late && missed == kNone) missed = r;
      if (others == 0) continue;
      if (lane == __ffs(others) - 1) {
        const RankBits ranks{first / kWarp, others};
        // This rank's own word differs if another op still uses the channel.
        RecordFailure(peers_, op_, ranks.Has(peers_.rank) ? Phase::kChannel : Phase::kCall, epoch(), ranks,
                      ForHost(peers_, call(), word));
      }
      return late ? r : kAborted;
    }
    return missed;
  }

  // Copies what all ranks publish in this op. The first warp compares the calls, and the other warps copy the
  // rest. Returns a rank that this thread has missed, kNone or kAborted.
  __device__ int ReadPublished(int num_buffers, Published* all, const WaitLog& log) const {
    if (threadIdx.x < kWarp) return CompareCalls(all, log);
    const int count = Published::Count(num_buffers) - 1;
    const int others = static_cast<int>(blockDim.x) - kWarp;
    for (int i = static_cast<int>(threadIdx.x) - kWarp; i < peers_.num_ranks * count; i += others) {
      const int r = i / count, number = 1 + i % count;
      uint64_t word;
      if (!AwaitWord(r, number, &word)) return r;
      all[r].Word(number, num_buffers) = word == 0 ? 0 : word + peers_.shift[r];
    }
    return kNone;
  }

  const Peers& peers_;
  Op op_;
  bool counts_ends_;
  uint32_t epoch_ = 0;  // of all threads, read from the state when the op was opened
};

}  // namespace jax_ep::cuda
