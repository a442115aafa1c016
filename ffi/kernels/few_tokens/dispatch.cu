// Dispatch of few tokens, through the arena.
#include "kernels/few_tokens/receive.cuh"
#include "kernels/launch/launch.h"
#include "kernels/launches.h"

namespace jax_ep::cuda {
namespace {

constexpr int kMetadataBlocks = 4;

// Waits for everything that `ranks` send to this rank, and reads the choices for this into the table, which
// is built after it. Called by the whole block.
template <int kRankWords>
JAX_EP_RARE void AwaitAllRows(const PushArgs& args, const ArenaSession<kRankWords> session,
                              const RoutingTable table, RankWords<kRankWords> ranks) {
  const Shape& shape = args.shape;
  const int K = shape.top_k, choices = shape.num_tokens * K, me = args.peers.rank;
  const bool has_missed = AwaitChoices(args, session, ranks, [&](int rank, int word, uint32_t pair) {
    for (int i = 2 * word; i < min(2 * word + 2, choices); ++i, pair >>= 16)
      table.experts[rank * table.stride + i] = static_cast<int16_t>(pair & 0xffff);
  });
  if (session.HasAnyMissed(has_missed)) ranks = ranks.Without(session.Missed());
#pragma unroll 1
  for (int t = threadIdx.x; t < shape.num_ranks * shape.num_tokens; t += kFewTokensThreads) {
    const int source = t / shape.num_tokens;
    bool is_expected = false;
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
      const int expert = table.expert(shape, source, t % shape.num_tokens, k);
      is_expected |= expert >= 0 && shape.rank_of(expert) == me;
    }
    if (!is_expected || !ranks.Has(source)) continue;
    const EpochWord* const arrived = &session.half().mailbox(me, source).arrived[t % shape.num_tokens];
    if (!session.AwaitWord(arrived)) (void)session.Miss(source);
  }
}

// Builds the routing table. Then receives rows or, in a metadata block, writes the handle and the counts.
// Called by the blocks that do not send. `has_missed`: this thread has missed a call. Returns true if it has
// missed rows.
template <typename T, bool kLines, int kRankWords>
__device__ bool Receive(const PushArgs& args, const ArenaSession<kRankWords>& session,
                        const RoutingTable& table, const RowWarps& row_warps, bool has_missed) {
  const Shape& shape = args.shape;
  has_missed |= BuildRoutingTable(args, session, table);
  if (session.RecordMissing(Phase::kEnter, has_missed)) return false;
  ClearTail(args, table);
  if (args.few_tokens.writes_metadata()) {
    if (args.few_tokens.writes_handle()) {
      WriteHandle(args, table);
      ClearPadding(args, table);
    }
    if (session.is_leader()) WriteCounts(args, session, table);
    return false;
  }
  const int R = shape.num_ranks, tokens = R * shape.num_tokens;
  // Tokens that were sent at about the same time are received at about the same time.
  if constexpr (kLines) {
    const WarpShare warps = WarpsOf(args.few_tokens.num_senders, args.few_tokens.first_metadata_block());
    const ChunkShares shares(tokens, args.few_tokens.chunks, warps);
#pragma unroll 1
    for (int i = warps.index; i < shares.num_shares; i += warps.count) {
      const Chunks chunks = shares.At(i);
      has_missed |= ReceiveChunks<T>(args, session, table, chunks, chunks.row % R, chunks.row / R);
      if (has_missed && __any_sync(kAllLanes, IsGivenUp(args.peers))) break;
    }
  } else {
#pragma unroll 1
    for (int i = row_warps.index; i < tokens; i += row_warps.count) {
      has_missed |= ReceiveToken(args, session, table, row_warps, i % R, i / R);
      if (has_missed && __any_sync(kAllLanes, IsGivenUp(args.peers))) break;
    }
  }
  return has_missed;
}

// T is the type of rows to convert to FP8, or void. Rows travel as lines, or through slots. The ranks have
// bits in kRankWords words.
template <typename T, bool kLines, int kRankWords>
__global__ void __launch_bounds__(kFewTokensThreads, 1)
    FewTokensPushKernel(const __grid_constant__ PushArgs args) {
  extern __shared__ __align__(16) std::byte shared[];
  const ArenaOpening<kRankWords> opening(args.peers, args.position_operand, args.attendance);
  ArenaSession<kRankWords> session(args.peers, Op::kDispatch, args.attendance, args.few_tokens.slots);
  const Shape& shape = args.shape;
  const RoutingTable table(shape, shared);
  const WaitLog log = WaitLog::From(args.attendance.wait_us);
  const auto fill = [&] {
    FillRows(args);
    FillRouting(args, shape.has_row_per_choice());
    FillAttendance(args.attendance, args.shape.num_ranks);
  };
  const RowWarps row_warps = RowWarpsOf(args.few_tokens.num_senders, args.few_tokens.first_metadata_block(),
                                        args.few_tokens.warps_per_row);
  std::conditional_t<kLines, TokenChunk, PrefetchedToken<T>> token{};
  uint32_t choices = 0;
  if (args.few_tokens.sends()) {
    if constexpr (kLines) {
      token = PrefetchTokenChunk<T>(args, WarpsOf(0, args.few_tokens.num_senders).index);
    } else if (threadIdx.x < kSendThreads) {
      token = PrefetchToken<T>(args, blockIdx.x);
    }
  } else {
    for (int i = threadIdx.x; i < 3 * shape.num_experts; i += kFewTokensThreads)
      table.totals[i] = 0;  // and the two arrays after it
    const int words = ChoiceWords(shape);
    if (args.few_tokens.writes_metadata() && FirstWord(args) < words * shape.num_ranks) {
      choices = LoadChoices(shape, args.topk_idx, FirstWord(args) % words);
    }
  }
  if (!session.Open(opening)) return session.Close(fill);
  if (session.is_leader()) session.PublishCall();
  if (args.few_tokens.writes_metadata()) PublishChoices(args, args.topk_idx, session, choices);
  if constexpr (kLines) {
    if (args.few_tokens.sends()) SendChunks<T>(args, session, token);
  } else {
    if (args.few_tokens.sends() && threadIdx.x < kSendThreads) SendTokens<T>(args, session, token);
    if (args.few_tokens.sends() && threadIdx.x >= kSendThreads) SendArrivalFlags(args, session);
  }
  bool has_missed = false;
  if (!kLines && args.attendance.masks) {
    session.AgreeOnRanks(log, [&](const auto& ranks) { AwaitAllRows(args, session, table, ranks); });
  } else if (session.is_leader()) {
    has_missed = session.AwaitCalls(threadIdx.x, kFewTokensThreads, log);
  }
  if (!args.few_tokens.sends() && !session.has_failed()) {
    has_missed = Receive<T, kLines>(args, session, table, row_warps, has_missed);
    (void)session.RecordMissing(Phase::kWave, has_missed);
  }
  session.Close(fill);
}

// Calls f with the kernel for rows to quantize, or to send unchanged.
template <typename F>
cudaError_t WithFewTokensPushKernel(int num_ranks, Quantize quantize, Float type, bool lines, F&& f) {
  const auto with_type = [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    if (lines) return f(FewTokensPushKernel<T, true, 1>);
    return WithRankWords(
        num_ranks, [&](auto words) { return f(FewTokensPushKernel<T, false, decltype(words)::value>); });
  };
  if (quantize == Quantize::kNone) return with_type(static_cast<void*>(nullptr));
  switch (type) {
    case Float::kF16:
      return with_type(static_cast<__half*>(nullptr));
    case Float::kBF16:
      return with_type(static_cast<__nv_bfloat16*>(nullptr));
    default:
      return with_type(static_cast<float*>(nullptr));
  }
}

// Returns whether the rows travel as lines. By rank they do not, because one token took longer. With masks
// they do not, because a rank would have to look at all lines of all rows to tell which ranks have come.
bool GoesInLines(const PushArgs& args) {
  const bool quantizes = args.quantize != Quantize::kNone;
  return args.num_payloads == (quantizes ? 2 : 1) && (!quantizes || args.shape.top_k <= kWeightsBesideFp8) &&
         args.shape.has_row_per_choice() && !args.attendance.masks &&
         SuitsLines(args.shape, args.payloads[0].row_bytes, kMostLineBytesOfDispatch);
}

}  // namespace

