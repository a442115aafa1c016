// A dispatch of few tokens, through the arena.
#include "kernels/kernels.h"
#include "kernels/launch/launch.h"
#include "kernels/small/plan.h"
#include "kernels/small/receive.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kKeepers = 4;  // blocks that keep books

// Waits for all that `ranks` send here. The whole block; bit r: rank r was missed.
JAX_EP_RARE uint32_t AwaitAll(const SlotPushArgs& args, const Visit visit, const Routes routes,
                              uint32_t ranks) {
  const Shape& shape = args.shape;
  const int K = shape.top_k, choices = shape.num_tokens * K, me = args.peers.rank;
  uint32_t missing = BlockOr(AwaitChoices(args, visit, ranks, [&](int rank, int word, uint32_t two) {
    for (int i = 2 * word; i < min(2 * word + 2, choices); ++i, two >>= 16)
      routes.experts[rank * routes.stride + i] = static_cast<int16_t>(two & 0xffff);
  }));
#pragma unroll 1
  for (int t = threadIdx.x; t < shape.num_ranks * shape.num_tokens; t += kSlotThreads) {
    const int source = t / shape.num_tokens;
    bool comes = false;
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
      const int expert = routes.expert(shape, source, t % shape.num_tokens, k);
      comes |= expert >= 0 && shape.rank_of(expert) == me;
    }
    if (!comes || ((ranks & ~missing) >> source & 1) == 0) continue;
    const Stamped* const arrived = &args.mail(me, source, visit.epoch).arrived[t % shape.num_tokens];
    if (!AwaitWordOf(args.peers, arrived, visit.epoch)) {
      missing |= 1u << source;
    }
  }
  return missing;
}

// Finds out where rows lie, and then receives them, or writes down what was found. Returns the ranks whose
// rows were missed. A block that does not send.
__device__ uint32_t Receive(const SlotPushArgs& args, Visit& visit, const Routes& routes, const RowTeam& team,
                            uint32_t late) {
  const Shape& shape = args.shape;
  late |= FindRoutes(args, visit, routes);
  Miss(args, Op::kDispatch, visit, Phase::kEnter, BlockOr(late));
  if (visit.failed) return 0;
  ClearTail(args, routes);
  if (args.keeps_books()) {
    WriteHandle(args, routes);
    ClearPadding(args, routes);
    if (args.presides()) WriteCounts(args, visit, routes);
    return 0;
  }
  uint32_t missing = 0;
#pragma unroll 1
  for (int i = team.index; i < shape.num_ranks * shape.num_tokens; i += team.count) {
    // Tokens that were sent at the same time are received at the same time.
    const int source = i % shape.num_ranks, token = i / shape.num_ranks;
    missing |= ReceiveToken(args, visit, routes, team, source, token);
  }
  return missing;
}

// T is the type of rows that become FP8, or void.
template <typename T>
__global__ void __launch_bounds__(kSlotThreads, 1) SlotPushKernel(const __grid_constant__ SlotPushArgs args) {
  extern __shared__ __align__(16) std::byte shared[];
  constexpr Op op = Op::kDispatch;
  const Shape& shape = args.shape;
  const Routes routes(shape, shared);
  const WaitLog log = WaitLog::From(args.attendance.wait_us);
  const auto fill = [&] {
    FillRows(args);
    FillRouting(args, shape.has_row_per_choice());
    FillAttendance(args);
  };
  const RowTeam team = TeamOf(args.num_senders, args.first_keeper(), args.team_warps);
  EarlyToken<T> token{};
  uint32_t choices = 0;
  if (args.sends()) {
    if (threadIdx.x < kSendThreads) token = LoadToken<T>(args, blockIdx.x);
  } else {
    for (int i = threadIdx.x; i < 3 * shape.num_experts; i += kSlotThreads)
      routes.totals[i] = 0;  // and what follows
    const int words = ChoiceWords(shape);
    if (args.keeps_books() && FirstWord(args) < words * shape.num_ranks) {
      choices = LoadChoices(shape, args.topk_idx, FirstWord(args) % words);
    }
  }
  Visit visit = OpenSlots(args, op);
  if (!visit.open) return EndUnopened(args, op, visit, fill);
  if (args.presides()) TellCall(args, visit);
  if (args.keeps_books()) TellChoices(args, args.topk_idx, visit, choices);
  if (args.sends() && threadIdx.x < kSendThreads) SendTokens<T>(args, visit, token);
  if (args.sends() && threadIdx.x >= kSendThreads) FlagTokens(args, visit);
  uint32_t missing = 0;
  if (args.attendance.masks) {
    AgreeOnRanks(args, op, visit, log, [&](uint32_t ranks) { return AwaitAll(args, visit, routes, ranks); });
  } else if (args.presides()) {
    missing = AwaitCall(args, op, visit, threadIdx.x, log);
  }
  if (!args.sends() && !visit.failed) {
    missing = Receive(args, visit, routes, team, missing);
    Miss(args, op, visit, Phase::kWave, BlockOr(missing));
  }
  EndSlots(args, op, visit, fill);
}

