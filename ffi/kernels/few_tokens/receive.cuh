// The receiver's side of a dispatch of few tokens: copies rows from slots to their destinations, and writes
// the results that follow from the choices.
#pragma once

#include "kernels/few_tokens/lines.cuh"
#include "kernels/push/receiver.cuh"
#include "kernels/rows/copy.cuh"

namespace jax_ep::cuda {

constexpr int kSlotVectors = 8;  // 16-byte loads in flight per thread

// Copies this warp's part of a slot's rows to the `row` of each lane in `lanes`. Called by each of
// the row's warps.
__device__ inline void CopyOut(const PushArgs& args, const RowWarps& row_warps, const std::byte* slot,
                               int row, unsigned lanes) {
  for (int p = 0; p < args.num_payloads; ++p) {
    const int64_t bytes = args.payloads[p].row_bytes;
    const auto copy = [&](auto* null) {
      using Element = std::remove_pointer_t<decltype(null)>;
      const int64_t n = bytes / static_cast<int64_t>(sizeof(Element)), share = args.slot_shares[p];
      // Short rows of a second array, such as scales, go to the warps that have the least of the first array.
      const int warp = p % 2 == 0 ? row_warps.warp : row_warps.size - 1 - row_warps.warp;
      const int64_t first = min(n, share * warp), last = min(n, first + share);
      CopyRow<kSlotVectors>(
          reinterpret_cast<const Element*>(slot + args.slot_offsets[p]) + first, last - first, lanes,
          reinterpret_cast<Element*>(args.payloads[p].out + int64_t{row} * bytes) + first, row_warps.lane);
    };
    if (bytes % 16 == 0) {
      copy(static_cast<uint4*>(nullptr));
    } else {
      copy(static_cast<char*>(nullptr));
    }
  }
}

// The rows of a token at this rank. Lane k has its k-th choice.
struct ArrivingToken {
  int local;      // local expert of the choice; -1 if it is another rank's, or unused
  int row;        // of the choice by expert, otherwise of the token; -1 if it has none
  unsigned rows;  // lanes whose `row` the token is copied to
};

// Returns the rows of a token of rank `source`. Called by one warp. If it `writes`, it writes them to the
// handle.
__device__ inline ArrivingToken FindArrivingToken(const PushArgs& args, const RoutingTable& table, int source,
                                                  int token, bool writes) {
  const Shape& shape = args.shape;
  const int K = shape.top_k, L = shape.num_local_experts(), me = args.peers.rank;
  const int t = source * shape.num_tokens + token, lane = threadIdx.x % kWarp;
  const bool by_rank = !shape.has_row_per_choice();
  const int expert = lane < K ? table.expert(shape, source, token, lane) : -1;
  const bool is_local = expert >= me * L && expert < (me + 1) * L;
  const unsigned choices = __ballot_sync(kAllLanes, is_local);
  int row = -1;
  if (by_rank && choices != 0) {
    row = RowOfToken(shape, table, t, me);
  } else if (!by_rank) {
    const int local = is_local ? expert - me * L : 0;
    const int first = table.starts[me * (L + 1) + local] + table.local_counts[source * L + local];
    const int end = shape.has_fixed_blocks() ? shape.EndOf(local) : shape.capacity;
    row = RowOfChoice(table, source, token * K + lane, expert, first, end, choices);
    if (writes && lane < K) args.handle.received_rows[int64_t{t} * K + lane] = row;
  }
  const unsigned rows = by_rank ? (row >= 0 ? 1u : 0u) : __ballot_sync(kAllLanes, row >= 0);
  return {is_local ? expert - me * L : -1, row, rows};
}

// Writes the weight that arrived for this lane's choice, and by rank its expert.
__device__ inline void WriteArrivedChoice(const PushArgs& args, const ArrivingToken& arriving, float weight) {
  const int K = args.shape.top_k, lane = threadIdx.x % kWarp;
  if (lane >= K) return;
  if (!args.shape.has_row_per_choice()) {
    args.arrived_idx[int64_t{arriving.row} * K + lane] = arriving.local;
    if (args.arrived_weights != nullptr)
      args.arrived_weights[int64_t{arriving.row} * K + lane] = arriving.local >= 0 ? weight : 0.0f;
  } else if (arriving.row >= 0 && args.arrived_weights != nullptr) {
    args.arrived_weights[arriving.row] = weight;
  }
}

// Copies a token of rank `source` from its slot to its rows at this rank. Called by each of the row's warps.
// Returns true if the source was missed.
template <int kRankWords>
__device__ bool ReceiveToken(const PushArgs& args, const ArenaSession<kRankWords>& session,
                             const RoutingTable& table, const RowWarps& row_warps, int source, int token) {
  const int me = args.peers.rank, lane = row_warps.lane;
  const bool writes = row_warps.warp == 0;
  const ArrivingToken arriving = FindArrivingToken(args, table, source, token, writes);
  if (arriving.rows == 0) return false;
  const EpochWord* const arrived = &session.half().mailbox(me, source).arrived[token];
  const bool late = lane == 0 && !session.AwaitWord(arrived);
  if (__shfl_sync(kAllLanes, late, 0)) return session.Miss(source);
  __syncwarp();  // makes what lane 0 has acquired visible to all
  const std::byte* const slot = session.half().slot(me, source, token);
  const float weight = writes && lane < args.shape.top_k && args.topk_weights != nullptr
                           ? __ldcg(reinterpret_cast<const float*>(slot) + lane)
                           : 0.0f;
  CopyOut(args, row_warps, slot, arriving.row, arriving.rows);
  if (writes) WriteArrivedChoice(args, arriving, weight);
  return false;
}

// Stores chunks of a token of rank `source` in its rows at this rank. Called by one warp. Returns true
// if the source was missed.
template <typename T, int kRankWords>
__device__ bool ReceiveChunks(const PushArgs& args, const ArenaSession<kRankWords>& session,
                              const RoutingTable& table, const Chunks& chunks, int source, int token) {
  const auto at = [&](int chunk) { return session.half().chunk(args.peers.rank, source, token, chunk); };
  ChunkLines next = ChunkLines::Load(at(chunks.first));  // while the token's rows are found
  const ArrivingToken arriving = FindArrivingToken(args, table, source, token, chunks.first == 0);
  if (arriving.rows == 0) return false;
#pragma unroll 1
  for (int chunk = chunks.first; chunk < chunks.last; ++chunk) {
    ChunkLines lines = next;
    if (chunk + 1 < chunks.last) next = ChunkLines::Load(at(chunk + 1));
    if (!AwaitChunk(session, at(chunk), lines)) return session.Miss(source);
    const ChunkPart part = PartOf(lines);
    StoreArrivedChunk<T>(args, part, chunk, arriving.row, arriving.rows);
    if (chunk == 0) {
      const int from = Beside<T>::LaneOf(static_cast<int>(threadIdx.x) % kWarp);
      const float weight = __uint_as_float(__shfl_sync(kAllLanes, part.beside, from));
      WriteArrivedChoice(args, arriving, weight);
    }
  }
  return false;
}

// Writes this rank's part of the handle. Called by the metadata blocks that share this work.
__device__ inline void WriteHandle(const PushArgs& args, const RoutingTable& table) {
  const Shape& shape = args.shape;
  const int K = shape.top_k, width = shape.rows_per_token(), lane = threadIdx.x % kWarp;
  const int me = args.peers.rank,
            first = me * shape.num_tokens;  // index of this rank's first token among all
  const WarpShare metadata = args.few_tokens.MetadataShare();
  for (int token = metadata.index; token < shape.num_tokens; token += metadata.count) {
    const int t = first + token, expert = lane < K ? table.expert(shape, me, token, lane) : -1;
    if (lane < K) args.handle.topk_idx[token * K + lane] = expert;
    if (!shape.has_row_per_choice()) {
      for (int rank = 0; rank < width; ++rank) {
        const bool goes = (table.RanksWith(shape, rank)[t] >> rank % kRankBits & 1) != 0;
        const int row = goes ? RowOfToken(shape, table, t, rank) : -1;
        if (lane == 0) args.handle.sent_rows[token * width + rank] = row;
      }
    } else {
      const int rank = expert >= 0 ? shape.rank_of(expert) : 0;
      const int local = expert - rank * shape.num_local_experts();
      const int begin = expert >= 0 ? table.starts[expert + rank] + table.from_earlier_ranks[expert] : 0;
      const int end = shape.has_fixed_blocks() ? shape.EndOf(local) : shape.capacity;
      const unsigned choice_lanes = __ballot_sync(kAllLanes, expert >= 0);
      const int row = RowOfChoice(table, me, token * K + lane, expert, begin, end, choice_lanes);
      if (lane < K) args.handle.sent_rows[token * K + lane] = row;
    }
  }
}

// Clears this warp's share of rows [begin, end) of the results. In the padded order it leaves the payloads
// unchanged, because there are many such rows, and products of padded experts ignore them.
__device__ inline void ClearShareOfRows(const PushArgs& args, int64_t begin, int64_t end,
                                        const WarpShare& share) {
  const Shape& shape = args.shape;
  const int64_t thread = share.index * kWarp + static_cast<int>(threadIdx.x) % kWarp;
  const int64_t threads = share.count * kWarp;
  begin = min(begin, int64_t{shape.capacity});
  end = min(end, int64_t{shape.capacity});
  for (int p = 0; p < args.num_payloads && !shape.has_fixed_blocks(); ++p) {
    const int64_t bytes = args.payloads[p].row_bytes;
    FillBytes(args.payloads[p].out + begin * bytes, (end - begin) * bytes, 0, thread, threads);
  }
  if (args.arrived_weights == nullptr && args.arrived_idx == nullptr) return;
  const int width = shape.weights_per_row();
#pragma unroll 1
  for (int64_t i = begin * width + thread; i < end * width; i += threads) {
    if (args.arrived_weights != nullptr) args.arrived_weights[i] = 0.0f;
    if (args.arrived_idx != nullptr) args.arrived_idx[i] = -1;
  }
}

// Clears the padding of each expert's block, one block per warp. Called by the metadata blocks that share
// this work.
__device__ inline void ClearPadding(const PushArgs& args, const RoutingTable& table) {
  const bool has_padding = args.shape.alignment > 1 || args.shape.has_fixed_blocks();
  if (!args.shape.has_expert_blocks() || !has_padding) return;
  const int L = args.shape.num_local_experts(), me = args.peers.rank;
  const int32_t* const starts = table.starts + me * (L + 1);
  const WarpShare metadata = args.few_tokens.MetadataShare();
  for (int i = metadata.index; i < L; i += metadata.count) {
    ClearShareOfRows(args, int64_t{starts[i]} + table.totals[me * L + i], starts[i + 1], {0, 1});
  }
}

// Clears the rows after all blocks. Called by the metadata blocks, or, if there is much to clear, by all
// blocks except the senders.
__device__ inline void ClearTail(const PushArgs& args, const RoutingTable& table) {
  constexpr int64_t kMuch = 1 << 20;  // bytes
  const Shape& shape = args.shape;
  const int me = args.peers.rank, L = shape.num_local_experts();
  const bool is_large = !shape.has_fixed_blocks() && shape.capacity * args.few_tokens.slots.bytes > kMuch;
  if (!is_large && !args.few_tokens.writes_metadata()) return;
  const int tail = shape.has_expert_blocks()
                       ? table.starts[me * (L + 1) + L]
                       : CountTokensTo(shape, table, me, 0, shape.num_ranks * shape.num_tokens);
  const int first = is_large ? args.few_tokens.num_senders : args.few_tokens.first_metadata_block();
  ClearShareOfRows(args, tail, shape.capacity, WarpsOf(first, static_cast<int>(gridDim.x)));
}

// Subtracts, by rank, the choices of tokens that the capacity cuts from their experts' counts. Called by one
// warp.
__device__ inline void SubtractCutTokens(const PushArgs& args, const RoutingTable& table) {
  const Shape& shape = args.shape;
  const int me = args.peers.rank, L = shape.num_local_experts(), lane = threadIdx.x % kWarp;
  const uint32_t* const ranks = table.RanksWith(shape, me);
  int before = 0;
  for (int first = 0; first < shape.num_ranks * shape.num_tokens; first += kWarp) {
    const int t = first + lane;
    const bool comes = t < shape.num_ranks * shape.num_tokens && (ranks[t] >> me % kRankBits & 1) != 0;
    const unsigned lanes = __ballot_sync(kAllLanes, comes);
    const bool cut = comes && before + __popc(lanes & ((1u << lane) - 1)) >= shape.capacity;
    for (int k = 0; k < shape.top_k && cut; ++k) {
      const int expert = table.expert(shape, t / shape.num_tokens, t % shape.num_tokens, k);
      if (expert >= 0 && expert / L == me) atomicSub(&args.tokens_per_expert[expert % L], 1);
    }
    before += __popc(lanes);
  }
}

// Counts the rows from each rank to each, before drops, and returns them: [source * R + destination]. Of few
// ranks a warp counts those of a pair. Of many ranks there are too many pairs for that, and no room for them
// but in the handle, where WriteReceiver replaces each count by a sum once it has read it. They are volatile
// because the first-level cache does not see atomics. Called by one block, which must synchronize before it
// reads them.
template <int kRankWords>
__device__ const volatile int32_t* CountPairs(const PushArgs& args, const RoutingTable& table) {
  constexpr int kFewRanks = 16;
  __shared__ int32_t of_few[kFewRanks * kFewRanks];
  const int R = args.shape.num_ranks;
  if (kRankWords == 1 && R <= kFewRanks) {
    for (int i = threadIdx.x / kWarp; i < R * R; i += kFewTokensWarps) {
      const int count = RowsBetween(args.shape, table, i / R, i % R);
      if (threadIdx.x % kWarp == 0) of_few[i] = count;
    }
    return of_few;
  }
  int32_t* const pairs = args.handle.rank_prefix_matrix;
#pragma unroll 1
  for (int i = threadIdx.x; i < R * R; i += kFewTokensThreads) pairs[i] = 0;
  __syncthreads();
  AddPairs<kRankWords>(args.shape, table, pairs);
  return pairs;
}

// Writes this rank's counts as a receiver, and the ranks that took part. Called by the leader; synchronizes.
template <int kRankWords>
__device__ void WriteCounts(const PushArgs& args, const ArenaSession<kRankWords>& session,
                            const RoutingTable& table) {
  const Shape& shape = args.shape;
  const int R = shape.num_ranks, L = shape.num_local_experts(), me = args.peers.rank;
  const volatile int32_t* const pairs = CountPairs<kRankWords>(args, table);
  if (!shape.has_row_per_choice()) {
#pragma unroll 1
    for (int i = threadIdx.x; i < L; i += kFewTokensThreads)
      args.tokens_per_expert[i] = table.totals[me * L + i];
  }
  session.WriteActive();
  const int num_rows = WriteReceiver(args, me, table.totals, table.starts + me * (L + 1),
                                     [&](int source, int d) { return pairs[source * R + d]; });
  const bool cuts = !shape.has_row_per_choice() && num_rows > shape.capacity;
  if (cuts && threadIdx.x < kWarp) SubtractCutTokens(args, table);
}

}  // namespace jax_ep::cuda
