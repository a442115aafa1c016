// The handlers on GPUs: operands as on the CPU, then a launch.
#include "handlers/cuda.h"

#include "handlers/combine.h"
#include "handlers/cuda_handlers.h"
#include "handlers/dispatch.h"
#include "handlers/layout.h"
#include "handlers/permute.h"
#include "kernels/kernels.h"
#include "runtime/peers.h"
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

static ffi::Error CheckShape(const char* op, const Shape& shape, size_t arrays) {
  return FirstError({AtMost(op, "choices a token", shape.top_k, kMaxRowsPerToken),
                     AtMost(op, "experts", shape.num_experts, kMaxBins - kMaxRanks),
                     AtMost(op, "arrays", arrays, kMaxPayloads)});
}

cuda::Device ThisDevice(const Group* group) {
  return cuda::DescribeDevice(PlainCopies(), group == nullptr ? 0 : group->options().num_sms);
}

// Fills a result with bits that no right op leaves there. For stress tests.
static void Poison(void* data, int64_t bytes, cudaStream_t stream) {
  if (StressNanoseconds() == 0 || data == nullptr) return;
  (void)cudaMemsetAsync(data, 0xa5, static_cast<size_t>(bytes), stream);
}

template <typename Params, typename Launch>
static ffi::Error RunPush(const char* op, const CudaContext& context, const Seat& seat, Params params,
                          const std::vector<Payload>& payloads, const void* routing, Launch launch) {
  const Shape& shape = params.shape;
  if (auto error = CheckShape(op, shape, payloads.size()); error.failure()) return error;
  Meeting meeting{op,
                  [&] {
                    std::string what = Text(op, " by ", Describe(shape));
                    for (const Payload& payload : payloads) {
                      what += Text(", rows of ", payload.row_bytes, " bytes (",
                                   DtypeName(static_cast<ffi::DataType>(payload.dtype)), ")");
                    }
                    return what + (params.topk_weights == nullptr ? "" : ", with weights");
                  },
                  {params.recv_topk_weights, routing}};
  for (const Payload& payload : payloads) meeting.published.push_back(payload.out);
  params.payloads = payloads.data();
  params.num_payloads = static_cast<int32_t>(payloads.size());
  return LaunchTogether(context, seat, meeting, [&](const Peers& peers) {
    for (const Payload& payload : payloads) {
      Poison(payload.out, shape.capacity * payload.row_bytes, context.stream);
    }
    const int64_t weights = shape.order == Order::kRank ? shape.top_k : 1;
    Poison(params.recv_topk_weights, shape.capacity * weights * sizeof(float), context.stream);
    return launch(params, peers, ThisDevice(seat.group.get()), context.stream);
  });
}

static ffi::Error Run(const CudaContext& context, Seat seat, const DispatchParams& params,
                      std::vector<Payload> payloads) {
  const int32_t* routing = params.shape.order == Order::kRank ? params.recv_topk_idx : params.handle.row_map;
  return RunPush("dispatch", context, seat, params, payloads, routing, cuda::LaunchDispatch);
}

static ffi::Error Run(const CudaContext& context, Seat seat, CachedDispatchParams params,
                      std::vector<Payload> payloads, Factors factors) {
  params.factors = factors.rows.data();
  params.factor_type = factors.type;
  const char* op = params.row_weights == nullptr ? "dispatch (cached)" : "dispatch (weighted)";
  return RunPush(op, context, seat, params, payloads, nullptr, cuda::LaunchCachedDispatch);
}

static ffi::Error Run(const CudaContext& context, Seat seat, CombineParams params, Sums sums) {
  const char* op = "combine";
  const Shape& shape = params.shape;
  auto error =
      FirstError({CheckShape(op, shape, sums.summands.size()), AtMost(op, "biases", sums.biases.size(), 8)});
  if (error.failure()) return error;
  params.folds = shape.order == Order::kExpert && shape.top_k > 1;
  for (const Summand& summand : sums.summands) {
    if (params.folds && summand.partial == nullptr && summand.num_elements > 0) {
      return InvalidArgument(op, ": by expert the kernels need room for partial sums");
    }
  }
  Meeting meeting{op,
                  [&] {
                    std::string what = Text(op, " by ", Describe(shape));
                    for (const Summand& summand : sums.summands) {
                      what += Text(", rows of ", summand.num_elements, " x ", NameOf(summand.type));
                    }
                    what += params.row_weights == nullptr ? "" : ", weighted";
                    return what + (params.recv_topk_weights == nullptr ? "" : ", weights back");
                  },
                  {params.row_weights, params.recv_topk_weights}};
  for (const Summand& summand : sums.summands) {
    meeting.published.push_back(summand.rows);
    meeting.published.push_back(summand.partial);
  }
  params.summands = sums.summands.data();
  params.num_summands = static_cast<int32_t>(sums.summands.size());
  params.biases = sums.biases.data();
  params.num_biases = static_cast<int32_t>(sums.biases.size());
  return LaunchTogether(context, seat, meeting, [&](const Peers& peers) {
    for (const Summand& summand : sums.summands) {
      const int64_t bytes = summand.num_elements * BytesOf(summand.type);
      Poison(summand.out, shape.num_tokens * bytes, context.stream);
      Poison(summand.partial, int64_t{shape.num_ranks} * shape.num_tokens * bytes, context.stream);
    }
    return cuda::LaunchCombine(params, peers, ThisDevice(seat.group.get()), context.stream);
  });
}

static ffi::Error Run(const CudaLocalContext& context, const LayoutParams& params) {
  auto error = FirstError({AtMost("layout", "ranks", params.shape.num_ranks, cuda::kMaxLayoutRanks),
                           CheckShape("layout", params.shape, 0)});
  if (error.failure()) return error;
  return Launched("layout", cuda::LaunchLayout(params, ThisDevice(nullptr), context.stream));
}

static ffi::Error Run(const CudaLocalContext& context, const PermuteParams& params) {
  auto error = CheckShape("permute", params.shape, params.num_payloads);
  if (error.failure()) return error;
  return Launched("permute", cuda::LaunchPermute(params, ThisDevice(nullptr), context.stream));
}

static ffi::Error Run(const CudaLocalContext& context, const CachedPermuteParams& params) {
  return Launched("permute (cached)", cuda::LaunchCachedPermute(params, ThisDevice(nullptr), context.stream));
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
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaDispatchHandler, Dispatch<CudaContext>,
                              BindDispatch(ffi::Ffi::Bind().Ctx<CudaContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCachedDispatchHandler, CachedDispatch<CudaContext>,
                              BindCachedDispatch(ffi::Ffi::Bind().Ctx<CudaContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaWeightedDispatchHandler, WeightedDispatch<CudaContext>,
                              BindWeightedDispatch(ffi::Ffi::Bind().Ctx<CudaContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCombineHandler, Combine<CudaContext>,
                              BindCombine(ffi::Ffi::Bind().Ctx<CudaContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaLayoutHandler, Layout<CudaLocalContext>,
                              BindLayout(ffi::Ffi::Bind().Ctx<CudaLocalContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaPermuteHandler, Permute<CudaLocalContext>,
                              BindPermute(ffi::Ffi::Bind().Ctx<CudaLocalContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCachedPermuteHandler, CachedPermute<CudaLocalContext>,
                              BindCachedPermute(ffi::Ffi::Bind().Ctx<CudaLocalContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaUnpermuteHandler, Unpermute<CudaLocalContext>,
                              BindUnpermute(ffi::Ffi::Bind().Ctx<CudaLocalContext>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
