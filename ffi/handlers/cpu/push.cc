#include "handlers/decode/push.h"

#include "handlers/cpu/context.h"
#include "handlers/cpu/handlers.h"
#include "host/ops.h"
#include "host/pages.h"

namespace jax_ep {

namespace {

struct PushShare final : Share {
  PushCall call;
  host::SendCounts counts;  // of a push that routes

  explicit PushShare(PushCall given) : call(std::move(given)) {
    const PushParams& params = call.params;
    // The receive buffers, before any peer writes to them.
    for (const Payload& payload : call.payloads) {
      host::PreferHugePages(payload.out, params.shape.capacity * payload.row_bytes);
    }
  }

  void Expect(const std::vector<bool>& ranks) override {
    if (call.params.routes()) counts = host::Count(call.params, ranks);
  }

  void Move(const std::vector<Share*>& shares) override {
    const host::SendCounts nothing(call.params.shape);
    std::vector<const PushParams*> ranks;
    std::vector<const host::SendCounts*> all_counts;
    for (Share* share : shares) {
      auto* const push = static_cast<PushShare*>(share);
      ranks.push_back(push == nullptr ? nullptr : &push->call.params);
      all_counts.push_back(push == nullptr ? &nothing : &push->counts);
    }
    host::Push(call.params, ranks, all_counts);
  }
};

}  // namespace

static ffi::Future Run(const CpuContext& context, const char* op, Seat seat, PushCall call) {
  if (call.params.quantize != Quantize::kNone) {
    return CpuContext::Fail(InvalidArgument(op, ": on the CPU rows become FP8 before they are sent"));
  }
  const Attendance attendance = call.params.attendance;
  return Meet(context, std::move(seat), std::make_unique<PushShare>(std::move(call)), attendance);
}

static ffi::ErrorOr<std::unique_ptr<CallSite>> InstantiateRoute() {
  return std::make_unique<CallSite>("dispatch");
}

static ffi::ErrorOr<std::unique_ptr<CallSite>> InstantiatePush() {
  return std::make_unique<CallSite>("redispatch");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(RouteInstantiate, InstantiateRoute, ffi::Ffi::BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RouteHandler, Route<CpuContext>,
                              BindArrays<RoutingAttributes>(ffi::Ffi::Bind().Ctx<CpuContext>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(PushInstantiate, InstantiatePush, ffi::Ffi::BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(PushHandler, Push<CpuContext>,
                              BindArrays<RoutingAttributes>(ffi::Ffi::Bind().Ctx<CpuContext>()));

}  // namespace jax_ep
