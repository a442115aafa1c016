// The arguments of the kernels for few tokens, and the division of work among their warps.
#pragma once

#include "kernels/protocol/mail_session.cuh"

namespace jax_ep::cuda {

constexpr int kSmallThreads = 512;
constexpr int kSmallWarps = kSmallThreads / kWarp;

// The items of some work that a warp takes: every `count`-th, from `index` on.
struct WarpShare {
  int index;
  int count;
};

// Returns this warp's share if the warps of blocks [first, last) share the work.
__device__ inline WarpShare WarpsOf(int first, int last) {
  return {static_cast<int>(threadIdx.x) / kWarp * (last - first) + static_cast<int>(blockIdx.x) - first,
          (last - first) * kSmallWarps};
}

// The division of an op for few tokens among blocks and warps. A dispatch has, in this order, blocks that
// send, blocks that receive, and metadata blocks, which publish this rank's choices and write the handle, the
// counts and zeros. No block both sends and receives, because an SM's loads wait behind its stores to peers.
// In a combine every block both sends and receives, by different warps, and `num_senders` is all of them.
struct SmallPlan {
  Peers peers;
  Slots slots;
  int32_t num_senders;
  int32_t num_receivers;
  int32_t team_warps;  // warps that share a row

  __device__ bool sends() const { return static_cast<int>(blockIdx.x) < num_senders; }
  __device__ bool writes_metadata() const { return static_cast<int>(blockIdx.x) >= first_metadata_block(); }
  __device__ int first_metadata_block() const { return num_senders + num_receivers; }
  __device__ WarpShare MetadataShare() const {
    return WarpsOf(first_metadata_block(), static_cast<int>(gridDim.x));
  }
};

// The kernels' arguments, passed by value as their parameters.
struct SmallPushArgs : PushOperands, SmallPlan {
  Payload payloads[kMaxPayloads];
  int32_t offsets[kMaxPayloads];  // of each payload's row in a slot
  int32_t
      shares[kMaxPayloads];  // part of each payload's row that one warp of a team copies, in vectors or bytes

  __device__ MailSession session() const { return {peers, Op::kDispatch, attendance, slots}; }
};
struct SmallPullArgs : PullOperands, SmallPlan {
  Summand summand;
  Bias biases[kMaxBiases];

  __device__ MailSession session() const { return {peers, Op::kCombine, attendance, slots}; }
};

// A few warps of a block that share a row.
struct RowTeam {
  int index;  // among the teams of blocks [first, last)
  int count;  // number of these teams
  int warp;   // index of this warp in the team
  int warps;
  int lane;
  int barrier;

  // Synchronizes the team.
  __device__ void Sync() const {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(warps * kWarp) : "memory");
  }
};

// Returns the team of this warp, if the first `warps_per_block` warps of blocks [first, last) form teams of
// `warps` warps. Team indices go over all blocks first, so that a few rows are spread over all blocks.
__device__ inline RowTeam TeamOf(int first, int last, int warps, int warps_per_block = kSmallWarps) {
  const int warp = threadIdx.x / kWarp, team = warp / warps, blocks = last - first;
  return {static_cast<int>(blockIdx.x) - first + team * blocks,
          warps_per_block / warps * blocks,
          warp % warps,
          warps,
          static_cast<int>(threadIdx.x) % kWarp,
          1 + team};
}

}  // namespace jax_ep::cuda
