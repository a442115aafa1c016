// Pieces of the kernels: flags between devices, Enter and Leave, and row copies.
#pragma once

#include <cuda_runtime.h>

#include "kernels/control.h"

namespace jax_ep::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline uint32_t LoadAcquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ inline void StoreRelease(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
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

// Writes why this rank gives up, once, and keeps the group's later ops from touching a peer.
__device__ inline void RecordExpired(const Peers& peers, Op op, Phase phase, uint32_t epoch, uint32_t missing,
                                     const uint32_t* flags) {
  if (atomicExch(&peers.control[peers.rank]->failed, 1u) != 0) return;
  Expired* record = peers.expired;
  record->op = static_cast<int32_t>(op);
  record->rank = peers.rank;
  record->missing = missing;
  record->expected_epoch = epoch;
  for (int r = 0; r < peers.num_ranks; ++r)
    record->seen_epoch[r] = flags == nullptr ? 0 : LoadAcquire(&flags[r]);
  __threadfence_system();
  *reinterpret_cast<volatile int32_t*>(&record->phase) = static_cast<int32_t>(phase);
  __threadfence_system();
}

// Whether a flag reaches `epoch` in time.
__device__ inline bool Await(const Peers& peers, const uint32_t* flag, uint32_t epoch) {
  const uint64_t deadline = GlobalNanoseconds() + peers.timeout_ns;
  while (!HasReached(LoadAcquire(flag), epoch)) {
    if (GlobalNanoseconds() > deadline) return false;
  }
  return true;
}

// The whole block waits until every rank has raised its flag to `epoch`. False if that did not happen in
// time. Everything the peers wrote before raising their flags is then visible to the block.
__device__ inline bool WaitForAll(const Peers& peers, Op op, Phase phase, const uint32_t* flags,
                                  uint32_t epoch) {
  const bool late = threadIdx.x < peers.num_ranks && !Await(peers, &flags[threadIdx.x], epoch);
  if (!__syncthreads_or(late)) return true;
  if (threadIdx.x < kWarp) {
    const unsigned missing = __ballot_sync(kAllLanes, late);
    if (threadIdx.x == 0) RecordExpired(peers, op, phase, epoch, missing, flags);
  }
  return false;
}

// Finds the epoch of the op that begins here. False, for the whole block, if the group has failed or the
// program runs on another mesh than the group's.
__device__ inline bool Begin(const Peers& peers, Op op, const int32_t* rank_operand, uint32_t* epoch) {
  Control* own = peers.control[peers.rank];
  *epoch = *reinterpret_cast<volatile uint32_t*>(&own->epoch) + 1;
  if (*rank_operand != peers.rank) {
    if (threadIdx.x == 0) RecordExpired(peers, op, Phase::kRank, *epoch, *rank_operand, nullptr);
  }
  // Another block may fail meanwhile: the threads of this one must agree.
  return !__syncthreads_or(*reinterpret_cast<volatile uint32_t*>(&own->failed));
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
// are used. Called by one block; its earlier writes to the peers' control blocks become visible with the
// flag.
__device__ inline void Enter(const Peers& peers, const Published& mine, int num_buffers, uint32_t epoch) {
  Stall(peers, Phase::kEnter, epoch);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x < peers.num_ranks) {
    Control* peer = peers.control[threadIdx.x];
    Published& there = peer->published[peers.rank];
    for (int i = 0; i < num_buffers; ++i) {
      there.buffers[i] = mine.buffers[i];
      there.partials[i] = mine.partials[i];
    }
    there.weights = mine.weights;
    there.routing = mine.routing;
    __threadfence_system();
    StoreRelease(&peer->enter[peers.rank], epoch);
  }
}

// What the peers published in the present op, after the wait for Enter, into shared memory. The whole block.
__device__ inline void ReadPublished(const Peers& peers, int num_buffers, Published* published) {
  if (threadIdx.x < peers.num_ranks) {
    const Published* from = &peers.control[peers.rank]->published[threadIdx.x];
    const auto here = [&](void* const& there) -> void* {
      std::byte* address = *reinterpret_cast<std::byte* const volatile*>(&there);
      return address == nullptr ? nullptr : address + peers.shift[threadIdx.x];
    };
    Published& to = published[threadIdx.x];
    for (int i = 0; i < num_buffers; ++i) {
      to.buffers[i] = here(from->buffers[i]);
      to.partials[i] = here(from->partials[i]);
    }
    to.weights = here(from->weights);
    to.routing = here(from->routing);
  }
  __syncthreads();
}

// Counts blocks that have moved their rows, or parts of them. True for the last of `count`.
__device__ inline bool IsLast(uint32_t* counter, int count) {
  __threadfence_system();
  __syncthreads();
  __shared__ bool last;
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1u) == count - 1;
    __threadfence_system();
  }
  __syncthreads();
  return last;
}

