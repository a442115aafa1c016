// Push: where it routes, after the count, each row goes straight to its final place in its receiver's buffer;
// by expert to the first of a token's places at a rank, and from there to the others (spread.cuh).
#include <algorithm>
#include <optional>

#include "core/plan.h"
#include "kernels/clear.cuh"
#include "kernels/give_up.cuh"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/place.cuh"
#include "kernels/spread.cuh"

namespace jax_ep::cuda {
namespace {

// Scaling takes registers.
template <typename Scale>
constexpr int kPushThreads = std::is_void_v<Scale> ? 1024 : 512;
// Shared memory of a block: its counts, then its slots.
constexpr int kBulkBytes = 216 * 1024;
constexpr int kMaxSlotBytes = 16 * 1024;
constexpr int kGranule = 32;       // tokens, sent by loads and stores
constexpr int kWave = 128;         // tokens, spread at a time
constexpr int kMaxBulkWarps = 12;  // the others send what bulk copies do not take
// Where the receiver waits for the rows: what is sent at a time queues up before the links, and comes later
// the more there is of it.
constexpr int kSpreadingWarps = 6;

// Shared memory before the slots: counts, and what few tokens are counted in.
JAX_EP_HD int64_t HeadBytes(const PushArgs& args) {
  const bool few = args.shape.num_tokens <= kFewTokens;
  return Counts::Bytes(args.shape) + (few ? Chunk::Bytes(args.shape.num_tokens, args.shape.top_k) : 0);
}

// The granules of tokens that this block sends: the first is its own, the others go to whoever is free, so
// that no block ends long after the others.
__device__ int NextGranule(const PushArgs& args, int granule, int num_granules) {
  if (args.peers.num_ranks == 0 || num_granules <= args.num_senders) return granule + args.num_senders;
  return args.num_senders + static_cast<int>(atomicAdd(&args.peers.own().next[0], 1u));
}

// Tells the peers of a granule that this block has sent. One warp, once for each granule; `wave` is the
// granule's.
__device__ void FinishGranule(const PushArgs& args, int wave, uint32_t epoch) {
  const int first = args.waves.First(args.shape, wave), last = args.waves.First(args.shape, wave + 1);
  FinishPart(args.peers, wave, (last - first + args.granule - 1) / args.granule, epoch);
}

// Sends the tokens, a granule at a time, the first piece of which is being loaded already. Some warps send
// rows by bulk copies; meanwhile others find the places of the next granule's rows and send what is left of
// the present one. By expert one more warp tells the peers of the granule before the last, which has arrived:
// its fence waits for the block's stores, and would hold up those that send.
template <bool kInBulk>
__device__ void Send(const PushArgs& args, uint32_t epoch, Counts& counts, const Published* published,
                     Slots& slots) {
  __shared__ int dealt[2];
  const bool routes = args.chunk_counts != nullptr;
  const int num_granules = (args.shape.num_tokens + args.granule - 1) / args.granule;
  const int warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
  const int num_bulk_warps = kInBulk ? args.bulk.num_sending : 0;
  const bool in_bulk = warp < num_bulk_warps, tells = args.spreads && warp == num_warps - 1;
  const Team helpers{static_cast<int>(threadIdx.x) - num_bulk_warps * kWarp,
                     (num_warps - num_bulk_warps - (args.spreads ? 1 : 0)) * kWarp, 1};
  const auto begin = [&](int granule) { return min(granule * args.granule, args.shape.num_tokens); };
  const auto prepare = [&](int granule, int* next) {
    if (helpers.thread == 0) *next = NextGranule(args, granule, num_granules);
    if (routes) FinishRows(args, begin(granule), begin(granule + 1), counts, helpers);
  };
  int granule = blockIdx.x;
  int sent = -1, arrived = -1;  // the waves of the granules before
  if (!in_bulk && !tells) prepare(granule, &dealt[0]);
  __syncthreads();
  for (int turn = 0; granule < num_granules; ++turn) {
    const int following = dealt[turn % 2];
    if (in_bulk) {
      if (turn > 0)
        LoadPiece(args, FirstPiece(args, begin(granule)), begin(granule + 1), slots, slots.used % 2);
      SendTokensInBulk(args, begin(granule), begin(granule + 1), published, slots);
    } else if (tells) {
      if (arrived >= 0) FinishGranule(args, arrived, epoch);
    } else {
      prepare(following, &dealt[(turn + 1) % 2]);
      SendTokens(args, begin(granule), begin(granule + 1), published, helpers);
    }
    __syncthreads();
    arrived = sent;
    sent = args.waves.Of(begin(granule));
    granule = following;
  }
  if (kInBulk) WaitForStores();
  __syncthreads();
  for (int wave : {arrived, sent}) {
    if (tells && wave >= 0) FinishGranule(args, wave, epoch);
  }
}

template <bool kInBulk, typename Scale>
__global__ void __launch_bounds__(kPushThreads<Scale>, 1) PushKernel(const __grid_constant__ PushArgs args) {
  // Counts; for bulk copies then the slots.
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ Published mine, published[kMaxRanks];
  __shared__ uint64_t barriers[kMaxBulkWarps][2];
  __shared__ __align__(128) uint4 zeros[kInBulk ? kZeroBytes / 16 : 1];
  const Shape& shape = args.shape;
  const Peers& peers = args.peers;
  const bool routes = args.chunk_counts != nullptr, local = peers.num_ranks == 0;
  const bool sends = static_cast<int>(blockIdx.x) < args.num_senders, closes = blockIdx.x == gridDim.x - 1;
  const Op op = routes ? Op::kDispatch : Op::kRedispatch;
  const int warp = threadIdx.x / kWarp, me = peers.rank, L = shape.num_local_experts();
  Counts counts(shape, shared);
  std::byte* const bytes = shared + HeadBytes(args);

  const State state = local ? State{} : LoadState(peers, args.rank_operand);
  Slots slots{bytes + int64_t{2} * warp * args.bulk.slot_bytes, barriers[warp % kMaxBulkWarps], 0};
  const Piece piece = FirstPiece(args, blockIdx.x * args.granule);
  const int end = min(static_cast<int>(blockIdx.x + 1) * args.granule, shape.num_tokens);
  const bool has_slots = kInBulk && warp < args.bulk.num_warps;
  const bool loads = kInBulk && sends && warp < args.bulk.num_sending;
  if (has_slots && threadIdx.x % kWarp == 0) InitBarriers(slots.barriers);
  if (loads) LoadPiece(args, piece, end, slots, 0);
  if (kInBulk && !sends) {
    for (int i = threadIdx.x; i < kZeroBytes / 16; i += blockDim.x) zeros[i] = make_uint4(0, 0, 0, 0);
    FenceBulk();
  }
  for (int i = threadIdx.x; i < Counts::kArrays * NumBins(shape); i += blockDim.x) counts.own[i] = 0;
  if (threadIdx.x == 0) {
    Published& own = local ? published[0] : mine;
    for (int p = 0; p < args.num_payloads; ++p) own.buffers[p] = args.payloads[p].out;
    own.weights = args.arrived_weights;
    own.routing = args.sends_map ? args.handle.received_rows : args.arrived_idx;
  }
  __syncthreads();
  if (routes && (local || sends)) CountOwn(args, counts, shared + Counts::Bytes(shape));
  uint32_t epoch = 0;
  bool alive = local || Begin(peers, op, state, &epoch);
  if (alive && !local && blockIdx.x == 0) Enter(peers, mine, args.num_payloads, epoch);
  if (alive && !local && routes && sends) {
    PublishCounts(args, counts, epoch);
    counts.chunk = args.counts_here ? 0 : min(piece.token - warp, shape.num_tokens) / kChunkTokens;
    AddChunks(args, 0, counts.chunk, 0, NumBins(shape), counts.earlier,
              WholeBlock());  // while the peers come
  }
  if (alive) {
    uint32_t missing = local ? 0 : ReadPublished(peers, op, args.num_payloads, epoch, published);
    if (routes && missing == 0) missing = ReadCounts(args, counts, epoch);
    alive = AreAllThere(peers, op, Phase::kEnter, epoch, missing);
  }
  if (!alive) {
    // A block does not end while it is being written to.
    if (loads && piece.token < end) WaitForLoad(&slots.barriers[0], 0);
    FailBlock(peers, op, epoch, [&] { FillResults(args); });
    return;
  }
  if (routes) {
    PlaceExperts(args, counts);
    if (closes) WriteReceiver(args, counts.own, counts.totals, counts.starts + me * (L + 1));
  }
  const bool counts_pairs = closes && !local && routes && !shape.has_row_per_choice();
  const int cut = counts_pairs ? CountWholeSources(args, counts.own) : 0;
  if (sends) {
    Send<kInBulk>(args, epoch, counts, published, slots);
  } else if (!routes && shape.has_expert_blocks() && warp == 0) {
    FindStarts(shape, args.handle.expert_counts, counts.starts + me * (L + 1));
  }
  if (!local) LeavePeers(peers, epoch, true);
  if (!sends) ClearGaps(args, counts, kInBulk ? zeros : nullptr, epoch);
  if (local) return;
  if (args.spreads) SpreadRows<kInBulk, Scale>(args, op, slots, epoch);
  if (closes) {
    if (!Leave(peers, op, published, epoch, args.spreads)) {
      GiveUp(peers, op, epoch, Part::kOpened, [&] { FillResults(args); });
    } else if (counts_pairs) {
      CountCutSource(args, cut);
    }
  }
  End(peers);
}

// Two slots a warp, as many warps as have room.
BulkPlan PlanBulk(const PushArgs& args, const Device& device) {
  int64_t longest = 0;
  for (int p = 0; p < args.num_payloads; ++p) {
    if (IsBulkRow(args.payloads[p].row_bytes)) longest = std::max(longest, args.payloads[p].row_bytes);
  }
  if (longest == 0 || !device.copies_in_bulk) return {};
  const int64_t slot = std::min(AlignUp(longest, 128), int64_t{kMaxSlotBytes});
  const int64_t room = kBulkBytes - HeadBytes(args);
  const int num_warps = static_cast<int>(std::min(room / (2 * slot), int64_t{kMaxBulkWarps}));
  return {num_warps, args.spreads ? std::min(num_warps, kSpreadingWarps) : num_warps, static_cast<int>(slot)};
}

// Calls f with the kernel and its threads a block, for rows to be scaled or not.
template <typename F>
cudaError_t WithKernel(bool in_bulk, std::optional<Float> scaled, F&& f) {
  const auto with = [&](auto* null) {
    using Scale = std::remove_pointer_t<decltype(null)>;
    return f(in_bulk ? PushKernel<true, Scale> : PushKernel<false, Scale>, kPushThreads<Scale>);
  };
  if (!scaled) return with(static_cast<void*>(nullptr));
  return WithType(*scaled, with);
}

SmPlan PlanOf(const PushArgs& args, const Device& device) {
  double row_bytes = 0;
  for (int p = 0; p < args.num_payloads; ++p) row_bytes += static_cast<double>(args.payloads[p].row_bytes);
  return PlanPush(args.shape, row_bytes, args.row_weights != nullptr, device.num_sms, device.sm_budget);
}

// How the blocks share the work: what of args depends on the device and on the number of senders.
void Divide(PushArgs& args, const Device& device, int num_senders) {
  const int T = args.shape.num_tokens;
  const bool local = args.peers.num_ranks == 0;
  args.spreads = !local && args.shape.has_row_per_choice();
  args.bulk = PlanBulk(args, device);
  args.num_senders = num_senders;
  // A token a warp at a time; of few tokens, which make one wave, each block takes one share. Waves must
  // not depend on the plan: the ranks agree on them, and each has a plan of its own.
  const bool few = T <= kFewTokens;
  args.granule = args.bulk.num_warps > 0 ? args.bulk.num_sending : kGranule;
  if (few) args.granule = std::clamp((T + num_senders - 1) / num_senders, 1, kGranule);
  args.waves = PlanWaves(args.shape, few ? kFewTokens : kWave, kWave, args.granule);
  args.counts_here = !local && few && T <= int64_t{num_senders} * args.granule;
}

cudaError_t Move(const PushArgs& args, int num_blocks, std::optional<Float> scaled, cudaStream_t stream) {
  int64_t shared = HeadBytes(args);
  shared += int64_t{2} * args.bulk.num_warps * args.bulk.slot_bytes;
  return WithKernel(args.bulk.num_warps > 0, scaled, [&](auto* kernel, int num_threads) {
    // Slots, and counts of many experts, need more than the default.
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) return error;
    // A local move meets nobody, and may have more blocks than there is room for.
    return Launch(kernel, num_blocks, num_threads, shared, stream, args.peers.num_ranks > 0, args);
  });
}

template <typename Params>
PushArgs ArgsOf(const Params& params) {
  PushArgs args{};
  args.shape = params.shape;
  for (int p = 0; p < params.num_payloads; ++p) args.payloads[p] = params.payloads[p];
  args.num_payloads = params.num_payloads;
  args.topk_weights = params.topk_weights;
  return args;
}

}  // namespace

