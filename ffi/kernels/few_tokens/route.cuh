// The routing table of a dispatch of few tokens. Each block builds it from the choices of all ranks. These
// are few and arrive with the first rows, so no rank has to wait for counts.
#pragma once

#include "kernels/protocol/arena_session.cuh"
#include "kernels/push/args.cuh"
#include "kernels/routing/count.cuh"
#include "kernels/routing/starts.cuh"

namespace jax_ep::cuda {

// A block's view of the routing, in shared memory.
struct RoutingTable {
  int16_t* experts;  // [R][stride] choices of all ranks' tokens, -1 unused
  uint32_t* ranks;   // by rank [ceil(R / kRankBits), R * T]: bits of the ranks that the token goes to
  int32_t* totals;   // [E] choices of each expert
  int32_t* from_earlier_ranks;  // [E] those of the ranks before this one
  int32_t* local_counts;  // [R, L] choices of the local experts by each rank; later by the ranks before it
  int32_t* starts;        // by expert [R, L + 1]: starts of the blocks of each rank's experts
  int stride;             // choices of a rank, rounded up to whole vectors

  __device__ RoutingTable(const Shape& shape, std::byte* shared)
      : stride(static_cast<int>(ChoicesStride(shape))) {
    experts = reinterpret_cast<int16_t*>(shared);
    ranks = reinterpret_cast<uint32_t*>(experts + shape.num_ranks * stride);
    totals = reinterpret_cast<int32_t*>(ranks + RankTableWords(shape));
    from_earlier_ranks = totals + shape.num_experts;
    local_counts = from_earlier_ranks + shape.num_experts;
    starts = local_counts + shape.num_experts;
  }
  // Returns, by rank, the words that have the bit of a rank, by token of all ranks.
  __device__ const uint32_t* RanksWith(const Shape& shape, int rank) const {
    return ranks + rank / kRankBits * shape.num_ranks * shape.num_tokens;
  }
  // Returns choice k of token `token` of rank `source`.
  __device__ int16_t& expert(const Shape& shape, int source, int token, int k) const {
    return experts[source * stride + token * shape.top_k + k];
  }
};

// Returns the number of words that carry a rank's choices, two in each.
JAX_EP_HD inline int ChoiceWords(const Shape& shape) { return (shape.num_tokens * shape.top_k + 1) / 2; }

// Returns the word that carries this rank's choices 2 * word and 2 * word + 1.
__device__ inline uint32_t LoadChoices(const Shape& shape, const TopkIds& ids, int word) {
  const int choices = shape.num_tokens * shape.top_k;
  uint32_t pair = ~0u;
#pragma unroll 1
  for (int i = min(2 * word + 1, choices - 1); i >= 2 * word; --i) {
    pair = pair << 16 | (static_cast<uint32_t>(RoutedAt(ids, shape, 0, i)) & 0xffff);
  }
  return pair;
}

// Returns the first (rank, word) that a thread of the metadata blocks publishes, as rank * ChoiceWords +
// word.
__device__ inline int FirstWord(const PushArgs& args) {
  return (static_cast<int>(blockIdx.x) - args.few_tokens.first_metadata_block()) * kFewTokensThreads +
         static_cast<int>(threadIdx.x);
}

// Publishes this rank's choices to all ranks. Called by all metadata blocks, which share the work. `first` is
// the content of the first word, loaded earlier.
template <int kRankWords>
__device__ void PublishChoices(const PushArgs& args, const TopkIds& ids,
                               const ArenaSession<kRankWords>& session, uint32_t first) {
  const int words = ChoiceWords(args.shape), R = args.shape.num_ranks, begin = FirstWord(args);
  const int stride =
      (static_cast<int>(gridDim.x) - args.few_tokens.first_metadata_block()) * kFewTokensThreads;
  const ArenaHalf half = session.half();
  for (int i = begin; i < words * R; i += stride) {
    const int r = i / words, word = i % words;
    if (!session.may_write(r)) continue;
    const uint32_t pair = i == begin ? first : LoadChoices(args.shape, ids, word);
    StoreWord(&half.mailbox(r, args.peers.rank).choices[word], pair, session.epoch());
  }
}

// Waits for the choices of `ranks`, and calls store(rank, word, two choices) for each word. Each warp takes
// words of one rank. Called by the whole block. Returns true if this thread has missed a rank.
template <int kRankWords, typename Store>
__device__ bool AwaitChoices(const PushArgs& args, const ArenaSession<kRankWords>& session,
                             const RankWords<kRankWords>& ranks, Store&& store) {
  constexpr int kWordsInFlight = 4;
  const int words = ChoiceWords(args.shape), R = args.shape.num_ranks;
  const int warp = threadIdx.x / kWarp, warps_per_rank = max(kFewTokensWarps / R, 1);  // at least one
  const int stride = warps_per_rank * kWarp;
  bool has_missed = false;
  for (int r = warp / warps_per_rank; r < R; r += kFewTokensWarps / warps_per_rank) {
    const EpochWord* const from = session.half().mailbox(args.peers.rank, r).choices;
    const bool is_expected = ranks.Has(r);
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
          // The words of other ranks are still read after a miss, because they may be all that is needed.
          if (!session.AwaitWord(&from[word])) has_missed = session.Miss(r);
          loaded[j] = LoadRelaxed(&from[word]);
        }
        store(r, word, is_expected ? static_cast<uint32_t>(loaded[j]) : ~0u);
      }
    }
  }
  return has_missed;
}

