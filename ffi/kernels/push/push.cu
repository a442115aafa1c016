// Launches of the push kernel: pushes to peers, and permutes.
#include <algorithm>
#include <optional>

#include "kernels/launch/launch.h"
#include "kernels/launch/plan.h"
#include "kernels/launches.h"
#include "kernels/push/kernel.cuh"

namespace jax_ep::cuda {
namespace {

// A block's dynamic shared memory holds what the ranks publish, the counts, then the stages. The device's
// limit also counts static shared memory. This is left to static shared memory by a push that copies in bulk,
// that scales, or that does neither.
constexpr int kBulkStaticBytes = 7 * 1024;
constexpr int kScaleStaticBytes = 20 * 1024;
constexpr int kStaticBytes = 4 * 1024;
constexpr int kMaxStageBytes = 16 * 1024;
constexpr int kMaxSlicesPerWarp = 3;  // in a batch
constexpr int kBatch = 32;            // tokens, if sent by loads and stores
// Tokens that are spread at a time, or slices of short rows, which have as many bytes as a token's long row.
constexpr int kWave = 128;
constexpr int kWaveStep = 6;  // of these; waves are multiples of the usual batch of bulk copies
// A receiver that spreads waits for each wave. Fewer warps that send keep the queue in front of the links
// short, and so the delay of a wave.
constexpr int kSpreadingWarps = 6;

int BulkBytes(const PushArgs& args, const Device& device) {
  return device.shared_bytes - (args.scales() ? kScaleStaticBytes : kBulkStaticBytes);
}

// Returns the shared memory of a warp that copies in bulk: two stages, and, if rows become FP8, the scales of
// one.
int64_t WarpBytes(const PushArgs& args, int64_t stage_bytes) {
  const bool quantizes = args.quantize != Quantize::kNone;
  const int64_t blocks = stage_bytes / args.element_bytes / kFp8Block;
  return 2 * stage_bytes + (quantizes ? blocks * static_cast<int64_t>(sizeof(float)) : 0);
}

// Returns the number of leading payloads that bulk copies may take. The scales of FP8 are not among them.
int NumBulkPayloads(const PushArgs& args) { return args.quantize == Quantize::kNone ? args.num_payloads : 1; }

// Returns the size of the longest row that bulk copies take, before any conversion to FP8; 0 if there is
// none.
int64_t LongestBulkRow(const PushArgs& args) {
  int64_t longest = 0;
  for (int p = 0; p < NumBulkPayloads(args); ++p) {
    if (IsBulkRow(args.payloads[p].row_bytes))
      longest = std::max(longest, args.payloads[p].row_bytes * args.element_bytes);
  }
  return longest;
}

// Returns the number of short rows that a warp loads and sends at a time, if a stage has kMaxStageBytes. Rows
// that become FP8 take a warp's time, so more of them at a time gain nothing.
int MaxSliceTokens(const PushArgs& args) {
  const int64_t longest = LongestBulkRow(args);
  const bool quantizes = args.quantize != Quantize::kNone;
  // More than two ranks spread soon after rows arrive, and then larger waves end later.
  const bool spreads_soon = args.spreads && args.shape.num_ranks > 2;
  if (longest == 0 || quantizes || spreads_soon || args.shape.num_tokens <= kFewTokens) return 1;
  return static_cast<int>(std::clamp(kMaxStageBytes / longest, int64_t{1}, int64_t{kMaxSliceTokens}));
}

// Plans bulk copies with as many warps as shared memory allows. Stages are smaller if it has no room for
// those of kSpreadingWarps.
BulkPartition PartitionForBulk(const PushArgs& args, const Device& device, int num_senders) {
  const int64_t longest = LongestBulkRow(args);
  // A lane stores each row, so bulk copies take tokens with at most kWarp rows.
  const bool suits = longest > 0 && args.shape.rows_per_token() <= kWarp;
  if (!suits || !device.copies_in_bulk) return {};
  constexpr int64_t kStep = 1024;  // bytes; FP8 is made of whole blocks
  const int64_t available = BulkBytes(args, device) - BytesBeforeStages(args);
  const int64_t room = available / WarpBytes(args, kStep) / kSpreadingWarps * kStep;
  const int64_t most = std::min(room, int64_t{kMaxStageBytes});
  if (most <= 0) return {};
  // Slices must not be so large that blocks have nothing to send.
  const int64_t share = args.shape.num_tokens / (num_senders * kMaxBulkWarps);
  const int64_t slice_tokens =
      std::clamp(std::min(most / longest, share), int64_t{1}, int64_t{MaxSliceTokens(args)});
  const int64_t stage = std::min(AlignUp(slice_tokens * longest, 128), most);
  const int num_warps =
      static_cast<int>(std::min(available / WarpBytes(args, stage), int64_t{kMaxBulkWarps}));
  return {num_warps, args.spreads ? std::min(num_warps, kSpreadingWarps) : num_warps, static_cast<int>(stage),
          NumBulkPayloads(args), static_cast<int>(slice_tokens)};
}

// Returns the number of slices of each warp in a batch. Blocks synchronize after a batch, so they send faster
// in larger batches, but those that get one more batch end later. With more than two ranks the links are
// slower than the blocks.
int SlicesPerWarp(const PushArgs& args, int num_senders) {
  constexpr int kFewestBatches = 16;  // of a block
  if (args.shape.num_ranks > 2) return 1;
  const int tokens = args.bulk.num_sending * args.bulk.slice_tokens;
  return std::clamp(args.shape.num_tokens / (num_senders * tokens * kFewestBatches), 1, kMaxSlicesPerWarp);
}

// The conversion that a push applies to rows.
struct PushVariant {
  bool quantizes;
  std::optional<Float> scaled;
};

// Calls f with the kernel and its number of threads per block.
template <typename F>
cudaError_t WithPushKernel(bool in_bulk, const PushVariant& variant, F&& f) {
  const auto with = [&](auto* null, auto quantizes) {
    using Scale = std::remove_pointer_t<decltype(null)>;
    constexpr bool kQuantizes = decltype(quantizes)::value;
    return f(in_bulk ? PushKernel<true, Scale, kQuantizes> : PushKernel<false, Scale, kQuantizes>,
             kPushThreads<Scale, kQuantizes>);
  };
  if (variant.quantizes) return with(static_cast<void*>(nullptr), std::true_type{});
  if (!variant.scaled) return with(static_cast<void*>(nullptr), std::false_type{});
  return WithType(*variant.scaled, [&](auto* null) { return with(null, std::false_type{}); });
}

SmPlan PlanOf(const PushArgs& args, const RowBytes& rows, const Device& device) {
  const PushWork work = args.quantize != Quantize::kNone ? PushWork::kQuantize
                        : args.row_weights != nullptr    ? PushWork::kScale
                                                         : PushWork::kMove;
  return PlanPush(args.shape, static_cast<double>(rows.sum), work, args.ring.teams > 0, CardOf(device));
}

// Plans how the blocks share the work. Fills in the arguments that depend on the device and the number of
// senders.
void PartitionBlocks(PushArgs& args, const Device& device, int num_senders) {
  const int T = args.shape.num_tokens;
  const bool local = args.is_local(), few = T <= kFewTokens;
  // Rows are scaled where they arrive, so a push that scales needs waves even if it has no rows to copy.
  args.spreads = !local && (args.shape.shares_rows() || (args.scales() && !args.shape.is_alone()));
  args.num_senders = args.scales_in_place() ? 0 : num_senders;
  // Few tokens form one wave. A push that does not spread needs no waves. Waves are equal on all ranks, also
  // on one that does not copy in bulk.
  const int slice = MaxSliceTokens(args);
  args.waves = args.spreads
                   ? PlanWaves(args.shape, few ? kFewTokens : kWave * slice, kWave * slice, kWaveStep * slice)
                   : Waves{T, std::max(T, 1), 1};
  // A warp sends one slice at a time. Few tokens are divided into one batch for each block.
  const auto plan_batches = [&] {
    args.bulk = PartitionForBulk(args, device, num_senders);
    int tokens = kBatch;
    if (args.bulk.num_warps > 0) {
      tokens = args.bulk.num_sending * args.bulk.slice_tokens * SlicesPerWarp(args, num_senders);
    }
    if (few) tokens = std::clamp((T + num_senders - 1) / num_senders, 1, kBatch);
    args.batches = Batches::Of(args.waves, tokens);
  };
  args.counts_in_kernel = !local && few && args.routes();
  plan_batches();
  // The blocks count only if all tokens fit in one batch each, and the scratch for that fits in shared
  // memory.
  const bool fits = BytesBeforeStages(args) <= device.shared_bytes - kStaticBytes;
  if (args.counts_in_kernel && (!fits || T > int64_t{num_senders} * args.batches.tokens)) {
    args.counts_in_kernel = false;
    plan_batches();
  }
}

cudaError_t LaunchPushKernel(const PushArgs& args, int num_blocks, std::optional<Float> scaled,
                             const Device& device, cudaStream_t stream) {
  const int64_t stages = args.bulk.num_warps * WarpBytes(args, args.bulk.stage_bytes);
  const int64_t shared = BytesBeforeStages(args) + std::max(stages, args.ring.bytes());
  const PushVariant variant{args.quantize != Quantize::kNone, scaled};
  const bool in_bulk = args.bulk.num_warps > 0;
  return WithPushKernel(in_bulk, variant, [&](auto* kernel, int num_threads) {
    // This must be the same for all shapes, because another thread may be about to launch the same kernel.
    const int max_bytes = in_bulk ? BulkBytes(args, device) : device.shared_bytes - kStaticBytes;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_bytes);
    if (error != cudaSuccess) return error;
    // A permute has no peers to wait for, so its blocks need not all run at the same time.
    return Launch(kernel, num_blocks, num_threads, shared, stream, !args.is_local(), args);
  });
}

}  // namespace

