// The handlers on GPUs: operands as on the CPU, then a launch.
#include <algorithm>

#include "handlers/decode/layout.h"
#include "handlers/decode/permute.h"
#include "handlers/decode/pull.h"
#include "handlers/decode/push.h"
#include "handlers/gpu/handlers.h"
#include "handlers/gpu/launch.h"
#include "kernels/kernels.h"
#include "kernels/protocol/arena.h"
#include "runtime/gpu/peers.h"
#include "runtime/switches.h"

namespace jax_ep {

static const char* NameOf(Float type) {
  static const char* const kNames[] = {"float16", "bfloat16", "float32", "float64"};
  return kNames[static_cast<int>(type)];
}

static ffi::Error AtMost(const char* op, const char* what, int64_t value, int64_t most) {
  if (value <= most) return ffi::Error::Success();
  return InvalidArgument(op, ": on GPUs at most ", most, ' ', what, ", got ", value,
                         "; use implementation='xla'");
}

static ffi::Error CheckLimits(const char* op, const Shape& shape, size_t arrays) {
  return FirstError({AtMost(op, "choices a token", shape.top_k, kMaxRowsPerToken),
                     AtMost(op, "experts", shape.num_experts, kMaxBins - kMaxRanks),
                     AtMost(op, "arrays", arrays, kMaxPayloads)});
}

// Of ops of many tokens, which cannot do what only the arena makes possible.
static ffi::Error NeedsArena(const char* op, const Attendance& attendance) {
  if (attendance.active_ranks == nullptr) return ffi::Error::Success();
  return InvalidArgument(
      op, ": on GPUs active_ranks and on_timeout='mask' need few tokens: at most ", kSlotTokens, " a rank, ",
      kSlotChoices, " choices, and ranks * tokens * (bytes of a row + ", kSlotHeadBytes, ") * 2 below about ",
      kArenaBytes >> 20, " MiB, and 2 bytes for each of all ranks' choices and 16 for each expert below ",
      kMostRouteBytes >> 10,
      " KiB; a combine takes one array of float16, bfloat16 or float32; and num_sms of the "
      "Group is None, or 8 or more. Leave them out, or use implementation='xla'");
}

bool FitsArena(const Group& group, const Shape& shape, int64_t row_bytes) {
  const int budget = group.options().num_sms;
  return !NoArena() && (budget == 0 || budget >= kLeastArenaSms) && FitsArena(shape, row_bytes);
}

// By rank, a slot stands for the n-th row that came from a rank. Rows that ranks hand on from other hosts lie
// in the order of those who sent them first, so that a slot could not be told from its row.
bool CombineFitsArena(const Group& group, const Shape& shape, int64_t row_bytes) {
  return (shape.has_row_per_choice() || !group.hands_on()) && FitsArena(group, shape, row_bytes);
}

static bool GoesThroughArena(const Group& group, const PushCall& call) {
  int64_t row_bytes = 0;
  for (const Payload& payload : call.payloads) row_bytes += AlignUp(payload.row_bytes, 16);
  return call.params.routes() && FitsArena(group, call.params.shape, row_bytes);
}

static bool GoesThroughArena(const Group& group, const PullCall& call) {
  if (call.summands.size() != 1 || call.params.arrived_weights != nullptr) return false;
  const Summand& summand = call.summands[0];
  const int64_t row_bytes = AlignUp(summand.num_elements * BytesOf(summand.type), 16);
  return summand.type != Float::kF64 && CombineFitsArena(group, call.params.shape, row_bytes);
}

cuda::Device ThisDevice(const Group* group, bool through_arena) {
  int budget = group == nullptr ? 0 : group->options().num_sms;
  // The path stays when a later Group has a smaller num_sms, and the arena's kernels need their blocks.
  if (through_arena && budget != 0) budget = std::max(budget, kLeastArenaSms);
  return cuda::DescribeDevice(PlainCopies(), NoArena(), budget);
}

// Fills a result with bits that no right op leaves there. For stress tests.
static void Poison(void* data, int64_t bytes, cudaStream_t stream) {
  if (StressNanoseconds() == 0 || data == nullptr) return;
  (void)cudaMemsetAsync(data, 0xa5, static_cast<size_t>(bytes), stream);
}

static ffi::Error TryLaunch(const CudaContext& context, const char* op, const Seat& seat,
                            const PushCall& call) {
  const PushParams& params = call.params;
  const Shape& shape = params.shape;
  const bool through_arena = context.site->FixPath(GoesThroughArena(*seat.group, call));
  auto error = FirstError({CheckLimits(op, shape, call.payloads.size()),
                           through_arena ? ffi::Error::Success() : NeedsArena(op, params.attendance)});
  if (error.failure()) return error;
  Announcement announced{op, [&] {
                           std::string what = Text(op, " by ", Describe(shape));
                           for (const Payload& payload : call.payloads) {
                             what += Text(", rows of ", payload.row_bytes, " bytes (",
                                          DtypeName(static_cast<ffi::DataType>(payload.dtype)), ")");
                           }
                           what += params.scales() ? ", scaled" : "";
                           what += through_arena ? ", through the arena" : "";
                           what += params.quantize == Quantize::kNone ? "" : ", as FP8";
                           what += params.quantize == Quantize::kFp8Rounded ? ", scales rounded" : "";
                           what += params.attendance.masks ? ", without those that are late" : "";
                           return what + (params.topk_weights == nullptr ? "" : ", with weights");
                         }};
  announced.through_arena = through_arena;
  announced.may_miss_ranks = params.attendance.active_ranks != nullptr;
  if (!through_arena) {
    announced.published = {params.arrived_weights};
    if (params.routes()) {
      const bool maps = shape.has_row_per_choice();
      announced.published.push_back(maps ? params.handle.received_rows : params.arrived_idx);
    }
    for (const Payload& payload : call.payloads) announced.published.push_back(payload.out);
  }
  return LaunchTogether(context, seat, announced, [&](const Peers& peers) {
    for (const Payload& payload : call.payloads) {
      Poison(payload.out, shape.capacity * payload.row_bytes, context.stream);
    }
    const int64_t num_weights = int64_t{shape.capacity} * shape.weights_per_row();
    Poison(params.arrived_weights, num_weights * sizeof(float), context.stream);
    const auto launch = through_arena ? cuda::LaunchSlotPush : cuda::LaunchPush;
    return launch(params, peers, ThisDevice(seat.group.get(), through_arena), context.stream);
  });
}

static ffi::Error TryLaunch(const CudaContext& context, const char* op, const Seat& seat, PullCall& call) {
  PullParams& params = call.params;
  const Shape& shape = params.shape;
  const bool through_arena = context.site->FixPath(GoesThroughArena(*seat.group, call));
  auto error = FirstError({CheckLimits(op, shape, call.summands.size()),
                           AtMost(op, "biases", call.biases.size(), kMaxBiases),
                           through_arena ? ffi::Error::Success() : NeedsArena(op, params.attendance)});
  if (error.failure()) return error;
  params.folds = shape.folds();
  for (const Summand& summand : call.summands) {
    if (params.folds && summand.partial == nullptr && summand.num_elements > 0) {
      return InvalidArgument(op, ": by expert the kernels need room for partial sums");
    }
  }
  Announcement announced{op, [&] {
                           std::string what = Text(op, " by ", Describe(shape));
                           for (const Summand& summand : call.summands) {
                             what += Text(", rows of ", summand.num_elements, " x ", NameOf(summand.type));
                           }
                           what += params.row_weights == nullptr ? "" : ", weighted";
                           what += through_arena ? ", through the arena" : "";
                           what += params.attendance.masks ? ", without those that are late" : "";
                           return what + (params.arrived_weights == nullptr ? "" : ", weights back");
                         }};
  announced.through_arena = through_arena;
  announced.may_miss_ranks = params.attendance.active_ranks != nullptr;
  if (!through_arena) {
    announced.published = {params.row_weights, params.arrived_weights};
    for (const Summand& summand : call.summands) {
      announced.published.push_back(summand.rows);
      announced.published.push_back(summand.partial);
    }
  }
  return LaunchTogether(context, seat, announced, [&](const Peers& peers) {
    for (const Summand& summand : call.summands) {
      const int64_t bytes = summand.num_elements * BytesOf(summand.type);
      Poison(summand.out, shape.num_tokens * bytes, context.stream);
      Poison(summand.partial, int64_t{shape.num_ranks} * shape.num_tokens * bytes, context.stream);
    }
    const auto launch = through_arena ? cuda::LaunchSlotPull : cuda::LaunchPull;
    return launch(params, peers, ThisDevice(seat.group.get(), through_arena), context.stream);
  });
}

// Launches a push or a pull. `call` is a PushCall or a PullCall.
template <typename OpCall>
static ffi::Error Run(const CudaContext& context, const char* op, Seat seat, OpCall call) {
  auto error = TryLaunch(context, op, seat, call);
  if (error.failure()) context.site->ReleasePath();
  return error;
}

static ffi::Error Run(const CudaLocalContext& context, const LayoutParams& params) {
  auto error = FirstError({AtMost("layout", "ranks", params.shape.num_ranks, cuda::kMaxLayoutRanks),
                           CheckLimits("layout", params.shape, 0)});
  if (error.failure()) return error;
  return Launched("layout", cuda::LaunchLayout(params, ThisDevice(nullptr), context.stream));
}

static ffi::Error Run(const CudaLocalContext& context, const PermuteParams& params) {
  auto error = CheckLimits("permute", params.shape, params.num_payloads);
  if (error.failure()) return error;
  return Launched("permute", cuda::LaunchPermute(params, ThisDevice(nullptr), context.stream));
}

static ffi::Error Run(const CudaLocalContext& context, const RepermuteParams& params) {
  auto error = AtMost("repermute", "choices a row", params.top_k, kMaxRowsPerToken);
  if (error.failure()) return error;
  return Launched("repermute", cuda::LaunchRepermute(params, ThisDevice(nullptr), context.stream));
}

static ffi::Error Run(const CudaLocalContext& context, const UnpermuteParams& params) {
  auto error = AtMost("unpermute", "choices a row", params.top_k, kMaxRowsPerToken);
  if (error.failure()) return error;
  return Launched("unpermute", cuda::LaunchUnpermute(params, ThisDevice(nullptr), context.stream));
}

static ffi::ErrorOr<std::unique_ptr<CudaCallSite>> InstantiateCuda() {
  return std::make_unique<CudaCallSite>();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaInstantiate, InstantiateCuda, ffi::Ffi::BindInstantiate());

// Runs before every execution of a program, also where its ops are replayed from a CUDA graph and no handler
// is called: an op that failed stops the next execution.
static ffi::Error InitializeCuda(CudaCallSite* site, ffi::RemainingArgs, ffi::RemainingRets,
                                 ffi::Dictionary) {
  const DevicePeers* peers = site->peers();
  if (peers == nullptr) return ffi::Error::Success();
  const std::string text = peers->DescribeFailure();
  return text.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kDeadlineExceeded, text);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaInitialize, InitializeCuda,
    ffi::Ffi::BindInitialize().Ctx<ffi::State<CudaCallSite>>().RemainingArgs().RemainingRets().Attrs());

// A launch depends on nothing but its operands' addresses, so it may be recorded in a CUDA graph: epochs and
// the peers' addresses are read on the device.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaRouteHandler, Route<CudaContext>,
                              BindArrays<RoutingAttributes>(ffi::Ffi::Bind().Ctx<CudaContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaPushHandler, Push<CudaContext>,
                              BindArrays<RoutingAttributes>(ffi::Ffi::Bind().Ctx<CudaContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaPullHandler, Pull<CudaContext>,
                              BindArrays<RoutingAttributes>(ffi::Ffi::Bind().Ctx<CudaContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaLayoutHandler, Layout<CudaLocalContext>,
                              BindLayout(ffi::Ffi::Bind().Ctx<CudaLocalContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaPermuteHandler, Permute<CudaLocalContext>,
                              BindArrays<PermuteAttributes>(ffi::Ffi::Bind().Ctx<CudaLocalContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaRepermuteHandler, Repermute<CudaLocalContext>,
                              BindRepermute(ffi::Ffi::Bind().Ctx<CudaLocalContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaUnpermuteHandler, Unpermute<CudaLocalContext>,
                              BindUnpermute(ffi::Ffi::Bind().Ctx<CudaLocalContext>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