// Writes, by rank, the ranks that each token goes to, according to its choices. Called by one block.
template <int kRankWords>
__device__ void FindRanksOfTokens(const Shape& shape, const RoutingTable& table) {
  const int tokens = shape.num_ranks * shape.num_tokens;
  for (int i = threadIdx.x; i < RankTableWords(shape); i += kFewTokensThreads) {
    const int word = kRankWords == 1 ? 0 : i / tokens, t = i - word * tokens;
    uint32_t ranks = 0;
#pragma unroll 1
    for (int k = 0; k < shape.top_k; ++k) {
      const int expert = table.expert(shape, t / shape.num_tokens, t % shape.num_tokens, k);
      if (expert >= 0) ranks |= RankWords<kRankWords>::BitIn(word, shape.rank_of(expert));
    }
    table.ranks[i] = ranks;
  }
}

// Waits for all choices, and builds the table from them. The counts must be zero before. Called by the whole
// block, to which the table is visible on return. Returns true if the block has missed a rank.
template <int kRankWords>
__device__ bool BuildRoutingTable(const PushArgs& args, const ArenaSession<kRankWords>& session,
                                  const RoutingTable& table) {
  const Shape& shape = args.shape;
  const int K = shape.top_k, choices = shape.num_tokens * K, R = shape.num_ranks;
  const int L = shape.num_local_experts(), me = args.peers.rank, first = me * L;
  const bool all_present = session.has_all_ranks();
  const auto store = [&](int rank, int word, uint32_t pair) {
#pragma unroll 1
    for (int i = 2 * word; i < min(2 * word + 2, choices); ++i, pair >>= 16) {
      int expert = static_cast<int16_t>(pair & 0xffff);
      // The calls have not been compared yet, so a peer's choices may be those of another op.
      if (expert >= shape.num_experts) expert = -1;
      if (expert >= 0 && !all_present && !session.ranks().Has(shape.rank_of(expert))) expert = -1;
      table.experts[rank * table.stride + i] = static_cast<int16_t>(expert);
      if (expert < 0) continue;
      atomicAdd(&table.totals[expert], 1);
      if (rank < me) atomicAdd(&table.from_earlier_ranks[expert], 1);
      if (expert >= first && expert < first + L) atomicAdd(&table.local_counts[rank * L + expert - first], 1);
    }
  };
  if (session.HasAnyMissed(AwaitChoices(args, session, session.ranks(), store))) return true;
  if (!shape.has_row_per_choice()) {
    FindRanksOfTokens<kRankWords>(shape, table);
  } else {
    for (int r = threadIdx.x / kWarp; r < R; r += kFewTokensWarps) {
      FindStarts(shape, table.totals + r * L, table.starts + r * (L + 1));
    }
    for (int i = kFewTokensThreads - 1 - static_cast<int>(threadIdx.x); i < L; i += kFewTokensThreads) {
      int before = 0;
      for (int r = 0; r < R; ++r) {
        const int choices_of_rank = table.local_counts[r * L + i];
        table.local_counts[r * L + i] = before;
        before += choices_of_rank;
      }
    }
  }
  __syncthreads();
  return false;
}

