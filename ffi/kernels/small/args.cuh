// What the kernels of few tokens work on.
#pragma once

#include "kernels/protocol/arena.h"
#include "kernels/protocol/session.cuh"

namespace jax_ep::cuda {

constexpr int kSlotThreads = 512;
constexpr int kSlotWarps = kSlotThreads / kWarp;

// Which pieces of some work a warp takes: those from `index` on, every `count`-th.
struct Portion {
  int index;
  int count;
};

// Of the warps of blocks [first, last).
__device__ inline Portion WarpOf(int first, int last) {
  return {static_cast<int>(threadIdx.x) / kWarp * (last - first) + static_cast<int>(blockIdx.x) - first,
          (last - first) * kSlotWarps};
}

// What an op that goes through the arena knows of it. By value in the kernels' parameters.
struct SlotArgs {
  Shape shape;
  Peers peers;
  const MeshPlace* place_operand;
  Attendance attendance;
  HandleArrays handle;
  Slots slots;
  // The blocks of a dispatch, in this order: those that send, those that receive, and those that tell of this
  // rank's choices and write down what is found out of all of them. What an SM loads waits behind what it
  // stores to peers, so nobody does both. Of a combine all are senders, whose warps share the tasks.
  int32_t num_senders;
  int32_t num_receivers;
  int32_t team_warps;  // that share a row

  __device__ bool sends() const { return static_cast<int>(blockIdx.x) < num_senders; }
  __device__ bool keeps_books() const { return static_cast<int>(blockIdx.x) >= first_keeper(); }
  __device__ int first_keeper() const { return num_senders + num_receivers; }
  // The one that hears of all ranks' calls, and says where ranks are left out.
  __device__ bool presides() const { return blockIdx.x == gridDim.x - 1; }
  __device__ Portion Books() const { return WarpOf(first_keeper(), static_cast<int>(gridDim.x)); }

  __device__ Arena& arena(int rank) const { return *reinterpret_cast<Arena*>(&peers.control(rank) + 1); }
  __device__ SlotHead& head(int rank, uint32_t epoch) const { return arena(rank).heads[epoch % 2]; }
  // At rank `at`: what `source` writes there.
  __device__ SlotMail& mail(int at, int source, uint32_t epoch) const { return head(at, epoch).mail[source]; }
  __device__ std::byte* slot(int at, int source, int token, uint32_t epoch) const {
    std::byte* const first = reinterpret_cast<std::byte*>(&arena(at) + 1);
    return first + (epoch % 2) * kSlotsOfHalf + slots.offset(source, token);
  }
};

// A few warps of a block that share a row.
struct RowTeam {
  int index;  // of the teams of blocks [first, last)
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

// Of the first `of_block` warps of blocks [first, last). Team by team over all blocks, so that few rows are
// spread over all of them.
__device__ inline RowTeam TeamOf(int first, int last, int warps, int of_block = kSlotWarps) {
  const int warp = threadIdx.x / kWarp, team = warp / warps, blocks = last - first;
  return {static_cast<int>(blockIdx.x) - first + team * blocks,
          of_block / warps * blocks,
          warp % warps,
          warps,
          static_cast<int>(threadIdx.x) % kWarp,
          1 + team};
}

}  // namespace jax_ep::cuda
