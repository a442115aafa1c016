// How the ranks of a group meet in an op: Begin, Enter, MeetAll, then their work, LeavePeers, Leave and End.
#pragma once

#include "kernels/protocol/wait.cuh"

namespace jax_ep::cuda {

// What Begin needs to know of the channel's state, loaded before it is needed.
struct State {
  uint32_t epoch;  // of the op before
  uint64_t gate;   // before this op opened it; only the thread that opens knows more than the lower half
  int rank;        // as the program computed it
  Call call;       // as this rank tells of it
};

// One thread of the first block opens the op for its rank.
__device__ inline bool Opens() { return blockIdx.x == 0 && threadIdx.x == blockDim.x - 1; }

__device__ inline State LoadState(const Peers& peers, const MeshPlace* place_operand) {
  Channel& own = peers.own();
  const volatile uint32_t* const epoch = &own.epoch;
  const MeshPlace place = *place_operand;
  const Call call = peers.call.In(place.list);
  if (!Opens()) return {*epoch, LoadFlag(&own.gate), place.rank, call};
  Stall(peers, Phase::kEnter, *epoch + 1);
  return {*epoch, AddEpochs(&own.gate, 1), place.rank, call};
}

// As the thread that opens: whether that succeeded. What this rank publishes comes after that.
__device__ inline bool HasJustOpened(const Peers& peers, Op op, const State& state) {
  Channel& own = peers.own();
  if (state.gate == Stamp(0, state.epoch)) {
    StoreStamped(&own.opened, peers.call.site + 1, state.epoch + 1);
    return true;
  }
  (void)AddEpochs(&own.gate, ~0u);
  if (static_cast<uint32_t>(state.gate) == 0) {
    // Another op of this rank has opened the channel and has not ended.
    const uint32_t user = static_cast<uint32_t>(LoadStamped(&own.opened)) - 1;
    Fail(peers, op, Phase::kChannel, state.epoch + 1, 1u << peers.rank, Call{0, user}.WithBlocks(0));
  }
  return false;
}

// Finds the epoch of the op that begins here. False, for the whole block, if the group has failed, the
// channel is in use or the program runs on another mesh than the group's.
__device__ inline bool Begin(const Peers& peers, Op op, const State& state, uint32_t* epoch) {
  *epoch = state.epoch + 1;
  const bool open = Opens() ? HasJustOpened(peers, op, state) : static_cast<uint32_t>(state.gate) == 0;
  const bool misplaced = state.rank != peers.rank;
  if (threadIdx.x == 0) {
    BlockClock().began = 0;
    BlockClock().limit = 0;
    HasAbandoned() = false;
    if (misplaced) Fail(peers, op, Phase::kRank, *epoch, state.rank);
  }
  // Another block may fail meanwhile: the threads of this one must agree.
  return !__syncthreads_or(!open || misplaced);
}

// Tells every peer what this rank calls and where its buffers are: `mine` in shared memory, of which the
// first `num_buffers` are used. Called by one block. What earlier kernels have made is there for all devices:
// those have ended.
__device__ inline void Enter(const Peers& peers, const Call& call, Published& mine, int num_buffers,
                             uint32_t epoch) {
  const int count = Published::Count(num_buffers);
  for (int i = threadIdx.x; i < peers.num_ranks * count; i += blockDim.x) {
    const uint64_t word = i % count == 0 ? call.WithBlocks(gridDim.x) : mine.Word(i % count, num_buffers);
    Stamped* const there = peers.channel[i / count]->mail[peers.rank].words[i % count];
    StoreStamped(&there[0], static_cast<uint32_t>(word), epoch);
    StoreStamped(&there[1], static_cast<uint32_t>(word >> 32), epoch);
  }
}

// Waits for one published word of rank r; `came` is when it was found there.
__device__ inline bool AwaitWord(const Peers& peers, int r, int number, uint32_t epoch, uint64_t* word,
                                 uint64_t* came = nullptr) {
  const Stamped* const words = peers.own().mail[r].words[number];
  Stamped low, high;
  const bool there = Await(peers, [&] {
    low = LoadStamped(&words[0]);
    high = LoadStampedAcquire(&words[1]);
    const bool both = IsOf(low, epoch) && IsOf(high, epoch);
    if (both && came != nullptr) *came = GlobalNanoseconds();
    return both;
  });
  *word = high << 32 | static_cast<uint32_t>(low);
  return there;
}

// Where to note how long each rank was waited for, from `began` on.
struct WaitLog {
  float* wait_us = nullptr;  // [R], or null
  uint64_t began = 0;

