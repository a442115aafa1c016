// Dispatch: after the count, each row straight to its final place in its receiver's buffer; by expert to the
// first of a token's places at a rank, and from there to the others (spread.cuh).
#include <algorithm>
#include <optional>

#include "core/plan.h"
#include "kernels/kernels.h"
#include "kernels/place.cuh"
#include "kernels/spread.cuh"

namespace jax_ep::cuda {
namespace {

// Scaling takes registers.
template <typename Scale>
constexpr int kMoveThreads = std::is_void_v<Scale> ? 1024 : 512;
// Shared memory of a block: its counts, then its slots.
constexpr int kBulkBytes = 216 * 1024;
constexpr int kMaxSlotBytes = 16 * 1024;
constexpr int kGranule = 32;       // tokens, sent by loads and stores
constexpr int kMaxBulkWarps = 12;  // the others send what bulk copies do not take

// Sends the tokens, a granule at a time: the first is this block's own, the others go to whoever is free, so
// that no block ends long after the others.
template <bool kInBulk>
__device__ void Send(const MoveArgs& args, uint32_t epoch, Counts& counts, const Published* published,
                     std::byte* bytes, uint64_t (*barriers)[2]) {
  __shared__ int next;
  const int num_tokens = args.shape.num_tokens, warp = threadIdx.x / kWarp;
  const int num_bulk_warps = kInBulk ? args.bulk.num_warps : 0;
  const bool local = args.peers.num_ranks == 0;
  Slots slots{bytes + int64_t{2} * warp * args.bulk.slot_bytes, barriers[warp % kMaxBulkWarps], 0};
  if (kInBulk) FenceBulk();
  for (int granule = blockIdx.x; granule < (num_tokens + args.granule - 1) / args.granule; granule = next) {
    __syncthreads();  // all have read `next`
    if (threadIdx.x == 0) {
      next = local ? granule + args.num_senders
                   : args.num_senders + atomicAdd(&args.peers.control[args.peers.rank]->next[0], 1u);
    }
    const int begin = granule * args.granule, end = min(begin + args.granule, num_tokens);
    if (args.chunk_counts != nullptr) FinishRows(args, begin, end, counts);
    if (kInBulk && warp < num_bulk_warps) {
      SendTokensInBulk(args, begin, end, published, slots);
      if (args.spreads) WaitForStores();
      FenceBulk();
    } else {
      SendTokens(args, begin, end, published, num_bulk_warps);
    }
    if (args.spreads) {
      const int wave = begin / args.waves.tokens;
      const int first = args.waves.First(args.shape, wave), last = args.waves.First(args.shape, wave + 1);
      FinishPart(args.peers, wave, (last - first + args.granule - 1) / args.granule, epoch);
    }
    __syncthreads();
  }
  if (kInBulk) {
    WaitForStores();
    FenceBulk();
  }
}

template <bool kInBulk, typename Scale>
__global__ void __launch_bounds__(kMoveThreads<Scale>, 1) MoveKernel(const __grid_constant__ MoveArgs args) {
  // Counts; for bulk copies then the slots, or where nothing is sent zeros.
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ Published published[kMaxRanks];
  __shared__ uint64_t barriers[kMaxBulkWarps][2];
  const Shape& shape = args.shape;
  const Peers& peers = args.peers;
  const bool routes = args.chunk_counts != nullptr, local = peers.num_ranks == 0;
  const bool sends = static_cast<int>(blockIdx.x) < args.num_senders;
  const Op op = routes ? Op::kDispatch : Op::kCachedDispatch;
  Counts counts(shape, shared);
  std::byte* const bytes = shared + Counts::Bytes(shape);

  if (kInBulk && threadIdx.x < 2 * kMaxBulkWarps) InitBarrier(&barriers[threadIdx.x / 2][threadIdx.x % 2]);
  for (int i = threadIdx.x; i < Counts::kArrays * NumBins(shape); i += blockDim.x) counts.own[i] = 0;
  if (threadIdx.x == 0) {
    for (int p = 0; p < args.num_payloads; ++p) published[0].buffers[p] = args.payloads[p].out;
    published[0].weights = args.recv_topk_weights;
    published[0].routing = args.sends_map ? args.handle.row_map : args.recv_topk_idx;
  }
  __syncthreads();
  uint32_t epoch = 0;
  bool alive = local || Begin(peers, op, args.rank_operand, &epoch);
  if (alive && routes && (local || blockIdx.x == 0)) {
    AddChunks(args, 0, NumChunks(shape), counts.own);
    for (int bin = threadIdx.x; bin < NumBins(shape) * peers.num_ranks; bin += blockDim.x) {
      peers.control[bin / NumBins(shape)]->counts[peers.rank][bin % NumBins(shape)] =
          counts.own[bin % NumBins(shape)];
    }
  }
  if (alive && !local) {
    if (blockIdx.x == 0) Enter(peers, published[0], args.num_payloads, epoch);
    if (routes && sends && blockIdx.x > 0) {  // while the peers come
      counts.chunk = min(static_cast<int>(blockIdx.x) * args.granule, shape.num_tokens) / kChunkTokens;
      AddChunks(args, 0, counts.chunk, counts.earlier);
    }
    alive = WaitForAll(peers, op, Phase::kEnter, peers.control[peers.rank]->enter, epoch);
    if (alive) ReadPublished(peers, args.num_payloads, published);
  }
  if (alive) {
    const int me = peers.rank, L = shape.num_local_experts();
    if (routes) {
      FindFirstRows(args, counts);
      if (blockIdx.x == gridDim.x - 1)
        WriteReceiver(args, counts.own, counts.totals, counts.starts + me * (L + 1));
    }
    if (sends) {
      Send<kInBulk>(args, epoch, counts, published, bytes, barriers);
    } else {
      const int num_rows = routes
                               ? counts.totals[shape.num_experts + me]
                               : args.handle.rank_prefix_matrix[(shape.num_ranks - 1) * shape.num_ranks + me];
      const int32_t* rows = routes ? counts.totals + me * L : args.handle.expert_counts;
      int32_t* const starts = counts.starts + me * (L + 1);
      if (!routes && shape.order == Order::kExpert && threadIdx.x < kWarp) FindStarts(shape, rows, starts);
      const int64_t thread = int64_t{blockIdx.x - args.num_senders} * blockDim.x + threadIdx.x;
      const int64_t num_threads = int64_t{gridDim.x - args.num_senders} * blockDim.x;
      if (kInBulk) {
        Clear(bytes, kZeroBytes, {threadIdx.x, blockDim.x, nullptr});
        FenceBulk();
      }
      __syncthreads();
      ClearGaps(args, rows, starts, num_rows, {thread, num_threads, kInBulk ? bytes : nullptr});
    }
    if (args.spreads) alive = SpreadRows<Scale>(args, op, epoch);
  }
  if (local) return;
  if (!IsLastBlock(peers)) return;
  const bool counts_pairs = alive && routes && shape.order == Order::kRank;
  const int cut = counts_pairs ? CountWholeSources(args, counts.own) : 0;
  if (Leave(peers, op, epoch) && counts_pairs) CountCutSource(args, cut);
}

// Two slots a warp, as many warps as have room.
BulkPlan PlanBulk(const MoveArgs& args, const Device& device) {
  int64_t longest = 0;
  for (int p = 0; p < args.num_payloads; ++p) {
    if (IsBulkRow(args.payloads[p].row_bytes)) longest = std::max(longest, args.payloads[p].row_bytes);
  }
  if (longest == 0 || !device.copies_in_bulk) return {0, 0};
  const int64_t slot = std::min(AlignUp(longest, 128), int64_t{kMaxSlotBytes});
  const int64_t room = kBulkBytes - Counts::Bytes(args.shape);
  return {static_cast<int32_t>(std::min(room / (2 * slot), int64_t{kMaxBulkWarps})),
          static_cast<int32_t>(slot)};
}

// Calls f with the kernel and its threads a block, for rows to be scaled or not.
template <typename F>
cudaError_t WithKernel(bool in_bulk, std::optional<Float> scaled, F&& f) {
  const auto with = [&](auto* null) {
    using Scale = std::remove_pointer_t<decltype(null)>;
    return f(in_bulk ? MoveKernel<true, Scale> : MoveKernel<false, Scale>, kMoveThreads<Scale>);
  };
  if (!scaled) return with(static_cast<void*>(nullptr));
  return WithType(*scaled, with);
}

// The grid for a plan: blocks that send, and others.
cudaError_t Move(MoveArgs args, const Device& device, const SmPlan& plan, std::optional<Float> scaled,
                 cudaStream_t stream) {
  args.bulk = PlanBulk(args, device);
  args.num_senders = plan.links;
  args.spreads = args.peers.num_ranks > 0 && args.shape.order == Order::kExpert;
  // Two tokens a warp at a time; of few tokens, which make one wave, each block takes one share. Waves must
  // not depend on the plan: the ranks agree on them, and each has a plan of its own.
  args.granule = args.bulk.num_warps > 0 ? 2 * args.bulk.num_warps : kGranule;
  if (args.shape.num_tokens <= kTokensPerWave) {
    args.granule = std::clamp((args.shape.num_tokens + plan.links - 1) / plan.links, 1, args.granule);
  }
  args.waves = PlanWaves(args.shape, args.granule);
  int64_t shared = Counts::Bytes(args.shape);
  if (args.bulk.num_warps > 0) {
    shared += std::max(int64_t{2} * args.bulk.num_warps * args.bulk.slot_bytes, int64_t{kZeroBytes});
  }
  return WithKernel(args.bulk.num_warps > 0, scaled, [&](auto* kernel, int num_threads) {
    // Slots, and counts of many experts, need more than the default.
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) return error;
    kernel<<<plan.total(), num_threads, shared, stream>>>(args);
    return cudaPeekAtLastError();
  });
}

SmPlan PlanOf(const MoveArgs& args, const Device& device) {
  double row_bytes = 0;
  for (int p = 0; p < args.num_payloads; ++p) row_bytes += static_cast<double>(args.payloads[p].row_bytes);
  return PlanDispatch(args.shape, row_bytes, args.row_weights != nullptr, device.num_sms, device.sm_budget);
}

template <typename Params>
MoveArgs ArgsOf(const Params& params) {
  MoveArgs args{};
  args.shape = params.shape;
  for (int p = 0; p < params.num_payloads; ++p) args.payloads[p] = params.payloads[p];
  args.num_payloads = params.num_payloads;
  args.topk_weights = params.topk_weights;
  return args;
}

}  // namespace

