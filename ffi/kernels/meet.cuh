// How the ranks of a group meet in an op: Begin, Enter, the waves between, Arrive and Leave.
#pragma once

#include "kernels/device.cuh"

namespace jax_ep::cuda {

__device__ inline uint32_t LoadAcquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ inline void StoreRelease(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ inline void AddRelease(uint32_t* counter, uint32_t value) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

// Orders this thread's accesses before it and after it, for all devices.
__device__ inline void FenceSystem() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ inline Stamped LoadStampedAcquire(const Stamped* word) {
  Stamped value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline Stamped LoadStamped(const Stamped* word) {
  Stamped value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline bool IsOf(Stamped value, uint32_t epoch) {
  return static_cast<uint32_t>(value >> 32) == epoch;
}

__device__ inline void StoreStamped(Stamped* word, uint32_t number, uint32_t epoch) {
  const Stamped value = static_cast<Stamped>(epoch) << 32 | number;
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ inline uint64_t GlobalNanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Epochs wrap around; `seen` has reached `wanted` if it is not behind it.
__device__ inline bool HasReached(uint32_t seen, uint32_t wanted) {
  return static_cast<int32_t>(seen - wanted) >= 0;
}

// Calls ready() until it is true. False if that did not happen in time. The clock is read rarely: it is
// slower than what is waited for.
template <typename Ready>
__device__ bool Await(const Peers& peers, Ready&& ready) {
  constexpr int kPolls = 64;
  for (uint64_t deadline = 0;;) {
    for (int i = 0; i < kPolls; ++i) {
      if (ready()) return true;
    }
    const uint64_t now = GlobalNanoseconds();
    if (deadline == 0) deadline = now + peers.timeout_ns;
    if (now > deadline) return false;
  }
}

// Whether a number of this op comes in time.
__device__ inline bool AwaitNumber(const Peers& peers, const Stamped* word, uint32_t epoch,
                                   uint32_t* number) {
  Stamped value;
  const bool there = Await(peers, [&] { return IsOf(value = LoadStamped(word), epoch); });
  *number = static_cast<uint32_t>(value);
  return there;
}

// Writes why this rank gives up, once, and keeps the group's later ops from touching a peer.
__device__ inline void RecordExpired(const Peers& peers, Op op, Phase phase, uint32_t epoch,
                                     uint32_t missing) {
  if (atomicExch(&peers.control[peers.rank]->failed, 1u) != 0) return;
  Expired* record = peers.expired;
  record->op = static_cast<int32_t>(op);
  record->rank = peers.rank;
  record->missing = missing;
  record->epoch = epoch;
  FenceSystem();
  *reinterpret_cast<volatile int32_t*>(&record->phase) = static_cast<int32_t>(phase);
  FenceSystem();
}

// Whether no thread of the block misses a rank: bit r of `missing` says that this one does. The whole block,
// to which everything is then visible that the peers had written before what its threads waited for.
__device__ inline bool AreAllThere(const Peers& peers, Op op, Phase phase, uint32_t epoch, uint32_t missing) {
  if (!__syncthreads_or(missing != 0)) return true;
  __shared__ uint32_t all;
  if (threadIdx.x == 0) all = 0;
  __syncthreads();
  if (missing != 0) atomicOr(&all, missing);
  __syncthreads();
  if (threadIdx.x == 0) RecordExpired(peers, op, phase, epoch, all);
  return false;
}

// What Begin needs to know of the state that the last op left, loaded before it is needed.
struct State {
  uint32_t epoch;
  bool failed;
  int rank;
};

__device__ inline State LoadState(const Peers& peers, const int32_t* rank_operand) {
  const volatile Control* own = peers.control[peers.rank];
  return {own->epoch, own->failed != 0, *rank_operand};
}

// Finds the epoch of the op that begins here. False, for the whole block, if the group has failed or the
// program runs on another mesh than the group's.
__device__ inline bool Begin(const Peers& peers, Op op, const State& state, uint32_t* epoch) {
  *epoch = state.epoch + 1;
  const bool misplaced = state.rank != peers.rank;
  if (misplaced && threadIdx.x == 0) RecordExpired(peers, op, Phase::kRank, *epoch, state.rank);
  // Another block may fail meanwhile: the threads of this one must agree.
  return !__syncthreads_or(state.failed || misplaced);
}

// Holds the block up for a time that differs between ranks, ops and phases. For stress tests.
__device__ inline void Stall(const Peers& peers, Phase phase, uint32_t epoch) {
  if (peers.stress_ns == 0) return;
  uint32_t hash = epoch * 0x9e3779b1u + static_cast<uint32_t>(peers.rank * 2 + static_cast<int>(phase));
  hash = (hash ^ hash >> 15) * 0x85ebca77u;
  hash = (hash ^ hash >> 13) * 0xc2b2ae3du;
  const uint64_t until = GlobalNanoseconds() + (hash >> 4) % peers.stress_ns;
  while (GlobalNanoseconds() < until) {
  }
}

// Tells every peer where this rank's buffers are: `mine` in shared memory, of which the first `num_buffers`
// are used. Called by one block. What earlier kernels have made is there for all devices: those have ended.
__device__ inline void Enter(const Peers& peers, Published& mine, int num_buffers, uint32_t epoch) {
  Stall(peers, Phase::kEnter, epoch);
  const int count = Published::Count(num_buffers);
  for (int i = threadIdx.x; i < peers.num_ranks * count; i += blockDim.x) {
    const uint64_t word = i % count == 0 ? gridDim.x : mine.Word(i % count, num_buffers);
    Stamped* const there = peers.control[i / count]->mail[peers.rank].words[i % count];
    StoreStamped(&there[0], static_cast<uint32_t>(word), epoch);
    StoreStamped(&there[1], static_cast<uint32_t>(word >> 32), epoch);
  }
}

// Waits for what the peers publish in this op, and copies it to shared memory, where it is for the whole
// block after AreAllThere. Returns the ranks that this thread has missed.
__device__ inline uint32_t ReadPublished(const Peers& peers, int num_buffers, uint32_t epoch,
                                         Published* published) {
  const int count = Published::Count(num_buffers);
  for (int i = threadIdx.x; i < peers.num_ranks * count; i += blockDim.x) {
    const int r = i / count;
    const Stamped* const words = peers.control[peers.rank]->mail[r].words[i % count];
    Stamped low, high;
    const bool there = Await(peers, [&] {
      low = LoadStamped(&words[0]);
      high = LoadStampedAcquire(&words[1]);
      return IsOf(low, epoch) && IsOf(high, epoch);
    });
    if (!there) return 1u << r;
    uint64_t word = high << 32 | static_cast<uint32_t>(low);
    if (Published::IsAddress(i % count) && word != 0) word += peers.shift[r];
    published[r].Word(i % count, num_buffers) = word;
  }
  return 0;
}

// Waits as a warp until every rank is done with a wave. False if that did not happen in time.
__device__ inline bool WaitForWave(const Peers& peers, Op op, int wave, uint32_t epoch) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t* flags = peers.control[peers.rank]->moved[wave];
  const auto is_there = [&] {
    const bool there = HasReached(LoadAcquire(&flags[lane]), epoch);
    if (!there) __nanosleep(200);  // many warps wait for the same word
    return there;
  };
  const bool late = lane < peers.num_ranks && !Await(peers, is_there);
  const unsigned missing = __ballot_sync(kAllLanes, late);
  if (missing != 0 && lane == 0) RecordExpired(peers, op, Phase::kMove, epoch, missing);
  __syncwarp();
  return missing == 0;
}

// Tells every peer when this rank is done with a wave. Called for each of the `num_parts` that it has, by one
// warp of the block that has done it, after the block has synchronised.
__device__ inline void FinishPart(const Peers& peers, int wave, int num_parts, uint32_t epoch) {
  const int lane = threadIdx.x % kWarp;
  Control* own = peers.control[peers.rank];
  bool last = false;
  if (lane == 0) {
    FenceSystem();
    last = atomicAdd(&own->wave_parts[wave], 1u) == num_parts - 1;
    FenceSystem();
    if (last) own->wave_parts[wave] = 0;
  }
  if (__shfl_sync(kAllLanes, last, 0) && lane < peers.num_ranks) {
    StoreRelease(&peers.control[lane]->moved[wave][peers.rank], epoch);
  }
}

// Tells every peer that one more block of this rank is done with the peers' memory, and with what they have
// published. Every block, once, after every rank has entered: only then have all left the op before.
__device__ inline void Arrive(const Peers& peers, uint32_t epoch) {
  if (blockIdx.x == gridDim.x - 1) Stall(peers, Phase::kLeave, epoch);
  __syncthreads();
  if (threadIdx.x < peers.num_ranks) {
    AddRelease(&peers.control[threadIdx.x]->leave[peers.rank], 1);
  }
}

// Ends the op: waits until every block of every rank has arrived. False if that did not happen in time. The
// last block, after it has arrived itself.
__device__ inline bool Leave(const Peers& peers, Op op, const Published* published, uint32_t epoch) {
  Control* own = peers.control[peers.rank];
  const int r = threadIdx.x;
  const bool late = r < peers.num_ranks &&
                    !Await(peers, [&] { return LoadAcquire(&own->leave[r]) == published[r].num_blocks; });
  if (!AreAllThere(peers, op, Phase::kLeave, epoch, late ? 1u << r : 0)) return false;
  if (r < peers.num_ranks) own->leave[r] = 0;
  if (r < kMaxPayloads) own->next[r] = 0;
  if (r == 0) {
    // The present ones may still be in use.
    own->spread[(epoch + 1) % 2] = 0;
    own->cleared[(epoch + 1) % 2] = 0;
    own->epoch = epoch;
  }
  return true;
}

}  // namespace jax_ep::cuda