cudaError_t LaunchPush(const PushParams& params, const Peers& peers, const Device& device,
                       cudaStream_t stream, cudaEvent_t starting) {
  PushArgs args{params};
  args.peers = peers;
  std::copy_n(params.payloads.begin(), args.num_payloads, args.payloads);
  args.element_bytes = 1;
  if (args.quantize != Quantize::kNone)
    args.element_bytes = static_cast<int32_t>(BytesOf(args.quantized_type));
  args.sends_received_rows = params.routes() && params.shape.has_row_per_choice();
  RowBytes rows;
  for (int p = 0; p < args.num_payloads; ++p) rows.Add(args.payloads[p].row_bytes);
  std::optional<Float> scaled;
  if (params.scales()) {
    std::copy_n(params.factors.begin(), args.num_payloads, args.factors);
    scaled = params.factor_type;
    args.ring =
        PartitionForRings(args.shape, rows, BulkBytes(args, device) - BytesBeforeStages(args), true, device);
  }
  const SmPlan plan = PlanOf(args, rows, device);
  PartitionBlocks(args, device, plan.links);
  if (params.routes() && !args.counts_in_kernel) {
    const cudaError_t error = LaunchCount(params.shape, params.topk_idx, params.handle.topk_idx,
                                          params.handle.sent_rows, params.chunk_counts, stream);
    if (error != cudaSuccess) return error;
  }
  const cudaError_t error = RecordStart(starting, stream);
  return error == cudaSuccess ? LaunchPushKernel(args, plan.total(), scaled, device, stream) : error;
}

