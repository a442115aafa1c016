#include "handlers/decode/pull.h"

#include "handlers/cpu/context.h"
#include "handlers/cpu/handlers.h"
#include "host/ops.h"

namespace jax_ep {

namespace {

struct PullShare final : Share {
  PullCall call;

  explicit PullShare(PullCall given) : call(std::move(given)) {}

  void Move(const std::vector<Share*>& shares) override {
    std::vector<const PullParams*> ranks;
    for (Share* share : shares) {
      ranks.push_back(share == nullptr ? nullptr : &static_cast<PullShare*>(share)->call.params);
    }
    host::Pull(call.params, ranks);
  }
};

}  // namespace

static ffi::Future Run(const CpuContext& context, const char*, Seat seat, PullCall call) {
  const Attendance attendance = call.params.attendance;
  return Meet(context, std::move(seat), std::make_unique<PullShare>(std::move(call)), attendance);
}

static ffi::ErrorOr<std::unique_ptr<CallSite>> InstantiatePull() {
  return std::make_unique<CallSite>("combine");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(PullInstantiate, InstantiatePull, ffi::Ffi::BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(PullHandler, Pull<CpuContext>,
                              BindArrays<RoutingAttributes>(ffi::Ffi::Bind().Ctx<CpuContext>()));

}  // namespace jax_ep
