// Handlers on GPUs: decode the operands as on the CPU, then launch.
#include <algorithm>

#include "core/balance.h"
#include "handlers/decode/balance.h"
#include "handlers/decode/layout.h"
#include "handlers/decode/permute.h"
#include "handlers/decode/pull.h"
#include "handlers/decode/push.h"
#include "handlers/gpu/handlers.h"
#include "handlers/gpu/launch.h"
#include "kernels/launch/launch.h"
#include "kernels/launches.h"
#include "kernels/protocol/arena.h"
#include "runtime/gpu/peers.h"
#include "runtime/switches.h"

namespace jax_ep {

static const char* FloatName(Float type) {
  static const char* const kNames[] = {"float16", "bfloat16", "float32", "float64"};
  return kNames[static_cast<int>(type)];
}

static ffi::Error CheckAtMost(const char* op, const char* what, int64_t value, int64_t most) {
  if (value <= most) return ffi::Error::Success();
  return InvalidArgument(op, ": on GPUs at most ", most, ' ', what, ", got ", value,
                         "; use implementation='xla'");
}

static ffi::Error CheckLimits(const char* op, const Shape& shape, size_t arrays) {
  // By rank a token may also have a choice for each rank, as when all ranks gather their counts.
  const int32_t one_for_each = shape.has_row_per_choice() ? 0 : shape.num_ranks;
  return FirstError(
      {CheckAtMost(op, "choices a token", shape.top_k, std::max(kMaxRowsPerToken, one_for_each)),
       CheckAtMost(op, "experts", shape.num_experts, kMaxBins - kMaxRanks),
       CheckAtMost(op, "arrays", arrays, kMaxPayloads)});
}

// Rejects active_ranks in an op that does not go through the arena, because only the arena supports them.
static ffi::Error RejectActiveRanks(const char* op, const Shape& shape, const Attendance& attendance) {
  if (attendance.active_ranks == nullptr) return ffi::Error::Success();
  return InvalidArgument(op, ": on GPUs active_ranks and on_timeout='mask' need few tokens: at most ",
                         kSlotTokens, " a rank, ", kSlotChoices, " choices, and, with ", shape.num_ranks,
                         " ranks, tokens * (bytes of a row + ", kSlotHeadBytes, ") of at most ",
                         SlotsOf(shape, 0).region, " bytes; the routing of all ranks takes ",
                         RoutingTableBytes(shape), " bytes, and may take at most ", kMaxRoutingTableBytes,
                         "; a combine takes one array of float16, bfloat16 or float32; and num_sms of the "
                         "Group is None, or 8 or more. Leave them out, or use implementation='xla'");
}

bool FitsArena(const Group& group, const Shape& shape, int64_t row_bytes) {
  const int budget = group.options().num_sms;
  return !NoArena() && (budget == 0 || budget >= kMinArenaSms) && FitsArena(shape, row_bytes);
}

// Returns whether a rank can find the row of a token of another rank: by expert from the handle, by rank
// since the rows of each source follow each other. Rows that ranks relay for other domains are ordered by
// their original senders, and placed rows in any way.
static bool FindsRowsOfSources(const Group& group, const Shape& shape) {
  return shape.has_row_per_choice() || (shape.order == Order::kRank && !group.relays_for_other_domains());
}

// By rank, a slot stands for the n-th row that came from a rank.
bool CombineFitsArena(const Group& group, const Shape& shape, int64_t row_bytes) {
  return FindsRowsOfSources(group, shape) && FitsArena(group, shape, row_bytes);
}

static bool GoesThroughArena(const Group& group, const PushParams& params) {
  int64_t row_bytes = 0;
  for (const Payload& payload : params.payloads) row_bytes += AlignUp(payload.row_bytes, 16);
  return params.routes() && FitsArena(group, params.shape, row_bytes);
}

static bool GoesThroughArena(const Group& group, const PullParams& params) {
  if (params.summands.size() != 1 || params.arrived_weights != nullptr) return false;
  const Summand& summand = params.summands[0];
  const int64_t row_bytes = params.quantize == Quantize::kNone ? summand.num_elements * BytesOf(summand.type)
                                                               : Fp8Bytes(summand.num_elements);
  return summand.type != Float::kF64 && CombineFitsArena(group, params.shape, AlignUp(row_bytes, 16));
}

cuda::Device ThisDevice(const Group* group, bool through_arena) {
  int budget = group == nullptr ? 0 : group->options().num_sms;
  // A later Group may have a smaller num_sms. The path stays, and the arena's kernels need their blocks.
  if (through_arena && budget != 0) budget = std::max(budget, kMinArenaSms);
  return cuda::DescribeDevice(PlainCopies(), NoArena(), budget);
}

// Fills a result with bits that no correct op leaves there. For stress tests.
static void Poison(void* data, int64_t bytes, cudaStream_t stream) {
  if (StressNanoseconds() == 0 || data == nullptr) return;
  (void)cudaMemsetAsync(data, 0xa5, static_cast<size_t>(bytes), stream);
}

static ffi::Error TryLaunch(const GpuContext& context, const char* op, const GroupMember& member,
                            const PushParams& params) {
  const Shape& shape = params.shape;
  const bool through_arena = context.site->FixPath(GoesThroughArena(*member.group, params));
  auto error =
      FirstError({CheckLimits(op, shape, params.payloads.size()),
                  through_arena ? ffi::Error::Success() : RejectActiveRanks(op, shape, params.attendance)});
  if (error.failure()) return error;
  OpDescription description{op, [&] {
                              std::string text = Text(op, " by ", Describe(shape));
                              for (const Payload& payload : params.payloads) {
                                text += Text(", rows of ", payload.row_bytes, " bytes (",
                                             DtypeName(static_cast<ffi::DataType>(payload.dtype)), ")");
                              }
                              text += params.scales() ? ", scaled" : "";
                              text += through_arena ? ", through the arena" : "";
                              text += params.quantize == Quantize::kNone ? "" : ", as FP8";
                              text += params.quantize == Quantize::kFp8Rounded ? ", scales rounded" : "";
                              text += params.attendance.masks ? ", without those that are late" : "";
                              return text + (params.topk_weights == nullptr ? "" : ", with weights");
                            }};
  description.through_arena = through_arena;
  description.may_miss_ranks = params.attendance.active_ranks != nullptr;
  if (!through_arena) {
    description.published = {params.arrived_weights};
    if (params.routes()) {
      const bool maps = shape.has_row_per_choice();
      description.published.push_back(maps ? params.handle.received_rows : params.arrived_idx);
    }
    for (const Payload& payload : params.payloads) description.published.push_back(payload.out);
  }
  return LaunchCollective(context, member, description, [&](const Peers& peers) {
    for (const Payload& payload : params.payloads) {
      Poison(payload.out, shape.capacity * payload.row_bytes, context.stream);
    }
    const int64_t num_weights = int64_t{shape.capacity} * shape.weights_per_row();
    Poison(params.arrived_weights, num_weights * sizeof(float), context.stream);
    const cuda::Device device = ThisDevice(member.group.get(), through_arena);
    if (!through_arena) return cuda::LaunchPush(params, peers, device, context.stream, context.starting);
    const cudaError_t error = cuda::RecordStart(context.starting, context.stream);
    return error == cudaSuccess ? cuda::LaunchFewTokensPush(params, peers, device, context.stream) : error;
  });
}

static ffi::Error TryLaunch(const GpuContext& context, const char* op, const GroupMember& member,
                            PullParams& params) {
  const Shape& shape = params.shape;
  const bool through_arena = context.site->FixPath(GoesThroughArena(*member.group, params));
  auto error =
      FirstError({CheckLimits(op, shape, params.summands.size()),
                  CheckAtMost(op, "biases", params.biases.size(), kMaxBiases),
                  through_arena ? ffi::Error::Success() : RejectActiveRanks(op, shape, params.attendance)});
  if (error.failure()) return error;
  const bool quantizes = params.quantize != Quantize::kNone;
  if (quantizes && !FindsRowsOfSources(*member.group, shape)) {
    return InvalidArgument(op,
                           ": sums of rows that are not in the order of their sources cannot be quantized");
  }
  params.folds = quantizes || shape.shares_rows();
  for (const Summand& summand : params.summands) {
    if (params.folds && summand.partial == nullptr && summand.num_elements > 0) {
      return InvalidArgument(op, ": the kernels need scratch for partial sums");
    }
  }
  OpDescription description{op, [&] {
                              std::string text = Text(op, " by ", Describe(shape));
                              for (const Summand& summand : params.summands) {
                                text +=
                                    Text(", rows of ", summand.num_elements, " x ", FloatName(summand.type));
                              }
                              text += params.row_weights == nullptr ? "" : ", weighted";
                              text += through_arena ? ", through the arena" : "";
                              text += params.quantize == Quantize::kNone ? "" : ", as FP8";
                              text += params.quantize == Quantize::kFp8Rounded ? ", scales rounded" : "";
                              text += params.attendance.masks ? ", without those that are late" : "";
                              return text + (params.arrived_weights == nullptr ? "" : ", weights back");
                            }};
  description.through_arena = through_arena;
  description.may_miss_ranks = params.attendance.active_ranks != nullptr;
  if (!through_arena) {
    description.published = {params.row_weights, params.arrived_weights};
    for (const Summand& summand : params.summands) {
      description.published.push_back(summand.rows);
      description.published.push_back(summand.partial);
    }
  }
  return LaunchCollective(context, member, description, [&](const Peers& peers) {
    for (const Summand& summand : params.summands) {
      const int64_t bytes = summand.num_elements * BytesOf(summand.type);
      const bool adds_in_place = !params.biases.empty() && params.biases[0].data == summand.out;
      if (!adds_in_place) Poison(summand.out, shape.num_tokens * bytes, context.stream);
      Poison(summand.partial, PartialBytes(params, summand), context.stream);
    }
    const cudaError_t error = cuda::RecordStart(context.starting, context.stream);
    if (error != cudaSuccess) return error;
    const auto launch = through_arena ? cuda::LaunchFewTokensPull
                        : quantizes   ? cuda::LaunchPullFp8
                                      : cuda::LaunchPull;
    return launch(params, peers, ThisDevice(member.group.get(), through_arena), context.stream);
  });
}

ffi::Error RunPush(const GpuContext& context, const char* op, GroupMember member, PushParams params) {
  auto error = TryLaunch(context, op, member, params);
  if (error.failure()) context.site->ReleasePath();
  return error;
}

ffi::Error RunPull(const GpuContext& context, const char* op, GroupMember member, PullParams params) {
  auto error = TryLaunch(context, op, member, params);
  if (error.failure()) context.site->ReleasePath();
  return error;
}

static ffi::Error RunLayout(const GpuLocalContext& context, const LayoutParams& params) {
  auto error = FirstError({CheckAtMost("layout", "ranks", params.shape.num_ranks, cuda::kMaxLayoutRanks),
                           CheckAtMost("layout", "choices a token", params.shape.top_k, kMaxRowsPerToken),
                           CheckLimits("layout", params.shape, 0)});
  if (error.failure()) return error;
  return LaunchResult("layout", cuda::LaunchLayout(params, ThisDevice(nullptr), context.stream));
}

static ffi::Error RunBalance(const GpuLocalContext& context, const BalanceParams& params) {
  const cuda::Device device = ThisDevice(nullptr);
  auto error = CheckAtMost("balance", "bytes of shared memory for the placement", BalanceStateBytes(params),
                           device.shared_bytes);
  if (error.failure()) return error;
  return LaunchResult("balance", cuda::LaunchBalance(params, device, context.stream));
}

static ffi::Error RunPermute(const GpuLocalContext& context, const PermuteParams& params) {
  auto error = CheckLimits("permute", params.shape, params.num_payloads);
  if (error.failure()) return error;
  return LaunchResult("permute", cuda::LaunchPermute(params, ThisDevice(nullptr), context.stream));
}

static ffi::Error RunRepermute(const GpuLocalContext& context, const RepermuteParams& params) {
  auto error = CheckAtMost("repermute", "choices a row", params.top_k, kMaxRowsPerToken);
  if (error.failure()) return error;
  return LaunchResult("repermute", cuda::LaunchRepermute(params, ThisDevice(nullptr), context.stream));
}

static ffi::Error RunUnpermute(const GpuLocalContext& context, const UnpermuteParams& params) {
  auto error = CheckAtMost("unpermute", "choices a row", params.top_k, kMaxRowsPerToken);
  if (error.failure()) return error;
  return LaunchResult("unpermute", cuda::LaunchUnpermute(params, ThisDevice(nullptr), context.stream));
}

static ffi::ErrorOr<std::unique_ptr<GpuCallSite>> InstantiateGpu(ffi::Dictionary attributes) {
  const auto program = attributes.get<std::string_view>("program");
  if (program.has_error()) return ffi::Unexpected(program.error());
  return std::make_unique<GpuCallSite>(*program);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuInstantiate, InstantiateGpu, ffi::Ffi::BindInstantiate().Attrs());

// Runs before every execution of a program, also if its ops are replayed from a CUDA graph and no handler is
// called. So an op that failed stops the next execution.
static ffi::Error InitializeGpu(GpuCallSite* site, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return site->CheckPeers();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    GpuInitialize, InitializeGpu,
    ffi::Ffi::BindInitialize().Ctx<ffi::State<GpuCallSite>>().RemainingArgs().RemainingRets().Attrs());

// A launch depends only on the addresses of its operands, because epochs and the peers' addresses are read on
// the device. So it may be recorded in a CUDA graph.
XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuRouteHandler, RouteArrays<GpuContext>,
                              BindArrays<RoutingAttributes>(ffi::Ffi::Bind().Ctx<GpuContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuPushHandler, PushArrays<GpuContext>,
                              BindArrays<RoutingAttributes>(ffi::Ffi::Bind().Ctx<GpuContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuPullHandler, PullArrays<GpuContext>,
                              BindArrays<RoutingAttributes>(ffi::Ffi::Bind().Ctx<GpuContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuLayoutHandler, Layout<GpuLocalContext>,
                              BindLayout(ffi::Ffi::Bind().Ctx<GpuLocalContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuBalanceHandler, Balance<GpuLocalContext>,
                              BindBalance(ffi::Ffi::Bind().Ctx<GpuLocalContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuPermuteHandler, Permute<GpuLocalContext>,
                              BindArrays<PermuteAttributes>(ffi::Ffi::Bind().Ctx<GpuLocalContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuRepermuteHandler, Repermute<GpuLocalContext>,
                              BindRepermute(ffi::Ffi::Bind().Ctx<GpuLocalContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuUnpermuteHandler, Unpermute<GpuLocalContext>,
                              BindUnpermute(ffi::Ffi::Bind().Ctx<GpuLocalContext>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