  __device__ static WaitLog From(float* wait_us) {
    return {wait_us, wait_us == nullptr ? 0 : GlobalNanoseconds()};
  }
  __device__ void Note(int rank, uint64_t came) const {
    if (wait_us != nullptr) wait_us[rank] = came < began ? 0.0f : static_cast<float>(came - began) * 1e-3f;
  }
};

// Another rank's call, as the host is told of it: so as it would be known here if it came from this rank's
// list. `own_call` is this rank's, as it tells peers of it.
__device__ inline uint64_t AsFrom(const Peers& peers, const Call& own_call, uint64_t call) {
  return call ^ static_cast<uint64_t>(own_call.hash ^ peers.call.hash) << 32;
}

// As the first warp of a block: waits until every rank has entered, and refuses if they do not all call the
// same op. Peers' memory may be touched only afterwards: each rank has opened the op before it entered, and
// none returns from it before those that have opened it have left. Returns the ranks that this thread has
// missed.
__device__ inline uint32_t MeetAll(const Peers& peers, Op op, const Call& own_call, uint32_t epoch,
                                   Published* published, const WaitLog& log) {
  const int r = threadIdx.x;
  uint64_t call = own_call.WithBlocks(0), came = 0;
  uint64_t* const when = log.wait_us == nullptr ? nullptr : &came;
  const bool late = r < peers.num_ranks && !AwaitWord(peers, r, 0, epoch, &call, when);
  if (r < peers.num_ranks) log.Note(r, r == peers.rank ? 0 : came);  // nobody waits for itself
  const unsigned others = __ballot_sync(kAllLanes, !late && !(Call::Of(call) == own_call));
  if (r < peers.num_ranks) published[r].call = call;
  if (late) return 1u << r;
  if (others == 0) return 0;
  if (r == __ffs(others) - 1) {
    // This rank's own word is another op's where that op still uses the channel.
    const bool own = (others >> peers.rank & 1) != 0;
    Fail(peers, op, own ? Phase::kChannel : Phase::kCall, epoch, others, AsFrom(peers, own_call, call));
  }
  return kKeptOut;
}

// Meets all ranks, and copies what they publish in this op to shared memory, where it is for the whole block
// after AreAllThere. Returns the ranks that this thread has missed.
__device__ inline uint32_t ReadPublished(const Peers& peers, Op op, const Call& call, int num_buffers,
                                         uint32_t epoch, Published* published, const WaitLog& log = {}) {
  if (threadIdx.x < kWarp) return MeetAll(peers, op, call, epoch, published, log);
  const int count = Published::Count(num_buffers) - 1;
  const int others = static_cast<int>(blockDim.x) - kWarp;
  for (int i = static_cast<int>(threadIdx.x) - kWarp; i < peers.num_ranks * count; i += others) {
    const int r = i / count, number = 1 + i % count;
    uint64_t word;
    if (!AwaitWord(peers, r, number, epoch, &word)) return 1u << r;
    published[r].Word(number, num_buffers) = word == 0 ? 0 : word + peers.shift[r];
  }
  return 0;
}

// Waits until the first block has noted that this op is open. False if it cannot be opened.
__device__ inline bool AwaitOpened(const Peers& peers, uint32_t epoch) {
  const Stamped noted = Stamp(peers.call.site + 1, epoch);
  return Await(peers, [&] { return LoadStamped(&peers.own().opened) == noted; });
}

// Tells every peer that one more block of this rank is done with the peers' memory, and with what they have
// published, and whether it has done its part. Every block of an op that was opened, once, also where it
// fails: a peer that gives up waits for it.
__device__ inline void LeavePeers(const Peers& peers, uint32_t epoch, bool alive) {
  if (blockIdx.x == gridDim.x - 1) Stall(peers, Phase::kLeave, epoch);
  __syncthreads();
  if (threadIdx.x >= peers.num_ranks) return;
  const Left how = alive && !HasAbandoned() ? kWhole : kBroken;
  StoreStampedRelease(&peers.channel[threadIdx.x]->left[peers.rank][blockIdx.x], how, epoch);
}

// Notes that an op has ended, so that the next one finds its channel free. One thread.
__device__ inline void CountEpoch(Channel& own, uint32_t epoch) {
  own.epoch = epoch;
  if (epoch != kLastEpoch) return;
  own.epoch = 1;
  (void)AddEpochs(&own.gate, 2);  // to 1, too
  StoreStamped(&own.opened, 0, 1);
}

// Waits until every block of every rank has left. False if that did not happen in time, or the op has failed
// on some rank. The last block, after it has left itself. `waits_after`: some blocks of this rank wait for
// peers after they have left them.
__device__ inline bool Leave(const Peers& peers, Op op, const Published* published, uint32_t epoch,
                             bool waits_after) {
  Channel& own = peers.own();
  uint32_t missing = 0;
  int stride = 1;
  for (int r = 0; r < peers.num_ranks; ++r) stride = max(stride, Call::BlocksOf(published[r].call));
  for (int i = threadIdx.x; i < peers.num_ranks * stride && missing == 0; i += blockDim.x) {
    const int r = i / stride, block = i % stride;
    if (block >= Call::BlocksOf(published[r].call)) continue;
    Stamped seen;
    if (!Await(peers, [&] { return IsOf(seen = LoadStampedAcquire(&own.left[r][block]), epoch); })) {
      missing = 1u << r;
    } else if (static_cast<uint32_t>(seen) != kWhole) {
      missing = kKeptOut;
    }
  }
  if (!AreAllThere(peers, op, Phase::kLeave, epoch, missing)) return false;
  // Once all ranks have left, no wait of this op is in vain. So if one was, the gate was closed before.
  if (waits_after && __syncthreads_or(IsGivenUp(peers))) return false;
  if (threadIdx.x < kMaxPayloads) own.next[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    // The present ones may still be in use.
    own.spread[(epoch + 1) % 2] = 0;
    own.cleared[(epoch + 1) % 2] = 0;
    CountEpoch(own, epoch);
  }
  return true;
}

// The last that a block does in an op. Where the op has failed, the last block has waited in GiveUp for the
// others to come here.
__device__ inline void End(const Peers& peers) {
  uint32_t* const ended = &peers.own().ended;
  const unsigned most = gridDim.x - 1;  // and back to 0 with the last one
  if (blockIdx.x == gridDim.x - 1) {
    if (threadIdx.x == 0) IncRelaxed(ended, most);
    return;
  }
  __syncthreads();
  if (threadIdx.x == 0) IncRelease(ended, most);
}

}  // namespace jax_ep::cuda