cudaError_t LaunchPush(const PushParams& params, const Peers& peers, const Device& device,
                       cudaStream_t stream) {
  PushArgs args = ArgsOf(params);
  args.peers = peers;
  args.rank_operand = params.rank_operand;
  args.handle = params.handle;
  args.chunk_counts = params.chunk_counts;
  args.arrived_weights = params.arrived_weights;
  args.arrived_idx = params.arrived_idx;
  args.tokens_per_expert = params.tokens_per_expert;
  args.group_sizes = params.group_sizes;
  args.num_tokens = params.num_tokens;
  args.num_dropped = params.num_dropped;
  args.topk_idx = params.topk_idx;
  args.sends_map = params.routes() && params.shape.has_row_per_choice();
  std::optional<Float> scaled;
  if (params.scales()) {
    args.row_weights = params.row_weights;
    for (int p = 0; p < params.num_payloads; ++p) args.factors[p] = params.factors[p];
    scaled = params.factor_type;
  }
  const SmPlan plan = PlanOf(args, device);
  Divide(args, device, plan.links);
  if (params.routes() && !args.counts_here) {
    const cudaError_t error = LaunchCount(params.shape, params.topk_idx, params.handle.topk_idx,
                                          params.handle.sent_rows, params.chunk_counts, stream);
    if (error != cudaSuccess) return error;
  }
  return Move(args, plan.total(), scaled, stream);
}

