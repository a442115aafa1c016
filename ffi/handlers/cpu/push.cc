#include "handlers/decode/push.h"

#include "handlers/cpu/context.h"
#include "handlers/cpu/handlers.h"
#include "host/ops.h"
#include "host/pages.h"

namespace jax_ep {

namespace {

struct PushContribution final : Contribution {
  PushParams params;
  host::SendCounts counts;  // only of a push that routes

  explicit PushContribution(PushParams given) : params(std::move(given)) {
    // Before any peer writes to the receive buffers.
    for (const Payload& payload : params.payloads) {
      host::PreferHugePages(payload.out, params.shape.capacity * payload.row_bytes);
    }
  }

  void SetParticipants(const std::vector<bool>& ranks) override {
    if (params.routes()) counts = host::Count(params, ranks);
  }

  void MoveRows(const std::vector<Contribution*>& contributions) override {
    const host::SendCounts no_counts(params.shape);
    std::vector<const PushParams*> ranks;
    std::vector<const host::SendCounts*> all_counts;
    for (Contribution* contribution : contributions) {
      auto* const other = static_cast<PushContribution*>(contribution);
      ranks.push_back(other == nullptr ? nullptr : &other->params);
      all_counts.push_back(other == nullptr ? &no_counts : &other->counts);
    }
    host::Push(params, ranks, all_counts);
  }
};

}  // namespace

// Called by FinishPush (decode/push.h). Adds this rank's push to the meeting of all ranks; the last one moves
// the rows.
static ffi::Future RunPush(const CpuContext& context, const char* op, GroupMember member, PushParams params) {
  if (params.quantize != Quantize::kNone) {
    return CpuContext::Fail(InvalidArgument(
        op, ": the handler on the CPU does not quantize rows, so the attribute quantize must be 0, got ",
        static_cast<int>(params.quantize), "; quantize the rows before the call"));
  }
  const Attendance attendance = params.attendance;
  return Meet(context, std::move(member), std::make_unique<PushContribution>(std::move(params)), attendance);
}

static ffi::ErrorOr<std::unique_ptr<CpuCallSite>> InstantiateRoute() {
  return std::make_unique<CpuCallSite>("dispatch");
}

static ffi::ErrorOr<std::unique_ptr<CpuCallSite>> InstantiatePush() {
  return std::make_unique<CpuCallSite>("redispatch");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(RouteInstantiate, InstantiateRoute, ffi::Ffi::BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RouteHandler, RouteArrays<CpuContext>,
                              BindArrays<RoutingAttributes>(ffi::Ffi::Bind().Ctx<CpuContext>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(PushInstantiate, InstantiatePush, ffi::Ffi::BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(PushHandler, PushArrays<CpuContext>,
                              BindArrays<RoutingAttributes>(ffi::Ffi::Bind().Ctx<CpuContext>()));

}  // namespace jax_ep
