// Launches of the push kernel.
#include <algorithm>
#include <optional>

#include "kernels/kernels.h"
#include "kernels/launch/launch.h"
#include "kernels/launch/plan.h"
#include "kernels/push/kernel.cuh"
#include "kernels/push/local.h"

namespace jax_ep::cuda {
namespace {

// Dynamic shared memory of a block: the counts, then the stages. A push that scales also has more static
// shared memory.
constexpr int kBulkBytes = 216 * 1024;
constexpr int kScaleBytes = 203 * 1024;
constexpr int kStaticBytes = 8 * 1024;  // at most, for a push that does not copy in bulk
constexpr int kMaxStageBytes = 16 * 1024;
constexpr int kBatch = 32;    // tokens, if sent by loads and stores
constexpr int kWave = 128;    // tokens that are spread at a time
constexpr int kWaveStep = 6;  // tokens; waves are multiples of the usual batch of bulk copies
// By expert, the receiver waits for each wave. Fewer warps that send keep the queue in front of the links
// short, and so the delay of a wave.
constexpr int kSpreadingWarps = 6;

int BulkBytes(const PushArgs& args) { return args.row_weights != nullptr ? kScaleBytes : kBulkBytes; }

// Returns the shared memory of a warp that copies in bulk: two stages, and, if rows become FP8, the scales of
// one.
int64_t WarpBytes(const PushArgs& args, int64_t stage_bytes) {
  const bool quantizes = args.quantize != Quantize::kNone;
  const int64_t blocks = stage_bytes / args.element_bytes / kFp8Block;
  return 2 * stage_bytes + (quantizes ? blocks * static_cast<int64_t>(sizeof(float)) : 0);
}

// Plans bulk copies with as many warps as shared memory allows.
BulkPlan PlanBulk(const PushArgs& args, const Device& device) {
  int64_t longest = 0;
  const int num_payloads = args.quantize == Quantize::kNone ? args.num_payloads : 1;  // not the scales
  for (int p = 0; p < num_payloads; ++p) {
    if (IsBulkRow(args.payloads[p].row_bytes))
      longest = std::max(longest, args.payloads[p].row_bytes * args.element_bytes);
  }
  if (longest == 0 || !device.copies_in_bulk) return {};
  const int64_t stage = std::min(AlignUp(longest, 128), int64_t{kMaxStageBytes});
  const int64_t available = BulkBytes(args) - BytesBeforeStages(args);
  const int num_warps =
      static_cast<int>(std::min(available / WarpBytes(args, stage), int64_t{kMaxBulkWarps}));
  return {num_warps, args.spreads ? std::min(num_warps, kSpreadingWarps) : num_warps, static_cast<int>(stage),
          num_payloads};
}

// The conversion that a push applies to rows.
struct PushVariant {
  bool quantizes;
  std::optional<Float> scaled;
};

// Calls f with the kernel and its number of threads per block.
template <typename F>
cudaError_t WithKernel(bool in_bulk, const PushVariant& variant, F&& f) {
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
  return PlanPush(args.shape, static_cast<double>(rows.sum), work, args.ring.teams > 0, device.num_sms,
                  device.sm_budget);
}

// Plans how the blocks share the work. Fills in the arguments that depend on the device and the number of
// senders.
void PartitionBlocks(PushArgs& args, const Device& device, int num_senders) {
  const int T = args.shape.num_tokens;
  const bool local = args.is_local(), few = T <= kFewTokens;
  args.spreads = !local && args.shape.has_row_per_choice();
  args.num_senders = num_senders;
  // Few tokens form one wave. A push that does not spread needs no waves.
  args.waves = args.spreads ? PlanWaves(args.shape, few ? kFewTokens : kWave, kWave, kWaveStep)
                            : Waves{T, std::max(T, 1), 1};
  // A warp sends one token at a time. Few tokens are divided into one batch for each block.
  const auto plan_batches = [&] {
    args.bulk = PlanBulk(args, device);
    int tokens = args.bulk.num_warps > 0 ? args.bulk.num_sending : kBatch;
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

cudaError_t LaunchKernel(const PushArgs& args, int num_blocks, std::optional<Float> scaled,
                         const Device& device, cudaStream_t stream) {
  const int64_t stages = args.bulk.num_warps * WarpBytes(args, args.bulk.stage_bytes);
  const int64_t shared = BytesBeforeStages(args) + std::max(stages, args.ring.bytes());
  const PushVariant variant{args.quantize != Quantize::kNone, scaled};
  const bool in_bulk = args.bulk.num_warps > 0;
  return WithKernel(in_bulk, variant, [&](auto* kernel, int num_threads) {
    // This must be the same for all shapes, because another thread may be about to launch the same kernel.
    const int max_bytes = in_bulk ? BulkBytes(args) : device.shared_bytes - kStaticBytes;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_bytes);
    if (error != cudaSuccess) return error;
    // A permute has no peers to wait for, so its blocks need not all run at the same time.
    return Launch(kernel, num_blocks, num_threads, shared, stream, !args.is_local(), args);
  });
}

}  // namespace

cudaError_t LaunchPush(const PushParams& params, const Peers& peers, const Device& device,
                       cudaStream_t stream) {
  PushArgs args{params};
  args.peers = peers;
  std::copy_n(params.payloads, args.num_payloads, args.payloads);
  args.element_bytes = 1;
  if (args.quantize != Quantize::kNone)
    args.element_bytes = static_cast<int32_t>(BytesOf(args.quantized_type));
  args.sends_received_rows = params.routes() && params.shape.has_row_per_choice();
  RowBytes rows;
  for (int p = 0; p < args.num_payloads; ++p) rows.Add(args.payloads[p].row_bytes);
  std::optional<Float> scaled;
  if (params.scales()) {
    std::copy_n(params.factors, args.num_payloads, args.factors);
    scaled = params.factor_type;
    args.ring = PlanRings(args.shape, rows, BulkBytes(args) - BytesBeforeStages(args), device);
  }
  const SmPlan plan = PlanOf(args, rows, device);
  PartitionBlocks(args, device, plan.links);
  if (params.routes() && !args.counts_in_kernel) {
    const cudaError_t error = LaunchCount(params.shape, params.topk_idx, params.handle.topk_idx,
                                          params.handle.sent_rows, params.chunk_counts, stream);
    if (error != cudaSuccess) return error;
  }
  return LaunchKernel(args, plan.total(), scaled, device, stream);
}

cudaError_t LaunchLocalPush(PushArgs& args, const Device& device, cudaStream_t stream) {
  args.element_bytes = 1;
  // All SMs send. As many blocks clear after those have ended.
  PartitionBlocks(args, device, device.num_sms);
  return LaunchKernel(args, 2 * device.num_sms, std::nullopt, device, stream);
}

cudaError_t PreloadPush() {
  cudaFuncAttributes attributes;
  cudaError_t error = PreloadCount();
  for (const PushVariant& variant :
       {PushVariant{}, PushVariant{true, {}}, PushVariant{false, Float::kF16},
        PushVariant{false, Float::kBF16}, PushVariant{false, Float::kF32}, PushVariant{false, Float::kF64}}) {
    for (bool in_bulk : {false, true}) {
      if (error != cudaSuccess) return error;
      error = WithKernel(in_bulk, variant,
                         [&](auto* kernel, int) { return cudaFuncGetAttributes(&attributes, kernel); });
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
