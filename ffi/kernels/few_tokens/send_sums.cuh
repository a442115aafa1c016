// The sender's side of a combine of few tokens: sums this rank's rows of each token, and sends the sums.
#pragma once

#include "kernels/few_tokens/sums.cuh"

namespace jax_ep::cuda {

// Warps of a block that start with sums to send. The others start with sums that arrive. There are fewer of
// these, because sums to send take longer.
constexpr int kSummingWarps = 12;

template <typename T>
__device__ bool IsOneRow(const SumInputs<T>& inputs) {
  return (inputs.lanes & (inputs.lanes - 1)) == 0;
}

// Returns the rows at this rank of the token that slot `index` of rank `source` stands for. By expert these
// are the rows of the token's choices, one per lane. By rank it is the index-th row that arrived from that
// rank, whose rows are contiguous (see CombineFitsArena).
template <typename T>
__device__ SumInputs<T> FindLocalRows(const FewTokensPullArgs& args, int source, int index, int lane) {
  const Shape& shape = args.shape;
  int row = -1;
  if (shape.has_row_per_choice()) {
    const int64_t token = int64_t{source} * shape.num_tokens + index;
    if (lane < shape.top_k) row = args.handle.received_rows[token * shape.top_k + lane];
  } else if (lane == 0) {
    const int32_t* const to_this_rank = args.handle.rank_prefix_matrix + args.peers.rank;
    row = (source == 0 ? 0 : to_this_rank[(source - 1) * shape.num_ranks]) + index;
    if (row >= to_this_rank[source * shape.num_ranks]) row = -1;
  }
  if (!IsRow(row, shape.capacity)) row = -1;
  SumInputs<T> inputs{nullptr, 1.0f, __ballot_sync(kAllLanes, row >= 0)};
  if (row >= 0) {
    inputs.row = static_cast<const T*>(args.summand.rows) + row * args.summand.num_elements;
    if (args.row_weights != nullptr) inputs.factor = args.row_weights[row];
  }
  return inputs;
}

// The slot that the warps of a row fill next: its rank, and its index there. Each rank starts with the rank
// after it, so that the ranks do not all write to the same one.
struct SlotTarget {
  int rank;
  int index;
};

__device__ inline SlotTarget TargetOf(const FewTokensPullArgs& args, int i) {
  const int R = args.shape.num_ranks, behind = args.peers.rank + 1 + i % R;
  return {behind < R ? behind : behind - R, i / R};
}

// Sums a slice of a token's rows. If the sum travels with a factor, a single row is not multiplied by its
// weight, which is the factor.
template <typename T, int N, bool kFp8>
__device__ void SumOwnRows(const FewTokensPullArgs& args, SumInputs<T> inputs, int first, int lane,
                           float (&total)[kSumVectors][N]) {
  if (!kFp8 && IsOneRow(inputs)) inputs.factor = 1.0f;
  SumSlice<T, N>(inputs, first, static_cast<int>(args.summand.num_elements), lane, total);
}

// Returns the factor of a sum, in all lanes.
template <typename T>
__device__ float FactorOf(const SumInputs<T>& inputs) {
  const float first = __shfl_sync(kAllLanes, inputs.factor, __ffs(inputs.lanes) - 1);
  return IsOneRow(inputs) ? first : 1.0f;
}

// The work of a warp that does not depend on the op being open: the rows of its first slot, and the
// sum of this warp's first columns.
template <typename T, int N>
struct FirstSum {
  SumInputs<T> inputs;
  float total[kSumVectors][N];
};

template <typename T, int N, bool kFp8>
__device__ FirstSum<T, N> ComputeFirstSum(const FewTokensPullArgs& args, const RowWarps& row_warps) {
  FirstSum<T, N> first_sum{};
  if (row_warps.index >= args.shape.num_ranks * args.shape.num_tokens) return first_sum;
  const SlotTarget target = TargetOf(args, row_warps.index);
  first_sum.inputs = FindLocalRows<T>(args, target.rank, target.index, row_warps.lane);
  SumOwnRows<T, N, kFp8>(args, first_sum.inputs, row_warps.warp * kSlice<N>, row_warps.lane, first_sum.total);
  return first_sum;
}

// Sends the sums of all tokens. Called by the summing warps, which share the tokens, a few warps for each.
template <typename T, int N, bool kFp8, int kRankWords>
__device__ void SendSums(const FewTokensPullArgs& args, const ArenaSession<kRankWords>& session,
                         const RowWarps& row_warps, FirstSum<T, N> first_sum) {
  const int width = static_cast<int>(args.summand.num_elements), me = args.peers.rank;
  const int tokens = args.shape.num_ranks * args.shape.num_tokens;
  bool is_summed = true;
#pragma unroll 1
  for (int i = row_warps.index; i < tokens; i += row_warps.count, is_summed = false) {
    const SlotTarget target = TargetOf(args, i);
    if (!is_summed) first_sum.inputs = FindLocalRows<T>(args, target.rank, target.index, row_warps.lane);
    if (first_sum.inputs.lanes == 0 || !session.may_write(target.rank)) continue;
    std::byte* const slot = session.half().slot(target.rank, me, target.index);
    if (!kFp8) {
      const float factor = FactorOf(first_sum.inputs);
      if (row_warps.warp == 0 && row_warps.lane == 0) SlotFactor(slot) = factor;
    }
#pragma unroll 1
    for (int first = row_warps.warp * kSlice<N>; first < width; first += row_warps.size * kSlice<N>) {
      if (!is_summed) {
        memset(first_sum.total, 0, sizeof(first_sum.total));
        SumOwnRows<T, N, kFp8>(args, first_sum.inputs, first, row_warps.lane, first_sum.total);
      }
      is_summed = false;
      if constexpr (kFp8) {
        const auto slice = ConvertSlice(first_sum.total, args.quantize == Quantize::kFp8Rounded);
        StoreSliceOfPart(SlotPart(slot, width), first, width, row_warps.lane, slice);
      } else {
        StoreSlice<T, N>(SlotRow<T>(slot), first, width, row_warps.lane, first_sum.total);
      }
    }
    row_warps.Sync();
    if (row_warps.warp == 0 && row_warps.lane == 0) {
      StoreWordRelease(&session.half().mailbox(target.rank, me).arrived[target.index], 1, session.epoch());
    }
  }
}

// The summing warps' shares of the chunks that travel. A chunk of a sum is a slice of it.
__device__ inline ChunkShares SummedChunks(const FewTokensPullArgs& args) {
  const int warp = threadIdx.x / kWarp, blocks = args.few_tokens.num_senders;
  const WarpShare warps{warp * blocks + static_cast<int>(blockIdx.x), kSummingWarps * blocks};
  return {args.shape.num_ranks * args.shape.num_tokens, args.few_tokens.chunks, warps};
}

// Does what ComputeFirstSum does, for sums that travel as lines.
template <typename T, int N, bool kFp8>
__device__ FirstSum<T, N> ComputeFirstChunk(const FewTokensPullArgs& args) {
  FirstSum<T, N> first_sum{};
  const ChunkShares shares = SummedChunks(args);
  if (shares.warps.index >= shares.num_shares) return first_sum;
  const Chunks chunks = shares.At(shares.warps.index);
  const SlotTarget target = TargetOf(args, chunks.row);
  const int lane = threadIdx.x % kWarp;
  first_sum.inputs = FindLocalRows<T>(args, target.rank, target.index, lane);
  SumOwnRows<T, N, kFp8>(args, first_sum.inputs, chunks.first * kSlice<N>, lane, first_sum.total);
  return first_sum;
}

// Does what SendSums does, with lines.
template <typename T, int N, bool kFp8, int kRankWords>
__device__ void SendChunks(const FewTokensPullArgs& args, const ArenaSession<kRankWords>& session,
                           FirstSum<T, N> first_sum) {
  using Chunk = SumChunk<T, N, kFp8>;
  const int me = args.peers.rank, lane = threadIdx.x % kWarp;
  const ChunkShares shares = SummedChunks(args);
  SumInputs<T>& inputs = first_sum.inputs;
  bool is_summed = true;
#pragma unroll 1
  for (int i = shares.warps.index; i < shares.num_shares; i += shares.warps.count, is_summed = false) {
    const Chunks chunks = shares.At(i);
    const SlotTarget target = TargetOf(args, chunks.row);
    if (!is_summed) inputs = FindLocalRows<T>(args, target.rank, target.index, lane);
    if (inputs.lanes == 0 || !session.may_write(target.rank)) continue;
    const float factor = kFp8 ? 1.0f : FactorOf(inputs);
#pragma unroll 1
    for (int chunk = chunks.first; chunk < chunks.last; ++chunk, is_summed = false) {
      if (!is_summed) {
        memset(first_sum.total, 0, sizeof(first_sum.total));
        SumOwnRows<T, N, kFp8>(args, inputs, chunk * kSlice<N>, lane, first_sum.total);
      }
      uint4* const to = session.half().chunk(target.rank, me, target.index, chunk);
      if constexpr (kFp8) {
        const auto slice = ConvertSlice(first_sum.total, args.quantize == Quantize::kFp8Rounded);
        StoreWords(to, Chunk::Pack(slice), session.epoch());
      } else {
        StoreWords(to, Chunk::Pack(first_sum.total, factor), session.epoch());
      }
    }
  }
}

}  // namespace jax_ep::cuda
