#include "handlers/pull.h"

#include "handlers/cpu.h"
#include "handlers/handlers.h"
#include "host/ops.h"

namespace jax_ep {

namespace {

struct PullShare final : Share {
  PullCall call;

  explicit PullShare(PullCall given) : call(std::move(given)) {}

  void Move(const std::vector<Share*>& shares) override {
    std::vector<const PullParams*> ranks;
    for (Share* share : shares) ranks.push_back(&static_cast<PullShare*>(share)->call.params);
    host::Pull(ranks, call.params.rank);
  }
};

}  // namespace

static ffi::Future Run(const CpuContext& context, const char*, Seat seat, PullCall call) {
  return Meet(context, std::move(seat), std::make_unique<PullShare>(std::move(call)));
}

static ffi::ErrorOr<std::unique_ptr<CallSite>> InstantiatePull() {
  return std::make_unique<CallSite>("combine");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(PullInstantiate, InstantiatePull, ffi::Ffi::BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(PullHandler, Pull<CpuContext>,
                              BindArrays<RoutingAttributes>(ffi::Ffi::Bind().Ctx<CpuContext>()));

}  // namespace jax_ep