// Returns, by expert, the row of choice i of rank `source`, which chose `expert`; each lane has its own
// choice. The rows of that rank and expert start at `begin`, and rows from `end` on are dropped. Returns -1
// if the row is dropped, or if the lane is not in `choice_lanes`. Called by one warp, whose lanes share the
// counting.
__device__ inline int RowOfChoice(const RoutingTable& table, int source, int i, int expert, int begin,
                                  int end, unsigned choice_lanes) {
  if (choice_lanes == 0) return -1;
  const int lane = threadIdx.x % kWarp;
  const bool is_choice = (choice_lanes >> lane & 1) != 0;
  constexpr int kFewChoices = 128;  // of a rank: each lane counts for its own choice
  const bool shares = table.stride > kFewChoices;
  const int shift = shares ? __clz(__popc(choice_lanes) - 1) - 27 : 0,
            lanes_per_choice = 1 << shift;  // lanes that count for one choice
  int counted_choice = i, counted_expert = expert;
  bool counts = is_choice;
  if (shares) {
    unsigned remaining = choice_lanes;
#pragma unroll 1
    for (int skipped = lane >> shift; skipped > 0 && remaining != 0; --skipped) remaining &= remaining - 1;
    counts = remaining != 0;
    const int source_lane = counts ? __ffs(remaining) - 1 : 0;  // whose choice this lane counts for
    counted_choice = __shfl_sync(kAllLanes, i, source_lane);
    counted_expert = __shfl_sync(kAllLanes, expert, source_lane);
  }
  int count = 0;
  if (counts) {
    count = CountEqual(table.experts + source * table.stride, counted_choice,
                       static_cast<int16_t>(counted_expert), lane & (lanes_per_choice - 1), lanes_per_choice);
  }
  if (shares) {
#pragma unroll 1
    for (int step = lanes_per_choice / 2; step > 0; step /= 2)
      count += __shfl_xor_sync(kAllLanes, count, step);
    count = __shfl_sync(kAllLanes, count, __popc(choice_lanes & ((1u << lane) - 1)) << shift & (kWarp - 1));
  }
  return is_choice && IsRow(begin + count, end) ? begin + count : -1;
}

// Returns, by rank, how many of tokens [begin, end) of all ranks go to `rank`, in all lanes. Called by one
// warp.
__device__ inline int CountTokensTo(const Shape& shape, const RoutingTable& table, int rank, int begin,
                                    int end) {
  const uint32_t* const ranks = table.RanksWith(shape, rank);
  int tokens = 0;
#pragma unroll 1
  for (int t = begin + static_cast<int>(threadIdx.x) % kWarp; t < end; t += kWarp)
    tokens += ranks[t] >> rank % kRankBits & 1;
  return __reduce_add_sync(kAllLanes, tokens);
}

// Returns, by rank, the row at `rank` of token t of all ranks, which must go there; -1 if it is dropped.
// Called by one warp.
__device__ inline int RowOfToken(const Shape& shape, const RoutingTable& table, int t, int rank) {
  const int row = CountTokensTo(shape, table, rank, 0, t);
  return IsRow(row, shape.capacity) ? row : -1;
}

// Returns the rows that rank `source` sends to rank d, before drops, in all lanes. Called by one warp.
__device__ inline int RowsBetween(const Shape& shape, const RoutingTable& table, int source, int d) {
  const int T = shape.num_tokens, K = shape.top_k, L = shape.num_local_experts();
  if (!shape.has_row_per_choice()) return CountTokensTo(shape, table, d, source * T, (source + 1) * T);
  int choices = 0;
  const int16_t* const experts = table.experts + source * table.stride;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < T * K; i += kWarp) {
    choices += experts[i] >= d * L && experts[i] < (d + 1) * L;
  }
  return __reduce_add_sync(kAllLanes, choices);
}

// Adds the rows from each rank to each, before drops, to pairs [source * R + destination]. Called by one
// block.
template <int kRankWords>
__device__ void AddPairs(const Shape& shape, const RoutingTable& table, int32_t* pairs) {
  const int R = shape.num_ranks, tokens = R * shape.num_tokens, choices = shape.num_tokens * shape.top_k;
#pragma unroll 1
  for (int i = threadIdx.x; i < RankTableWords(shape); i += kFewTokensThreads) {
    const int word = kRankWords == 1 ? 0 : i / tokens, source = (i - word * tokens) / shape.num_tokens;
#pragma unroll 1
    for (uint32_t bits = table.ranks[i]; bits != 0; bits &= bits - 1) {
      atomicAdd(&pairs[source * R + word * kRankBits + __ffs(bits) - 1], 1);
    }
  }
  if (!shape.has_row_per_choice()) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < R * choices; i += kFewTokensThreads) {
    const int source = i / choices, expert = table.experts[source * table.stride + i - source * choices];
    if (expert >= 0) atomicAdd(&pairs[source * R + shape.rank_of(expert)], 1);
  }
}

}  // namespace jax_ep::cuda
