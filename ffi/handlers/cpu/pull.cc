#include "handlers/decode/pull.h"

#include "handlers/cpu/context.h"
#include "handlers/cpu/handlers.h"
#include "host/ops.h"

namespace jax_ep {

namespace {

struct PullContribution final : Contribution {
  PullParams params;

  explicit PullContribution(PullParams given) : params(std::move(given)) {}

  void MoveRows(const std::vector<Contribution*>& contributions) override {
    std::vector<const PullParams*> ranks;
    for (Contribution* contribution : contributions) {
      ranks.push_back(contribution == nullptr ? nullptr
                                              : &static_cast<PullContribution*>(contribution)->params);
    }
    host::Pull(params, ranks);
  }
};

}  // namespace

static ffi::Future RunPull(const CpuContext& context, const char*, GroupMember member, PullParams params) {
  const Attendance attendance = params.attendance;
  return Meet(context, std::move(member), std::make_unique<PullContribution>(std::move(params)), attendance);
}

static ffi::ErrorOr<std::unique_ptr<CpuCallSite>> InstantiatePull() {
  return std::make_unique<CpuCallSite>("combine");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(PullInstantiate, InstantiatePull, ffi::Ffi::BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(PullHandler, PullArrays<CpuContext>,
                              BindArrays<RoutingAttributes>(ffi::Ffi::Bind().Ctx<CpuContext>()));

}  // namespace jax_ep
