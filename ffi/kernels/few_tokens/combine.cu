// Combine of few tokens, through the arena. Each rank sums the rows that it holds of a token, and writes the
// sum to its slot at the token's rank. That rank adds up the sums that arrive.
#include "kernels/few_tokens/chunk.cuh"
#include "kernels/few_tokens/partition.cuh"
#include "kernels/launch/launch.h"
#include "kernels/launches.h"
#include "kernels/protocol/arena_session.cuh"
#include "kernels/routing/destination.cuh"
#include "kernels/rows/sum.cuh"

namespace jax_ep::cuda {

// The arguments of the kernel. Passed by value as its parameter.
struct FewTokensPullArgs : PullOperands {
  Peers peers;
  FewTokensPartition few_tokens;
  Summand summand;
  Bias biases[kMaxBiases];
};

namespace {

// Warps of a block that start with sums to send. The others start with sums that arrive. There are fewer of
// these, because sums to send take longer.
constexpr int kSummingWarps = 12;

// Returns the factor that the sum in a slot still has to be multiplied by. If a rank has only one row of a
// token, it sends the row without its weight, so that the product is not rounded.
__device__ float& SlotFactor(std::byte* slot) { return *reinterpret_cast<float*>(slot); }

template <typename T>
__device__ bool IsOneRow(const SumInputs<T>& inputs) {
  return (inputs.lanes & (inputs.lanes - 1)) == 0;
}

template <typename T>
__device__ SumInputs<T> WithoutWeightIfSingle(SumInputs<T> inputs) {
  if (IsOneRow(inputs)) inputs.factor = 1.0f;
  return inputs;
}

template <typename T>
__device__ T* SlotRow(std::byte* slot) {
  return reinterpret_cast<T*>(slot + kSlotHeadBytes);
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

__device__ SlotTarget TargetOf(const FewTokensPullArgs& args, int i) {
  const int R = args.shape.num_ranks, behind = args.peers.rank + 1 + i % R;
  return {behind < R ? behind : behind - R, i / R};
}

// The work of a warp that does not depend on the op being open: the rows of its first slot, and the
// sum of this warp's first columns.
template <typename T, int N>
struct FirstSum {
  SumInputs<T> inputs;
  typename Sum<T>::Acc total[kSumVectors][N];
};

template <typename T, int N>
__device__ FirstSum<T, N> ComputeFirstSum(const FewTokensPullArgs& args, const RowWarps& row_warps) {
  FirstSum<T, N> first_sum{};
  if (row_warps.index >= args.shape.num_ranks * args.shape.num_tokens) return first_sum;
  const SlotTarget target = TargetOf(args, row_warps.index);
  first_sum.inputs = FindLocalRows<T>(args, target.rank, target.index, row_warps.lane);
  const int width = static_cast<int>(args.summand.num_elements);
  SumSlice<T, N>(WithoutWeightIfSingle(first_sum.inputs), row_warps.warp * kSlice<N>, width, row_warps.lane,
                 first_sum.total);
  return first_sum;
}

// Sums this rank's rows of each token, and sends the sums. Called by the summing warps, which share the
// tokens, a few warps for each.
template <typename T, int N>
__device__ void SendSums(const FewTokensPullArgs& args, const ArenaSession& session,
                         const RowWarps& row_warps, FirstSum<T, N> first_sum) {
  const int width = static_cast<int>(args.summand.num_elements), me = args.peers.rank;
  const int tokens = args.shape.num_ranks * args.shape.num_tokens;
  bool is_summed = true;
#pragma unroll 1
  for (int i = row_warps.index; i < tokens; i += row_warps.count, is_summed = false) {
    const SlotTarget target = TargetOf(args, i);
    if (!is_summed) first_sum.inputs = FindLocalRows<T>(args, target.rank, target.index, row_warps.lane);
    if (first_sum.inputs.lanes == 0 || (session.writable() >> target.rank & 1) == 0) continue;
    std::byte* const slot = session.half().slot(target.rank, me, target.index);
    if (row_warps.warp == 0 && row_warps.lane == __ffs(first_sum.inputs.lanes) - 1) {
      SlotFactor(slot) = IsOneRow(first_sum.inputs) ? first_sum.inputs.factor : 1.0f;
    }
#pragma unroll 1
    for (int first = row_warps.warp * kSlice<N>; first < width; first += row_warps.size * kSlice<N>) {
      if (!is_summed) {
        memset(first_sum.total, 0, sizeof(first_sum.total));
        SumSlice<T, N>(WithoutWeightIfSingle(first_sum.inputs), first, width, row_warps.lane,
                       first_sum.total);
      }
      is_summed = false;
      StoreSlice<T, N>(SlotRow<T>(slot), first, width, row_warps.lane, first_sum.total);
    }
    row_warps.Sync();
    if (row_warps.warp == 0 && row_warps.lane == 0) {
      StoreWordRelease(&session.half().mailbox(target.rank, me).arrived[target.index], 1, session.epoch());
    }
  }
}

// A chunk of a sum is a slice of it.
template <typename T, int N>
constexpr bool kFillsChunks = kSlice<N> * sizeof(T) == kChunkRowBytes && kSumVectors == kChunkVectors;

// The summing warps' shares of the chunks that travel.
__device__ inline ChunkShares SummedChunks(const FewTokensPullArgs& args) {
  const int warp = threadIdx.x / kWarp, blocks = args.few_tokens.num_senders;
  const WarpShare warps{warp * blocks + static_cast<int>(blockIdx.x), kSummingWarps * blocks};
  return {args.shape.num_ranks * args.shape.num_tokens, args.few_tokens.chunks, warps};
}

// Does what ComputeFirstSum does, for sums that travel as lines.
template <typename T, int N>
__device__ FirstSum<T, N> ComputeFirstChunk(const FewTokensPullArgs& args) {
  FirstSum<T, N> first_sum{};
  const ChunkShares shares = SummedChunks(args);
  if (shares.warps.index >= shares.num_shares) return first_sum;
  const Chunks chunks = shares.At(shares.warps.index);
  const SlotTarget target = TargetOf(args, chunks.row);
  const int lane = threadIdx.x % kWarp;
  first_sum.inputs = FindLocalRows<T>(args, target.rank, target.index, lane);
  SumSlice<T, N>(WithoutWeightIfSingle(first_sum.inputs), chunks.first * kSlice<N>,
                 static_cast<int>(args.summand.num_elements), lane, first_sum.total);
  return first_sum;
}

// Does what SendSums does, with lines.
template <typename T, int N>
__device__ void SendChunks(const FewTokensPullArgs& args, const ArenaSession& session,
                           FirstSum<T, N> first_sum) {
  static_assert(kFillsChunks<T, N>);
  const int width = static_cast<int>(args.summand.num_elements), me = args.peers.rank;
  const int lane = threadIdx.x % kWarp;
  const ChunkShares shares = SummedChunks(args);
  SumInputs<T>& inputs = first_sum.inputs;
  bool is_summed = true;
#pragma unroll 1
  for (int i = shares.warps.index; i < shares.num_shares; i += shares.warps.count, is_summed = false) {
    const Chunks chunks = shares.At(i);
    const SlotTarget target = TargetOf(args, chunks.row);
    if (!is_summed) inputs = FindLocalRows<T>(args, target.rank, target.index, lane);
    if (inputs.lanes == 0 || !session.may_write(target.rank)) continue;
    const float own_factor = __shfl_sync(kAllLanes, inputs.factor, __ffs(inputs.lanes) - 1);
    const float factor = IsOneRow(inputs) ? own_factor : 1.0f;
#pragma unroll 1
    for (int chunk = chunks.first; chunk < chunks.last; ++chunk, is_summed = false) {
      if (!is_summed) {
        memset(first_sum.total, 0, sizeof(first_sum.total));
        SumSlice<T, N>(WithoutWeightIfSingle(inputs), chunk * kSlice<N>, width, lane, first_sum.total);
      }
      ChunkPart part;
#pragma unroll
      for (int v = 0; v < kChunkVectors; ++v) {
        part.row[v] = Vector<T, N>::Rounded(first_sum.total[v]).bits;
      }
      part.beside = __float_as_uint(factor);
      StoreChunk(session.half().chunk(target.rank, me, target.index, chunk), part, session.epoch());
    }
  }
}

// The source of a sum of a token. Lane r holds whether rank r sends one, provided that it takes part, and the
// index of the slot at this rank.
struct Sender {
  bool sends;
  int index;

  __device__ Sender Among(uint32_t ranks, int lane) const {
    return {sends && (ranks >> lane & 1) != 0, index};
  }
};

__device__ Sender FindSender(const FewTokensPullArgs& args, int t, int lane) {
  const Shape& shape = args.shape;
  const Destination destination = FindDestination(shape, args.handle, t, lane);
  if (shape.has_row_per_choice()) {
    const unsigned ranks = __reduce_or_sync(kAllLanes, destination.row < 0 ? 0 : 1u << destination.rank);
    return {(ranks >> lane & 1) != 0, t};
  }
  int index = destination.row;
  if (index >= 0 && args.peers.rank > 0) {
    index -= args.handle.rank_prefix_matrix[(args.peers.rank - 1) * shape.num_ranks + lane];
  }
  return {destination.row >= 0 && index >= 0 && index < shape.num_tokens, index};
}

// Waits for the sums of a token. Called by one warp. Returns bit r if rank r was missed.
__device__ uint32_t AwaitSums(const FewTokensPullArgs& args, const ArenaSession& session,
                              const Sender& sender, int lane) {
  if (!sender.sends) return 0;
  const EpochWord* const arrived = &session.half().mailbox(args.peers.rank, lane).arrived[sender.index];
  return session.AwaitWord(arrived) ? 0 : 1u << lane;
}

// A slice of a token's result. Slices are dealt to the blocks round-robin; `i` counts those of one block.
struct OutputSlice {
  int t;
  int first;  // column
  Sender sender;
};

template <int N>
__device__ OutputSlice FindOutputSlice(const FewTokensPullArgs& args, int i, int lane) {
  const int width = static_cast<int>(args.summand.num_elements),
            slices = max((width + kSlice<N> - 1) / kSlice<N>, 1);
  const int index = static_cast<int>(blockIdx.x) + i * static_cast<int>(gridDim.x), t = index / slices;
  if (t >= args.shape.num_tokens) return {t, 0, {false, 0}};
  return {t, index % slices * kSlice<N>, FindSender(args, t, lane)};
}

constexpr int kChunksInFlight = 4;

// Adds up a chunk of the sums that arrive of a token, in the order of the ranks. Called by one warp. Returns
// bit r if rank r was missed.
template <typename T, int N>
__device__ uint32_t AddArrivedChunks(const FewTokensPullArgs& args, const ArenaSession& session,
                                     const Sender& sender, int chunk, float (&total)[kSumVectors][N]) {
  constexpr int kLooks = 4;  // before it waits as for a peer that is late
  const auto at = [&](int rank) {
    const int index = __shfl_sync(kAllLanes, sender.index, rank);
    return session.half().chunk(args.peers.rank, rank, index, chunk);
  };
  for (unsigned remaining = __ballot_sync(kAllLanes, sender.sends); remaining != 0;) {
    ChunkLines lines[kChunksInFlight];
    unsigned rest;  // of the ranks after those in flight
#pragma unroll 1
    for (int looks = 0;; ++looks) {
      // No lines are kept while it waits, because a call would have to save them.
      if (looks == kLooks) {
        rest = remaining;
#pragma unroll 1
        for (int i = 0; i < kChunksInFlight && rest != 0; ++i, rest &= rest - 1) {
          const int rank = __ffs(rest) - 1;
          if (!__all_sync(kAllLanes, AwaitLines(session, at(rank)))) return 1u << rank;
        }
      }
      rest = remaining;
      bool all_there = true;
#pragma unroll
      for (int i = 0; i < kChunksInFlight; ++i, rest &= rest - 1) {
        if (rest != 0) lines[i] = ChunkLines::Load(at(__ffs(rest) - 1));
      }
      rest = remaining;
#pragma unroll
      for (int i = 0; i < kChunksInFlight; ++i, rest &= rest - 1) {
        all_there &= rest == 0 || lines[i].HaveEpoch(session.epoch());
      }
      if (__all_sync(kAllLanes, all_there)) break;
    }
#pragma unroll
    for (int i = 0; i < kChunksInFlight; ++i, remaining &= remaining - 1) {
      if (remaining == 0) break;
      const ChunkPart part = lines[i].part();
#pragma unroll
      for (int v = 0; v < kSumVectors; ++v) {
        const Vector<T, N> vector{part.row[v]};
#pragma unroll
        for (int j = 0; j < N; ++j) {
          total[v][j] = MultiplyAdd(__uint_as_float(part.beside), static_cast<float>(vector[j]), total[v][j]);
        }
      }
    }
  }
  return 0;
}

// Adds up the sums that arrive, in the order of the ranks: first for `slice`, then for slices that the warp
// takes tickets for. Returns the ranks that this thread has missed.
template <typename T, int N, bool kLines>
__device__ uint32_t AddArrivedSums(const FewTokensPullArgs& args, const ArenaSession& session,
                                   const TicketCounter& tickets, OutputSlice slice) {
  const int lane = threadIdx.x % kWarp, width = static_cast<int>(args.summand.num_elements);
#pragma unroll 1
  for (; slice.t < args.shape.num_tokens;
       slice = FindOutputSlice<N>(args, TicketCounter::Broadcast(tickets.Request(lane)), lane)) {
    const Sender sender = slice.sender.Among(session.ranks(), lane);
    typename Sum<T>::Acc total[kSumVectors][N] = {};
    if constexpr (kLines) {
      const uint32_t missing = AddArrivedChunks<T, N>(args, session, sender, slice.first / kSlice<N>, total);
      if (missing != 0) return missing;
    } else {
      const uint32_t missing = AwaitSums(args, session, sender, lane);
      if (__any_sync(kAllLanes, missing != 0)) return missing;
      __syncwarp();  // makes what each lane has acquired visible to all
      SumInputs<T> inputs{nullptr, 1.0f, __ballot_sync(kAllLanes, sender.sends)};
      if (sender.sends) {
        std::byte* const slot = session.half().slot(args.peers.rank, lane, sender.index);
        inputs = {SlotRow<T>(slot), __ldcg(&SlotFactor(slot)), inputs.lanes};
      }
      SumSlice<T, N>(inputs, slice.first, width, lane, total);
    }
    AddBiases<T, N>(args.biases, args.num_biases, slice.t, slice.first, width, lane, total);
    StoreSlice<T, N>(static_cast<T*>(args.summand.out) + int64_t{slice.t} * width, slice.first, width, lane,
                     total);
  }
  return 0;
}

// Waits for all sums from `ranks`. Called by the whole block. Returns bit r if rank r was missed.
JAX_EP_RARE uint32_t AwaitAllSums(const FewTokensPullArgs& args, const ArenaSession session, uint32_t ranks) {
  const int lane = threadIdx.x % kWarp;
  uint32_t missing = 0;
  for (int t = threadIdx.x / kWarp; t < args.shape.num_tokens; t += kFewTokensWarps) {
    missing |= AwaitSums(args, session, FindSender(args, t, lane).Among(ranks, lane), lane);
    __syncwarp();
  }
  return missing;
}

// The summing warps of a block start with the sums that this rank sends, the other warps with those that it
// receives. At the end all warps do the latter. N elements of T are loaded at a time. Sums travel as lines,
// or through slots.
template <typename T, int N, bool kLines>
__global__ void __launch_bounds__(kFewTokensThreads, 1)
    FewTokensPullKernel(const __grid_constant__ FewTokensPullArgs args) {
  __shared__ unsigned next;
  const ArenaOpening opening(args.peers, args.position_operand, args.attendance);
  ArenaSession session(args.peers, Op::kCombine, args.attendance, args.few_tokens.slots);
  const Summand& summand = args.summand;
  const WaitLog log = WaitLog::From(args.attendance.wait_us);
  const auto fill = [&] {
    FillResult(summand.out, int64_t{args.shape.num_tokens} * summand.num_elements * sizeof(T));
    FillAttendance(args.attendance, args.shape.num_ranks);
  };
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const RowWarps row_warps =
      RowWarpsOf(0, args.few_tokens.num_senders, args.few_tokens.warps_per_row, kSummingWarps);
  FirstSum<T, N> first_sum{};
  OutputSlice slice{};
  if (warp < kSummingWarps) {
    if constexpr (kLines) {
      first_sum = ComputeFirstChunk<T, N>(args);
    } else {
      first_sum = ComputeFirstSum<T, N>(args, row_warps);
    }
  } else {
    slice = FindOutputSlice<N>(args, warp - kSummingWarps, lane);
  }
  if (threadIdx.x == 0) next = kFewTokensWarps - kSummingWarps;
  if (!session.Open(opening)) return session.Close(fill);
  if (session.is_leader()) session.PublishCall();
  const TicketCounter tickets{&next};
  if (warp < kSummingWarps) {
    if constexpr (kLines) {
      SendChunks<T, N>(args, session, first_sum);
    } else {
      SendSums<T, N>(args, session, row_warps, first_sum);
    }
    slice = FindOutputSlice<N>(args, TicketCounter::Broadcast(tickets.Request(lane)), lane);
  }
  uint32_t missing = 0;
  if (!kLines && args.attendance.masks) {
    session.AgreeOnRanks(log, [&](uint32_t ranks) { return AwaitAllSums(args, session, ranks); });
  } else if (session.is_leader() && warp == kFewTokensWarps - 1) {
    // This includes ranks that send no row, because a half of the arena may be reused only after all ranks
    // have arrived.
    missing = session.AwaitCall(lane, log);
    __syncwarp();
  }
  if (!session.has_failed()) missing |= AddArrivedSums<T, N, kLines>(args, session, tickets, slice);
  (void)session.RecordMissing(Phase::kWave, BlockOr(missing));
  if (session.is_leader()) session.WriteActive();
  session.Close(fill);
}

// Calls f with the kernel for rows of `width` elements. Lines need whole vectors.
template <typename F>
cudaError_t WithFewTokensPullKernel(Float type, int64_t width, bool lines, F&& f) {
  const auto with_type = [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    constexpr int kFull = 16 / sizeof(T);
    if (lines) return f(FewTokensPullKernel<T, kFull, true>);
    return width % kFull == 0 ? f(FewTokensPullKernel<T, kFull, false>) : f(FewTokensPullKernel<T, 1, false>);
  };
  switch (type) {
    case Float::kF16:
      return with_type(static_cast<__half*>(nullptr));
    case Float::kBF16:
      return with_type(static_cast<__nv_bfloat16*>(nullptr));
    default:
      return with_type(static_cast<float*>(nullptr));
  }
}

}  // namespace

cudaError_t LaunchFewTokensPull(const PullParams& params, const Peers& peers, const Device& device,
                                cudaStream_t stream) {
  FewTokensPullArgs args{params};
  args.peers = peers;
  args.summand = params.summands[0];
  const int64_t row_bytes = args.summand.num_elements * BytesOf(args.summand.type);
  args.few_tokens.slots = SlotsOf(args.shape, AlignUp(row_bytes, 16));
  const bool lines = !args.attendance.masks &&
                     SuitsLines(args.shape, row_bytes, kMostLineBytesOfCombine);  // as in a dispatch
  if (lines) {
    args.few_tokens.slots = LinesOf(args.shape, row_bytes);
    args.few_tokens.chunks = ChunksOf(row_bytes);
  }
  for (int i = 0; i < params.num_biases; ++i) args.biases[i] = params.biases[i];
  const int tokens = args.shape.num_ranks * args.shape.num_tokens;
  // Chunks are spread over many SMs, as in a dispatch.
  constexpr int kChunksPerBlock = 4;
  const int blocks_per_token = std::max(1, (args.few_tokens.chunks + kChunksPerBlock - 1) / kChunksPerBlock);
  args.few_tokens.num_senders = std::clamp(tokens * blocks_per_token, 1, MaxBlocks(device));
  args.few_tokens.warps_per_row = WarpsPerRow(tokens, args.few_tokens.num_senders, kSummingWarps);
  return WithFewTokensPullKernel(args.summand.type, args.summand.num_elements, lines, [&](auto* kernel) {
    return Launch(kernel, args.few_tokens.num_senders, kFewTokensThreads, 0, stream, true, args);
  });
}

cudaError_t PreloadFewTokensPull() {
  cudaFuncAttributes attributes;
  const auto preload = [&](auto* kernel) { return cudaFuncGetAttributes(&attributes, kernel); };
  for (Float type : {Float::kF16, Float::kBF16, Float::kF32}) {
    for (int kernel = 0; kernel < 3; ++kernel) {
      const cudaError_t error = WithFewTokensPullKernel(type, kernel == 1, kernel == 2, preload);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace jax_ep::cuda
