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

ffi::TypeId CudaCallSite::id = {};

ffi::Error Launched(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(op) + ": the launch failed: " + cudaGetErrorString(error));
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

ffi::Error FindPeers(const char* op, const CudaContext& context, const Seat& seat,
                     std::shared_ptr<DevicePeers>& devices, Peers& peers) {
  devices = FindDevicePeers(seat.group->key());
  if (devices == nullptr) return ffi::Error::Internal(std::string(op) + ": the group has no control blocks");
  if (std::string text = devices->DescribeExpired(seat.group->name()); !text.empty()) {
    seat.group->RecordExpired(text);
    return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, text);
  }
  const std::string late = context.site->first_call.Wait(op, *seat.group, seat.place);
  if (!late.empty()) {
    seat.group->RecordExpired(late);
    return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, late);
  }
  peers = devices->At(seat.place, seat.group->timeout_s());
  return ffi::Error::Success();
}

ffi::Error CheckReach(const char* op, const DevicePeers& devices, const Seat& seat,
                      const std::vector<const void*>& published) {
  for (const void* buffer : published) {
    const std::string reason = devices.ReasonAgainst(seat.place, buffer);
    if (!reason.empty())
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition, std::string(op) + ": " + reason);
  }
  return ffi::Error::Success();
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
  std::shared_ptr<DevicePeers> devices;
  Peers peers;
  auto error = CheckShape(op, params.shape, payloads.size());
  if (error.success()) error = FindPeers(op, context, seat, devices, peers);
  if (error.failure()) return error;
  std::vector<const void*> published{params.recv_topk_weights, routing};
  for (const Payload& payload : payloads) published.push_back(payload.out);
  error = CheckReach(op, *devices, seat, published);
  if (error.failure()) return error;
  params.payloads = payloads.data();
  params.num_payloads = static_cast<int32_t>(payloads.size());
  for (const Payload& payload : payloads) {
    Poison(payload.out, params.shape.capacity * payload.row_bytes, context.stream);
  }
  const int64_t weights = params.shape.order == Order::kRank ? params.shape.top_k : 1;
  Poison(params.recv_topk_weights, params.shape.capacity * weights * sizeof(float), context.stream);
  return Launched(op, launch(params, peers, ThisDevice(seat.group.get()), context.stream));
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
  return RunPush("dispatch (cached)", context, seat, params, payloads, nullptr, cuda::LaunchCachedDispatch);
}

static ffi::Error Run(const CudaContext& context, Seat seat, CombineParams params, Sums sums) {
  const char* op = "combine";
  std::shared_ptr<DevicePeers> devices;
  Peers peers;
  auto error = FirstError(
      {CheckShape(op, params.shape, sums.summands.size()), AtMost(op, "biases", sums.biases.size(), 8)});
  if (error.success()) error = FindPeers(op, context, seat, devices, peers);
  if (error.failure()) return error;
  const bool folds = params.shape.order == Order::kExpert && params.shape.top_k > 1;
  for (const Summand& summand : sums.summands) {
    if (folds && summand.partial == nullptr) {
      return InvalidArgument(op, ": by expert the kernels need room for partial sums");
    }
  }
  std::vector<const void*> published{params.row_weights, params.recv_topk_weights};
  for (const Summand& summand : sums.summands) {
    published.push_back(summand.rows);
    published.push_back(summand.partial);
  }
  error = CheckReach(op, *devices, seat, published);
  if (error.failure()) return error;
  for (const Summand& summand : sums.summands) {
    const int64_t bytes = summand.num_elements * BytesOf(summand.type);
    Poison(summand.out, params.shape.num_tokens * bytes, context.stream);
    Poison(summand.partial, int64_t{params.shape.num_ranks} * params.shape.num_tokens * bytes,
           context.stream);
  }
  params.summands = sums.summands.data();
  params.num_summands = static_cast<int32_t>(sums.summands.size());
  params.biases = sums.biases.data();
  params.num_biases = static_cast<int32_t>(sums.biases.size());
  return Launched(op, cuda::LaunchCombine(params, peers, ThisDevice(seat.group.get()), context.stream));
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
