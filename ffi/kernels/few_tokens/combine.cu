// Combine of few tokens, through the arena. Each rank sums the rows that it holds of a token, and writes the
// sum to its slot at the token's rank. That rank adds up the sums that arrive.
#include "kernels/few_tokens/receive_sums.cuh"
#include "kernels/few_tokens/send_sums.cuh"
#include "kernels/launch/launch.h"
#include "kernels/launches.h"

namespace jax_ep::cuda {
namespace {

// The summing warps of a block start with the sums that this rank sends, the other warps with those that it
// receives. At the end all warps do the latter. N elements of T are loaded at a time. Sums travel as lines,
// or through slots, in T or in FP8. The ranks have bits in kRankWords words.
template <typename T, int N, bool kLines, bool kFp8, int kRankWords>
__global__ void __launch_bounds__(kFewTokensThreads, 1)
    FewTokensPullKernel(const __grid_constant__ FewTokensPullArgs args) {
  __shared__ unsigned next;
  const ArenaOpening<kRankWords> opening(args.peers, args.position_operand, args.attendance);
  ArenaSession<kRankWords> session(args.peers, Op::kCombine, args.attendance, args.few_tokens.slots);
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
      first_sum = ComputeFirstChunk<T, N, kFp8>(args);
    } else {
      first_sum = ComputeFirstSum<T, N, kFp8>(args, row_warps);
    }
  } else {
    slice = FindOutputSlice<N, kRankWords>(args, warp - kSummingWarps, lane);
  }
  if (threadIdx.x == 0) next = kFewTokensWarps - kSummingWarps;
  if (!session.Open(opening)) return session.Close(fill);
  if (session.is_leader()) session.PublishCall();
  const TicketCounter tickets{&next};
  if (warp < kSummingWarps) {
    if constexpr (kLines) {
      SendChunks<T, N, kFp8>(args, session, first_sum);
    } else {
      SendSums<T, N, kFp8>(args, session, row_warps, first_sum);
    }
    slice = FindOutputSlice<N, kRankWords>(args, TicketCounter::Broadcast(tickets.Request(lane)), lane);
  }
  bool has_missed = false;
  if (!kLines && args.attendance.masks) {
    session.AgreeOnRanks(log, [&](const auto& ranks) { AwaitAllSums(args, session, ranks); });
  } else if (session.is_leader() && warp == kFewTokensWarps - 1) {
    // This includes ranks that send no row, because a half of the arena may be reused only after all ranks
    // have arrived.
    has_missed = session.AwaitCalls(lane, kWarp, log);
    __syncwarp();
  }
  if (!session.has_failed()) has_missed |= AddArrivedSums<T, N, kLines, kFp8>(args, session, tickets, slice);
  (void)session.RecordMissing(Phase::kWave, has_missed);
  if (session.is_leader()) session.WriteActive();
  session.Close(fill);
}

// Calls f with the kernel for rows of `width` elements. Lines and FP8 need whole vectors. Lines are for
// groups whose ranks have bits in one word.
template <typename F>
cudaError_t WithFewTokensPullKernel(int num_ranks, Float type, int64_t width, bool lines, bool fp8, F&& f) {
  const auto with_type = [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    constexpr int kFull = 16 / sizeof(T);
    if (lines && fp8) return f(FewTokensPullKernel<T, kFull, true, true, 1>);
    if (lines) return f(FewTokensPullKernel<T, kFull, true, false, 1>);
    return WithRankWords(num_ranks, [&](auto words) {
      constexpr int kRankWords = decltype(words)::value;
      if (fp8) return f(FewTokensPullKernel<T, kFull, false, true, kRankWords>);
      return width % kFull == 0 ? f(FewTokensPullKernel<T, kFull, false, false, kRankWords>)
                                : f(FewTokensPullKernel<T, 1, false, false, kRankWords>);
    });
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
  const int64_t width = args.summand.num_elements, row_bytes = width * BytesOf(args.summand.type);
  const bool fp8 = args.quantize != Quantize::kNone;
  args.few_tokens.slots = SlotsOf(args.shape, AlignUp(fp8 ? Fp8Bytes(width) : row_bytes, 16));
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
  return WithFewTokensPullKernel(
      args.shape.num_ranks, args.summand.type, width, lines, fp8, [&](auto* kernel) {
        return Launch(kernel, args.few_tokens.num_senders, kFewTokensThreads, 0, stream, true, args);
      });
}

cudaError_t PreloadFewTokensPull() {
  cudaFuncAttributes attributes;
  const auto preload = [&](auto* kernel) { return cudaFuncGetAttributes(&attributes, kernel); };
  for (int num_ranks : {1, kMaxRanks}) {
    for (Float type : {Float::kF16, Float::kBF16, Float::kF32}) {
      for (bool lines : {false, true}) {
        for (bool fp8 : {false, true}) {
          for (int64_t width : {1, 8}) {
            const cudaError_t error = WithFewTokensPullKernel(num_ranks, type, width, lines, fp8, preload);
            if (error != cudaSuccess) return error;
          }
        }
      }
    }
  }
  return cudaSuccess;
}

}  // namespace jax_ep::cuda