// Every block calls this when its rows are moved. True for the last one, which then must call Leave.
__device__ inline bool IsLastBlock(const Peers& peers) {
  return IsLast(&peers.control[peers.rank]->blocks_done, gridDim.x);
}

// Waves of tokens, that begin at multiples of `tokens`.
struct Waves {
  int32_t tokens;
  int32_t count;

  JAX_EP_HD int First(const Shape& shape, int wave) const {
    const int64_t first = int64_t{tokens} * wave;
    return first < shape.num_tokens ? static_cast<int>(first) : shape.num_tokens;
  }
};

// Waves of a multiple of `step` tokens.
inline Waves PlanWaves(const Shape& shape, int step) {
  const int64_t least = (shape.num_tokens + kMaxWaves - 1) / kMaxWaves;
  const int64_t tokens = AlignUp(least > kTokensPerWave ? least : kTokensPerWave, step);
  const int64_t count = (shape.num_tokens + tokens - 1) / tokens;
  return {static_cast<int32_t>(tokens), static_cast<int32_t>(count > 0 ? count : 1)};
}

// Tells every peer that this rank is done with a wave. Called for each of the `num_parts` that it has, by the
// block that has done it.
__device__ inline void FinishPart(const Peers& peers, int wave, int num_parts, uint32_t epoch) {
  Control* own = peers.control[peers.rank];
  if (!IsLast(&own->wave_parts[wave], num_parts)) return;
  if (threadIdx.x == 0) own->wave_parts[wave] = 0;
  if (threadIdx.x < peers.num_ranks) {
    StoreRelease(&peers.control[threadIdx.x]->moved[wave][peers.rank], epoch);
  }
}

// Ends the op: the rows of this rank are moved, and after it everybody's. Called by the last block.
__device__ inline bool Leave(const Peers& peers, Op op, uint32_t epoch) {
  Control* own = peers.control[peers.rank];
  const bool alive = *reinterpret_cast<volatile uint32_t*>(&own->failed) == 0;
  bool done = false;
  if (alive) {
    Stall(peers, Phase::kLeave, epoch);
    if (threadIdx.x < peers.num_ranks) {
      StoreRelease(&peers.control[threadIdx.x]->leave[peers.rank], epoch);
    }
    done = WaitForAll(peers, op, Phase::kLeave, own->leave, epoch);
  }
  if (threadIdx.x < kMaxPayloads) own->next[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    own->blocks_done = 0;
    if (done) own->epoch = epoch;
  }
  __syncthreads();
  return done;
}

// A 16-byte load that does not go through the first-level cache: peers wrote, or own, the memory. Nothing is
// read, and the result is undefined, unless `wanted`: with a branch around it the compiler waits for each
// load before it begins the next.
__device__ inline uint4 LoadRow(const uint4* address, bool wanted = true) {
  uint4 v;
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.s32 wanted, %5, 0;\n"
      "@wanted ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(address), "r"(static_cast<int>(wanted)));
  return v;
}

// A token's row that this lane of a warp stands for, -1 none, and the rank that holds it.
struct Place {
  int row;
  int rank;
};

__device__ inline Place FindPlace(const Shape& shape, const HandleArrays& handle, int t, int lane) {
  const int width = shape.rows_per_token();
  if (lane >= width) return {-1, 0};
  const int row = handle.token_rows[int64_t{t} * width + lane];
  int rank = lane;
  if (shape.order == Order::kExpert) {
    const int expert = handle.topk_idx[int64_t{t} * shape.top_k + lane];
    if (!IsExpert(expert, shape.num_experts)) return {-1, 0};
    rank = shape.rank_of(expert);
  }
  return {IsRow(row, shape.capacity) ? row : -1, rank};
}

}  // namespace jax_ep::cuda