cudaError_t LaunchDispatch(const DispatchParams& params, const Peers& peers, const Device& device,
                           cudaStream_t stream) {
  const cudaError_t error = LaunchCount(params.shape, params.topk_idx, params.handle.topk_idx,
                                        params.handle.token_rows, params.chunk_counts, stream);
  if (error != cudaSuccess) return error;
  MoveArgs args = ArgsOf(params);
  args.peers = peers;
  args.rank_operand = params.rank_operand;
  args.handle = params.handle;
  args.chunk_counts = params.chunk_counts;
  args.recv_topk_weights = params.recv_topk_weights;
  args.recv_topk_idx = params.recv_topk_idx;
  args.tokens_per_expert = params.tokens_per_expert;
  args.group_sizes = params.group_sizes;
  args.num_tokens = params.num_tokens;
  args.num_dropped = params.num_dropped;
  args.sends_map = params.shape.order == Order::kExpert;
  return Move(args, device, PlanOf(args, device), std::nullopt, stream);
}

cudaError_t LaunchCachedDispatch(const CachedDispatchParams& params, const Peers& peers, const Device& device,
                                 cudaStream_t stream) {
  MoveArgs args = ArgsOf(params);
  args.peers = peers;
  args.rank_operand = params.rank_operand;
  args.handle = params.handle;
  args.recv_topk_weights = params.recv_topk_weights;
  std::optional<Float> scaled;
  if (params.row_weights != nullptr) {
    args.row_weights = params.row_weights;
    for (int p = 0; p < params.num_payloads; ++p) args.factors[p] = params.factors[p];
    scaled = params.factor_type;
  }
  return Move(args, device, PlanOf(args, device), scaled, stream);
}

