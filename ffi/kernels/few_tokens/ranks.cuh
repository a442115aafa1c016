// The ranks that a token of an op of few tokens goes to, and those that sums of it come from.
#pragma once

#include "kernels/protocol/control.h"
#include "kernels/routing/destination.cuh"

namespace jax_ep::cuda {

// Calls f(rank) for each of the ranks. Each rank starts with the rank after it, so that the ranks do not all
// write to the same one.
template <int kRankWords, typename F>
__device__ void ForEachRank(const Peers& peers, const RankWords<kRankWords>& ranks, F&& f) {
  const int R = peers.num_ranks, me = peers.rank;
  if constexpr (kRankWords == 1) {
#pragma unroll 1
    for (int i = 1; i <= R; ++i) {
      const int r = me + i < R ? me + i : me + i - R;
      if (ranks.Has(r)) f(r);
    }
  } else {
    const uint32_t up_to_me = ~0u >> (kRankBits - 1 - me % kRankBits);  // of this rank's own word
#pragma unroll 1
    for (int i = 0; i <= kRankWords; ++i) {
      const int word = (me / kRankBits + i) % kRankWords;
      uint32_t bits = ranks.Word(word);
      if (i == 0) bits &= ~up_to_me;
      if (i == kRankWords) bits &= up_to_me;
#pragma unroll 1
      for (; bits != 0; bits &= bits - 1) f(word * kRankBits + __ffs(bits) - 1);
    }
  }
}

// The source of a sum of a token, of which a lane has one at most: the rank, whether it sends a sum, provided
// that it takes part, and the index of the slot at this rank. Lanes have ranks in ascending order.
struct Sender {
  bool sends;
  int rank;
  int index;
};

// Returns the index of the slot that a rank's sum of token t arrives in, negative if there is none. `row` is
// the token's row at that rank, by rank.
__device__ inline int SlotIndex(const Shape& shape, const HandleArrays& handle, const Peers& peers, int t,
                                int rank, int row) {
  if (shape.has_row_per_choice()) return t;
  if (row >= 0 && peers.rank > 0) {
    row -= handle.rank_prefix_matrix[(peers.rank - 1) * shape.num_ranks + rank];
  }
  return row < shape.num_tokens ? row : -1;
}

// Finds this lane's source of a sum of token t. A lane stands for one rank, or, if there are more ranks than
// lanes, for one of those that the token has rows at. These are no more than the token's choices.
template <int kRankWords>
__device__ Sender FindSender(const Shape& shape, const HandleArrays& handle, const Peers& peers, int t,
                             int lane) {
  const Destination destination = FindDestination(shape, handle, t, lane);
  const bool by_choice = shape.has_row_per_choice();
  if constexpr (kRankWords == 1) {
    if (by_choice) {
      const unsigned ranks = __reduce_or_sync(kAllLanes, destination.row < 0 ? 0 : 1u << destination.rank);
      return {(ranks >> lane & 1) != 0, lane, t};
    }
    const int index = SlotIndex(shape, handle, peers, t, lane, destination.row);
    return {index >= 0, lane, index};
  } else {
    int rank = -1, before = 0;
#pragma unroll
    for (int w = 0; w < kRankWords; ++w) {
      uint32_t ranks;
      if (by_choice) {
        const uint32_t bit = RankWords<kRankWords>::BitIn(w, destination.rank);
        ranks = __reduce_or_sync(kAllLanes, destination.row < 0 ? 0 : bit);
      } else {
        ranks = __ballot_sync(kAllLanes, FindDestination(shape, handle, t, lane, w * kRankBits).row >= 0);
      }
      const int count = __popc(ranks), skipped = lane - before;
      before += count;
      if (skipped < 0 || skipped >= count) continue;
#pragma unroll 1
      for (int i = 0; i < skipped; ++i) ranks &= ranks - 1;
      rank = w * kRankBits + __ffs(ranks) - 1;
    }
    if (rank < 0) return {false, 0, 0};
    const int row = by_choice ? 0 : FindDestination(shape, handle, t, rank).row;
    const int index = SlotIndex(shape, handle, peers, t, rank, row);
    return {index >= 0, rank, index};
  }
}

}  // namespace jax_ep::cuda