// A push within a group of one rank, which meets nobody. The routed ids are the row map's, and are
// not needed afterwards: they lie behind the chunks' counts.
cudaError_t LaunchPermute(const PermuteParams& params, const Device& device, cudaStream_t stream) {
  const cudaError_t error = LaunchCount(params.shape, params.topk_idx, params.routed_idx, params.row_map,
                                        params.chunk_counts, stream);
  if (error != cudaSuccess) return error;
  PushArgs args = ArgsOf(params);
  args.handle = {params.routed_idx, params.row_map, nullptr, nullptr, nullptr};
  args.chunk_counts = params.chunk_counts;
  args.arrived_weights = params.row_weights;
  args.tokens_per_expert = params.tokens_per_expert;
  args.group_sizes = params.group_sizes;
  args.num_dropped = params.num_dropped;
  // All SMs send; as many clear, once those are done.
  Divide(args, device, device.num_sms);
  return Move(args, 2 * device.num_sms, std::nullopt, stream);
}

// Whether the kernels that run on the current device were compiled for sm_90 or newer: what counts is the
// architecture they were compiled for, not the device's own.
static bool IsBuiltForHopper() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, PushKernel<true, void>) == cudaSuccess &&
         attributes.ptxVersion >= 90;
}

Device DescribeDevice(bool plain_copies, int sm_budget) {
  int device = 0, num_sms = 1;
  (void)cudaGetDevice(&device);
  (void)cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  num_sms = std::min(num_sms, kMaxBlocks);
  const bool is_new = IsBuiltForHopper();
  return {num_sms, !plain_copies && is_new, is_new, sm_budget};
}

cudaError_t PreloadPush() {
  cudaFuncAttributes attributes;
  cudaError_t error = PreloadCount();
  for (std::optional<Float> scaled :
       {std::optional<Float>(), std::optional(Float::kF16), std::optional(Float::kBF16),
        std::optional(Float::kF32), std::optional(Float::kF64)}) {
    for (bool in_bulk : {false, true}) {
      if (error != cudaSuccess) return error;
      error = WithKernel(in_bulk, scaled,
                         [&](auto* kernel, int) { return cudaFuncGetAttributes(&attributes, kernel); });
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
