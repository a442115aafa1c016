// Where rows lie, as each block finds out for itself of all ranks' choices: they are few, and travel with the
// first rows, so nobody waits for anybody's counts.
#pragma once

#include "kernels/routing/count.cuh"
#include "kernels/routing/starts.cuh"
#include "kernels/small/args.cuh"

namespace jax_ep::cuda {

// In shared memory.
struct RoutingTable {
  int16_t* experts;             // [R][stride] of all ranks' tokens' choices, -1 unused
  uint16_t* ranks;              // by rank [R * T]: bit r: the token goes to rank r
  int32_t* totals;              // [E] choices on each expert
  int32_t* from_earlier_ranks;  // [E] those of ranks before this one
  int32_t* local_counts;        // [R, L] each rank's on the experts here, then those of the ranks before it
  int32_t* starts;              // by expert [R, L + 1]: where each rank's experts' blocks start
  int stride;                   // a rank's choices, in whole vectors

  __device__ RoutingTable(const Shape& shape, std::byte* shared)
      : stride(static_cast<int>(ChoicesStride(shape))) {
    experts = reinterpret_cast<int16_t*>(shared);
    ranks = reinterpret_cast<uint16_t*>(experts + shape.num_ranks * stride);
    totals = reinterpret_cast<int32_t*>(reinterpret_cast<std::byte*>(ranks) +
                                        AlignUp(2 * shape.num_ranks * shape.num_tokens, 16));
    from_earlier_ranks = totals + shape.num_experts;
    local_counts = from_earlier_ranks + shape.num_experts;
    starts = local_counts + shape.num_experts;
  }
  // Choice k of token `token` of rank `source`.
  __device__ int16_t& expert(const Shape& shape, int source, int token, int k) const {
    return experts[source * stride + token * shape.top_k + k];
  }
};

// Words that a rank's choices travel in, two of them each.
JAX_EP_HD inline int ChoiceWords(const Shape& shape) { return (shape.num_tokens * shape.top_k + 1) / 2; }

// Choices 2 * word and the next of this rank, as they travel.
__device__ inline uint32_t LoadChoices(const Shape& shape, const TopkIds& ids, int word) {
  const int choices = shape.num_tokens * shape.top_k;
  uint32_t pair = ~0u;
#pragma unroll 1
  for (int i = min(2 * word + 1, choices - 1); i >= 2 * word; --i) {
    pair = pair << 16 | (static_cast<uint32_t>(RoutedAt(ids, shape, 0, i)) & 0xffff);
  }
  return pair;
}

// The word of its choices that a thread of the blocks that keep books begins with.
__device__ inline int FirstWord(const SmallPushArgs& args) {
  return (static_cast<int>(blockIdx.x) - args.first_metadata_block()) * kSmallThreads +
         static_cast<int>(threadIdx.x);
}

// Tells all ranks of this one's choices. The blocks that keep books, together; `first` are those of the first
// word.
__device__ inline void PublishChoices(const SmallPushArgs& args, const TopkIds& ids,
                                      const MailSession& session, uint32_t first) {
  const int words = ChoiceWords(args.shape), R = args.shape.num_ranks, begin = FirstWord(args);
  const int stride = (static_cast<int>(gridDim.x) - args.first_metadata_block()) * kSmallThreads;
  const ArenaHalf half = session.half();
  for (int i = begin; i < words * R; i += stride) {
    const int r = i / words, word = i % words;
    if (!session.may_write(r)) continue;
    const uint32_t pair = i == begin ? first : LoadChoices(args.shape, ids, word);
    StoreWord(&half.mail(r, args.peers.rank).choices[word], pair, session.epoch());
  }
}

// Waits for the choices of `ranks`, and calls take(rank, word, two choices) for each word, a warp the words
// of one rank. The whole block; returns the ranks that this thread has missed.
template <typename Store>
__device__ uint32_t AwaitChoices(const SmallPushArgs& args, const MailSession& session, uint32_t ranks,
                                 Store&& store) {
  constexpr int kWordsInFlight = 4;
  const int words = ChoiceWords(args.shape), R = args.shape.num_ranks;
  const int warp = threadIdx.x / kWarp, warps_per_rank = max(kSmallWarps / R, 1);  // warps for a rank
  const int stride = warps_per_rank * kWarp;
  uint32_t missing = 0;
  for (int r = warp / warps_per_rank; r < R; r += kSmallWarps / warps_per_rank) {
    const EpochWord* const from = session.half().mail(args.peers.rank, r).choices;
    const bool is_expected = (ranks >> r & 1) != 0;
    for (int first = warp % warps_per_rank * kWarp + static_cast<int>(threadIdx.x) % kWarp; first < words;
         first += stride * kWordsInFlight) {
      EpochWord loaded[kWordsInFlight];
#pragma unroll
      for (int j = 0; j < kWordsInFlight; ++j) {
        const int word = first + j * stride;
        loaded[j] = is_expected && word < words ? LoadRelaxed(&from[word]) : 0;
      }
#pragma unroll
      for (int j = 0; j < kWordsInFlight; ++j) {
        const int word = first + j * stride;
        if (word >= words) break;
        if (is_expected && !HasEpoch(loaded[j], session.epoch())) {
          // What comes from other ranks is still read after that: it may be all that is needed.
          if (!session.AwaitWord(&from[word])) missing |= 1u << r;
          loaded[j] = LoadRelaxed(&from[word]);
        }
        store(r, word, is_expected ? static_cast<uint32_t>(loaded[j]) : ~0u);
      }
    }
  }
  return missing;
}

// Waits for all choices, and finds out of them where rows lie; the totals are zero before. The whole block,
// to which that is visible afterwards; returns the ranks that it has missed.
__device__ inline uint32_t BuildRoutingTable(const SmallPushArgs& args, const MailSession& session,
                                             const RoutingTable& table) {
  const Shape& shape = args.shape;
  const int K = shape.top_k, choices = shape.num_tokens * K, R = shape.num_ranks;
  const int L = shape.num_local_experts(), me = args.peers.rank, first = me * L;
  const uint32_t present_ranks = session.ranks();
  const bool all_present = session.has_all_ranks();
  const auto store = [&](int rank, int word, uint32_t pair) {
#pragma unroll 1
    for (int i = 2 * word; i < min(2 * word + 2, choices); ++i, pair >>= 16) {
      int expert = static_cast<int16_t>(pair & 0xffff);
      // Before all calls are compared, a peer's may be those of another op.
      if (expert >= shape.num_experts) expert = -1;
      if (expert >= 0 && !all_present && (present_ranks >> shape.rank_of(expert) & 1) == 0) expert = -1;
      table.experts[rank * table.stride + i] = static_cast<int16_t>(expert);
      if (expert < 0) continue;
      atomicAdd(&table.totals[expert], 1);
      if (rank < me) atomicAdd(&table.from_earlier_ranks[expert], 1);
      if (expert >= first && expert < first + L) atomicAdd(&table.local_counts[rank * L + expert - first], 1);
    }
  };
  const uint32_t missing = BlockOr(AwaitChoices(args, session, session.ranks(), store));
  if (missing != 0) return missing;
  if (!shape.has_row_per_choice()) {
    for (int t = threadIdx.x; t < R * shape.num_tokens; t += kSmallThreads) {
      uint32_t ranks = 0;
#pragma unroll 1
      for (int k = 0; k < K; ++k) {
        const int expert = table.expert(shape, t / shape.num_tokens, t % shape.num_tokens, k);
        if (expert >= 0) ranks |= 1u << shape.rank_of(expert);
      }
      table.ranks[t] = static_cast<uint16_t>(ranks);
    }
  } else {
    for (int r = threadIdx.x / kWarp; r < R; r += kSmallWarps) {
      FindStarts(shape, table.totals + r * L, table.starts + r * (L + 1));
    }
    for (int i = kSmallThreads - 1 - static_cast<int>(threadIdx.x); i < L; i += kSmallThreads) {
      int before = 0;
      for (int r = 0; r < R; ++r) {
        const int choices_of_rank = table.local_counts[r * L + i];
        table.local_counts[r * L + i] = before;
        before += choices_of_rank;
      }
    }
  }
  __syncthreads();
  return 0;
}

// By expert: the row of choice i of rank `source`, which fell on `expert`, each lane its own; that rank's
// rows of the expert lie from `begin` on, and those from `end` on are dropped. -1 if it is, or where the lane
// is not among those `wanted`. One warp, whose lanes share the counting.
__device__ inline int RowOfChoice(const RoutingTable& table, int source, int i, int expert, int begin,
                                  int end, unsigned choice_lanes) {
  if (choice_lanes == 0) return -1;
  const int lane = threadIdx.x % kWarp;
  const int shift = __clz(__popc(choice_lanes) - 1) - 27,
            lanes_per_choice = 1 << shift;  // lanes that count for one choice
  unsigned remaining = choice_lanes;
#pragma unroll 1
  for (int skipped = lane >> shift; skipped > 0 && remaining != 0; --skipped) remaining &= remaining - 1;
  const int source_lane =
      remaining == 0 ? 0 : __ffs(remaining) - 1;  // the lane whose choice this one counts for
  const int counted_choice = __shfl_sync(kAllLanes, i, source_lane),
            counted_expert = __shfl_sync(kAllLanes, expert, source_lane);
  int count = 0;
  if (remaining != 0) {
    count = CountEqual(table.experts + source * table.stride, counted_choice,
                       static_cast<int16_t>(counted_expert), lane & (lanes_per_choice - 1), lanes_per_choice);
  }
#pragma unroll 1
  for (int step = lanes_per_choice / 2; step > 0; step /= 2) count += __shfl_xor_sync(kAllLanes, count, step);
  count = __shfl_sync(kAllLanes, count, __popc(choice_lanes & ((1u << lane) - 1)) << shift & (kWarp - 1));
  return (choice_lanes >> lane & 1) != 0 && IsRow(begin + count, end) ? begin + count : -1;
}

// By rank: how many of the tokens [begin, end) of all ranks' go to `rank`. One warp, in all lanes.
__device__ inline int CountTokensTo(const RoutingTable& table, int rank, int begin, int end) {
  int tokens = 0;
#pragma unroll 1
  for (int t = begin + static_cast<int>(threadIdx.x) % kWarp; t < end; t += kWarp)
    tokens += table.ranks[t] >> rank & 1;
  return __reduce_add_sync(kAllLanes, tokens);
}

// By rank: the row at `rank` of token t of all ranks', which goes there; -1 if it is dropped. One warp.
__device__ inline int RowOfToken(const Shape& shape, const RoutingTable& table, int t, int rank) {
  const int row = CountTokensTo(table, rank, 0, t);
  return IsRow(row, shape.capacity) ? row : -1;
}

}  // namespace jax_ep::cuda