cudaError_t LaunchFewTokensPush(const PushParams& params, const Peers& peers, const Device& device,
                                cudaStream_t stream) {
  PushArgs args{params};
  args.peers = peers;
  int64_t row_bytes = 0;
  for (int p = 0; p < params.num_payloads; ++p) {
    args.payloads[p] = params.payloads[p];
    args.slot_offsets[p] = static_cast<int32_t>(kSlotHeadBytes + row_bytes);
    row_bytes += AlignUp(params.payloads[p].row_bytes, 16);
  }
  args.few_tokens.slots = SlotsOf(args.shape, row_bytes);
  const bool lines = GoesInLines(args);
  if (lines) {
    args.few_tokens.slots = LinesOf(args.shape, args.payloads[0].row_bytes);
    args.few_tokens.chunks = ChunksOf(args.payloads[0].row_bytes);
  }
  const int max_blocks = MaxBlocks(device), tokens = args.shape.num_ranks * args.shape.num_tokens;
  // Chunks are spread over many SMs, because what limits a few rows is the rate at which an SM stores.
  constexpr int kChunksPerBlock = 2;
  const int blocks_per_token = std::max(1, (args.few_tokens.chunks + kChunksPerBlock - 1) / kChunksPerBlock);
  args.few_tokens.num_senders =
      std::min(args.shape.num_tokens * blocks_per_token, (max_blocks - kMetadataBlocks) / 2);
  args.few_tokens.num_receivers =
      std::min(tokens * blocks_per_token, max_blocks - kMetadataBlocks - args.few_tokens.num_senders);
  args.few_tokens.warps_per_row = WarpsPerRow(tokens, args.few_tokens.num_receivers, kFewTokensWarps);
  for (int p = 0; p < params.num_payloads; ++p) {
    const int64_t bytes = params.payloads[p].row_bytes, warps = args.few_tokens.warps_per_row;
    args.slot_shares[p] =
        static_cast<int32_t>(AlignUp(bytes % 16 == 0 ? bytes / 16 : bytes, kWarp * warps) / warps);
  }
  const int blocks = args.few_tokens.num_senders + args.few_tokens.num_receivers + kMetadataBlocks;
  return WithFewTokensPushKernel(
      args.shape.num_ranks, params.quantize, params.quantized_type, lines, [&](auto* kernel) {
        return Launch(kernel, blocks, kFewTokensThreads, RoutingTableBytes(args.shape), stream, true, args);
      });
}

cudaError_t PreloadFewTokensPush() {
  cudaFuncAttributes attributes;
  const auto preload = [&](auto* kernel) {
    const cudaError_t loaded = cudaFuncGetAttributes(&attributes, kernel);
    if (loaded != cudaSuccess) return loaded;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(kMaxRoutingTableBytes));
  };
  for (int num_ranks : {1, kMaxRanks}) {
    for (Float type : {Float::kF16, Float::kBF16, Float::kF32}) {
      for (Quantize quantize : {Quantize::kNone, Quantize::kFp8}) {
        for (bool lines : {false, true}) {
          const cudaError_t error = WithFewTokensPushKernel(num_ranks, quantize, type, lines, preload);
          if (error != cudaSuccess) return error;
        }
      }
    }
  }
  return cudaSuccess;
}

}  // namespace jax_ep::cuda