// A dispatch within a group of one rank, which meets nobody. The routed ids are the row map's, and are
// not needed afterwards: they lie behind the chunks' counts.
cudaError_t LaunchPermute(const PermuteParams& params, const Device& device, cudaStream_t stream) {
  const cudaError_t error = LaunchCount(params.shape, params.topk_idx, params.routed_idx, params.row_map,
                                        params.chunk_counts, stream);
  if (error != cudaSuccess) return error;
  MoveArgs args = ArgsOf(params);
  args.handle = {params.routed_idx, params.row_map, nullptr, nullptr, nullptr};
  args.chunk_counts = params.chunk_counts;
  args.recv_topk_weights = params.permuted_weights;
  args.tokens_per_expert = params.tokens_per_expert;
  args.group_sizes = params.group_sizes;
  args.num_dropped = params.num_dropped;
  // All SMs send; as many clear, once those are done.
  return Move(args, device, {device.num_sms, device.num_sms}, std::nullopt, stream);
}

// Whether the kernels that run on the current device were compiled for sm_90 or newer: what counts is the
// architecture they were compiled for, not the device's own.
static bool IsBuiltForHopper() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, MoveKernel<true, void>) == cudaSuccess &&
         attributes.ptxVersion >= 90;
}

Device DescribeDevice(bool plain_copies, int sm_budget) {
  int device = 0, num_sms = 1;
  (void)cudaGetDevice(&device);
  (void)cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  const bool is_new = IsBuiltForHopper();
  return {num_sms, !plain_copies && is_new, is_new, sm_budget};
}

cudaError_t PreloadDispatch() {
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
