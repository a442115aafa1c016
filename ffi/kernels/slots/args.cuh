// What the kernels of few tokens work on.
#pragma once

#include "core/arena.h"
#include "kernels/comm/meet.cuh"

namespace jax_ep::cuda {

constexpr int kSlotThreads = 512;
constexpr int kSlotWarps = kSlotThreads / kWarp;
// The first warps of a block begin with sending, while the others find out what comes.
constexpr int kSendingWarps = 8;
constexpr int kFirstTeamBarrier = 4;  // after that of all, those of the halves, and that of what is found

// Which pieces of some work a warp takes: those from `index` on, every `count`-th.
struct Portion {
  int index;
  int count;
};

// Of the warps of all blocks from `first` on.
__device__ inline Portion WarpOf(int first) {
  const int blocks = static_cast<int>(gridDim.x) - first;
  return {static_cast<int>(threadIdx.x) / kWarp * blocks + static_cast<int>(blockIdx.x) - first,
          blocks * kSlotWarps};
}

// What an op that goes through the arena knows of it. By value in the kernels' parameters.
struct SlotArgs {
  Shape shape;
  Peers peers;
  const int32_t* rank_operand;
  Attendance attendance;
  HandleArrays handle;
  Slots slots;
  int32_t team_warps;     // that share a row
  int32_t num_receivers;  // the first blocks; the others write down what is known of the routing

  // Where there are no others, all blocks do both.
  __device__ bool receives() const { return static_cast<int>(blockIdx.x) < num_receivers; }
  __device__ bool keeps_books() const { return !receives() || num_receivers == static_cast<int>(gridDim.x); }
  __device__ Portion Books() const {
    return WarpOf(num_receivers == static_cast<int>(gridDim.x) ? 0 : num_receivers);
  }
  __device__ Arena& arena(int rank) const { return *reinterpret_cast<Arena*>(&peers.control(rank) + 1); }
  __device__ SlotHead& head(int rank, uint32_t epoch) const { return arena(rank).heads[epoch % 2]; }
  // At rank `at`: what `source` writes there.
  __device__ SlotMail& mail(int at, int source, uint32_t epoch) const { return head(at, epoch).mail[source]; }
  __device__ std::byte* slot(int at, int source, int token, uint32_t epoch) const {
    std::byte* const first = reinterpret_cast<std::byte*>(&arena(at) + 1);
    return first + (epoch % 2) * kSlotsOfHalf + (int64_t{source} * slots.tokens + token) * slots.bytes;
  }
};

// The halves of a block.
__device__ inline bool Sends() { return threadIdx.x < kSendingWarps * kWarp; }
__device__ inline Team Senders() { return {static_cast<int>(threadIdx.x), kSendingWarps * kWarp, 1}; }
__device__ inline Team Routers() {
  return {static_cast<int>(threadIdx.x) - kSendingWarps * kWarp, kSlotThreads - kSendingWarps * kWarp, 2};
}

// A few warps of a block that share a row.
struct RowTeam {
  int index;  // of all teams of the kernel
  int count;  // of these
  int warp;   // this one's number in the team
  int warps;
  int lane;
  int barrier;

  // The whole team.
  __device__ void Sync() const {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(warps * kWarp) : "memory");
  }
};

// Of `of_block` warps of each of `blocks` blocks, of which this one is number `warp`. Team by team over all
// blocks, so that few rows are spread over all of them.
__device__ inline RowTeam TeamOf(int warp, int of_block, int warps, int blocks) {
  const int team = warp / warps;
  return {static_cast<int>(blockIdx.x) + team * blocks, of_block / warps * blocks, warp % warps, warps,
          static_cast<int>(threadIdx.x) % kWarp,        kFirstTeamBarrier + team};
}

}  // namespace jax_ep::cuda
