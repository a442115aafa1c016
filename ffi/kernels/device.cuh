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

// The whole block waits until every rank has raised its flag to `epoch`. False if that did not happen in
// time. Everything the peers wrote before raising their flags is then visible to the block.
__device__ inline bool WaitForAll(const Peers& peers, Op op, Phase phase, const uint32_t* flags,
                                  uint32_t epoch) {
  bool late = false;
  if (threadIdx.x < peers.num_ranks) {
    const uint64_t deadline = GlobalNanoseconds() + peers.timeout_ns;
    while (!HasReached(LoadAcquire(&flags[threadIdx.x]), epoch)) {
      if (GlobalNanoseconds() > deadline) {
        late = true;
        break;
      }
    }
  }
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

// Tells every peer where this rank's buffers are. Called by one block; its earlier writes to the peers'
// control blocks become visible with the flag.
__device__ inline void Enter(const Peers& peers, const Published& mine, uint32_t epoch) {
  Stall(peers, Phase::kEnter, epoch);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x < peers.num_ranks) {
    Control* peer = peers.control[threadIdx.x];
    peer->published[peers.rank] = mine;
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
    for (int i = 0; i < num_buffers; ++i) to.buffers[i] = here(from->buffers[i]);
    to.weights = here(from->weights);
    to.topk_idx = here(from->topk_idx);
  }
  __syncthreads();
}

// Every block calls this when its rows are moved. True for the last one, which then must call Leave.
__device__ inline bool IsLastBlock(const Peers& peers) {
  __threadfence_system();
  __syncthreads();
  __shared__ bool last;
  if (threadIdx.x == 0) {
    last = atomicAdd(&peers.control[peers.rank]->blocks_done, 1u) == gridDim.x - 1;
    __threadfence_system();
  }
  __syncthreads();
  return last;
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
  if (threadIdx.x == 0) {
    own->blocks_done = 0;
    if (done) own->epoch = epoch;
  }
  __syncthreads();
  return done;
}

// A 16-byte load that does not go through the first-level cache: peers wrote, or own, the memory.
__device__ inline uint4 LoadRow(const uint4* address) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

}  // namespace jax_ep::cuda