// Calls f with the kernel for rows to be quantised, or sent as they are.
template <typename F>
cudaError_t WithKernel(Quantize quantize, Float type, F&& f) {
  if (quantize == Quantize::kNone) return f(SlotPushKernel<void>);
  switch (type) {
    case Float::kF16:
      return f(SlotPushKernel<__half>);
    case Float::kBF16:
      return f(SlotPushKernel<__nv_bfloat16>);
    default:
      return f(SlotPushKernel<float>);
  }
}

}  // namespace

cudaError_t LaunchSlotPush(const PushParams& params, const Peers& peers, const Device& device,
                           cudaStream_t stream) {
  SlotPushArgs args{};
  args.shape = params.shape;
  args.peers = peers;
  args.place_operand = params.place_operand;
  args.attendance = params.attendance;
  args.handle = params.handle;
  args.topk_idx = params.topk_idx;
  int64_t row_bytes = 0;
  for (int p = 0; p < params.num_payloads; ++p) {
    args.payloads[p] = params.payloads[p];
    args.offsets[p] = static_cast<int32_t>(kSlotHeadBytes + row_bytes);
    row_bytes += AlignUp(params.payloads[p].row_bytes, 16);
  }
  args.num_payloads = params.num_payloads;
  args.slots = SlotsOf(args.shape, row_bytes);
  args.quantize = params.quantize;
  args.topk_weights = params.topk_weights;
  args.arrived_weights = params.arrived_weights;
  args.arrived_idx = params.arrived_idx;
  args.tokens_per_expert = params.tokens_per_expert;
  args.group_sizes = params.group_sizes;
  args.num_tokens = params.num_tokens;
  args.num_dropped = params.num_dropped;
  const int most = MostBlocks(device), tokens = args.shape.num_ranks * args.shape.num_tokens;
  args.num_senders = std::min(args.shape.num_tokens, (most - kKeepers) / 2);
  args.num_receivers = std::min(tokens, most - kKeepers - args.num_senders);
  args.team_warps = TeamWarps(tokens, args.num_receivers, kSlotWarps);
  for (int p = 0; p < params.num_payloads; ++p) {
    const int64_t bytes = params.payloads[p].row_bytes, warps = args.team_warps;
    args.shares[p] =
        static_cast<int32_t>(AlignUp(bytes % 16 == 0 ? bytes / 16 : bytes, kWarp * warps) / warps);
  }
  const int blocks = args.num_senders + args.num_receivers + kKeepers;
  return WithKernel(params.quantize, params.quantized_type, [&](auto* kernel) {
    return Launch(kernel, blocks, kSlotThreads, RouteBytes(args.shape), stream, true, args);
  });
}

cudaError_t PreloadSlotPush() {
  cudaFuncAttributes attributes;
  for (Float type : {Float::kF16, Float::kBF16, Float::kF32}) {
    for (Quantize quantize : {Quantize::kNone, Quantize::kFp8}) {
      const cudaError_t error = WithKernel(quantize, type, [&](auto* kernel) {
        const cudaError_t loaded = cudaFuncGetAttributes(&attributes, kernel);
        if (loaded != cudaSuccess) return loaded;
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(kMostRouteBytes));
      });
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace jax_ep::cuda
