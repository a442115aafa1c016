#include "handlers/combine.h"

#include "handlers/cpu.h"
#include "handlers/handlers.h"
#include "host/ops.h"

namespace jax_ep {

namespace {

struct CombineShare final : Share {
  CombineParams params;
  Sums sums;

  CombineShare(const CombineParams& given, Sums summed) : params(given), sums(std::move(summed)) {
    params.summands = sums.summands.data();
    params.num_summands = static_cast<int32_t>(sums.summands.size());
    params.biases = sums.biases.data();
    params.num_biases = static_cast<int32_t>(sums.biases.size());
  }

  void Move(const std::vector<Share*>& shares) override {
    std::vector<const CombineParams*> ranks;
    for (Share* share : shares) ranks.push_back(&static_cast<CombineShare*>(share)->params);
    host::Combine(ranks, params.rank);
  }
};

}  // namespace

static ffi::Future Run(const CpuContext& context, Seat seat, const CombineParams& params, Sums sums) {
  return Meet(context, std::move(seat), std::make_unique<CombineShare>(params, std::move(sums)));
}

static ffi::ErrorOr<std::unique_ptr<CallSite>> InstantiateCombine() {
  return std::make_unique<CallSite>("combine");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(CombineInstantiate, InstantiateCombine, ffi::Ffi::BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CombineHandler, Combine<CpuContext>,
                              BindCombine(ffi::Ffi::Bind().Ctx<CpuContext>()));

}  // namespace jax_ep