// A permute is a push on one device. The routed ids belong to the row map and are not needed afterwards, so
// they lie after the counts of the chunks.
cudaError_t LaunchPermute(const PermuteParams& params, const Device& device, cudaStream_t stream) {
  const cudaError_t error = LaunchCount(params.shape, params.topk_idx, params.routed_idx, params.row_map,
                                        params.chunk_counts, stream);
  if (error != cudaSuccess) return error;
  PushArgs args{};
  args.shape = params.shape;
  args.num_payloads = params.num_payloads;
  std::copy_n(params.payloads, args.num_payloads, args.payloads);
  args.topk_idx = params.topk_idx;
  args.topk_weights = params.topk_weights;
  args.handle = {params.routed_idx, params.row_map, nullptr, nullptr, nullptr};
  args.chunk_counts = params.chunk_counts;
  args.arrived_weights = params.row_weights;
  args.tokens_per_expert = params.tokens_per_expert;
  args.group_sizes = params.group_sizes;
  args.num_dropped = params.num_dropped;
  args.element_bytes = 1;
  // All SMs send. As many blocks clear after those have ended.
  PartitionBlocks(args, device, device.num_sms);
  return LaunchPushKernel(args, 2 * device.num_sms, std::nullopt, device, stream);
}

cudaError_t PreloadPush() {
  cudaFuncAttributes attributes;
  cudaError_t error = PreloadCount();
  for (const PushVariant& variant :
       {PushVariant{}, PushVariant{true, {}}, PushVariant{false, Float::kF16},
        PushVariant{false, Float::kBF16}, PushVariant{false, Float::kF32}, PushVariant{false, Float::kF64}}) {
    for (bool in_bulk : {false, true}) {
      if (error != cudaSuccess) return error;
      error = WithPushKernel(in_bulk, variant,
                             [&](auto* kernel, int) { return cudaFuncGetAttributes(&attributes, kernel); });
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
