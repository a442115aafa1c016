// The partition of an op for few tokens among blocks and warps.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/launch/device.h"
#include "kernels/protocol/arena.h"
#include "kernels/threads.cuh"

namespace jax_ep::cuda {

constexpr int kFewTokensThreads = 512;
constexpr int kFewTokensWarps = kFewTokensThreads / kWarp;

// Calls f with the number of words for the bits of a group's ranks, as a constant: one, or those of all
// ranks.
template <typename F>
auto WithRankWords(int num_ranks, F&& f) {
  return num_ranks > kRankBits ? f(std::integral_constant<int, kMaxRanks / kRankBits>{})
                               : f(std::integral_constant<int, 1>{});
}

// The items of some work that a warp takes: every `count`-th, from `index` on.
struct WarpShare {
  int index;
  int count;
};

// Returns this warp's share if the warps of blocks [first, last) share the work.
__device__ inline WarpShare WarpsOf(int first, int last) {
  return {static_cast<int>(threadIdx.x) / kWarp * (last - first) + static_cast<int>(blockIdx.x) - first,
          (last - first) * kFewTokensWarps};
}

// The blocks and warps of an op for few tokens, and its slots in the arena. A dispatch has, in this order,
// blocks that send, blocks that receive, and metadata blocks, which publish this rank's choices and write the
// handle, the counts and zeros. No block both sends and receives, because an SM's loads wait behind its
// stores to peers. In a combine every block both sends and receives, by different warps, and `num_senders` is
// all of them.
struct FewTokensPartition {
  Slots slots;
  int32_t num_senders;
  int32_t num_receivers;
  int32_t warps_per_row;  // warps that share a row in a slot
  int32_t chunks;         // of a row that travels as lines; otherwise 0

  __device__ bool sends() const { return static_cast<int>(blockIdx.x) < num_senders; }
  __device__ bool writes_metadata() const { return static_cast<int>(blockIdx.x) >= first_metadata_block(); }
  __device__ int first_metadata_block() const { return num_senders + num_receivers; }
  // Returns this warp's share of writing the handle and clearing. The last block, the leader, has the counts
  // to write, unless it is the only one.
  __device__ WarpShare MetadataShare() const { return WarpsOf(first_metadata_block(), end_of_writers()); }
  __device__ bool writes_handle() const {
    return writes_metadata() && static_cast<int>(blockIdx.x) < end_of_writers();
  }
  __device__ int end_of_writers() const {
    const int blocks = static_cast<int>(gridDim.x);
    return blocks - 1 > first_metadata_block() ? blocks - 1 : blocks;
  }
};

// Chunks of rows that a warp handles together: those of one row, from `first` to before `last`.
struct Chunks {
  int row;  // of all
  int first;
  int last;
};

// The division of chunks among warps. A warp takes several chunks of a row if there are more than warps,
// because it has to find the row's place for each share.
struct ChunkShares {
  int chunks;       // of a row
  int size;         // chunks of a share, except perhaps the last one of a row
  int per_row;      // shares of a row
  int num_shares;   // of all rows
  WarpShare warps;  // those of this warp

  __device__ ChunkShares(int rows, int chunks, const WarpShare& warps)
      : chunks(chunks),
        size(max(1, min(chunks, (rows * chunks + warps.count - 1) / warps.count))),
        per_row((chunks + size - 1) / size),
        num_shares(rows * per_row),
        warps(warps) {}
  __device__ Chunks At(int share) const {
    const int row = share / per_row, first = (share - row * per_row) * size;
    return {row, first, min(first + size, chunks)};
  }
};

// A few warps of a block that share a row.
struct RowWarps {
  int index;  // among those of blocks [first, last)
  int count;  // number of these
  int warp;   // index of this warp among the `size` warps
  int size;
  int lane;
  int barrier;

  // Synchronizes the warps.
  __device__ void Sync() const {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(size * kWarp) : "memory");
  }
};

// Returns the warps that share rows with this one, if the first `warps_per_block` warps of blocks [first,
// last) share rows `size` by `size`. Indices go over all blocks first, so that a few rows are spread over all
// blocks.
__device__ inline RowWarps RowWarpsOf(int first, int last, int size, int warps_per_block = kFewTokensWarps) {
  const int warp = threadIdx.x / kWarp, index_in_block = warp / size, blocks = last - first;
  return {static_cast<int>(blockIdx.x) - first + index_in_block * blocks,
          warps_per_block / size * blocks,
          warp % size,
          size,
          static_cast<int>(threadIdx.x) % kWarp,
          1 + index_in_block};
}

// Returns the most blocks that an op may use. SMs are left to other kernels as in kernels/launch/plan.h.
inline int MaxBlocks(const Device& device) {
  return device.sm_budget > 0 ? std::min(device.sm_budget, device.num_sms) : device.num_sms * 3 / 4;
}

// Returns how many warps share a row. All warps of `blocks` blocks with `warps_per_block` warps each are used
// if possible.
inline int WarpsPerRow(int rows, int blocks, int warps_per_block) {
  int warps = warps_per_block;
  while (warps > 2 && (warps_per_block % warps != 0 || rows * warps > blocks * warps_per_block)) --warps;
  return warps;
}

}  // namespace jax_ep::cuda
