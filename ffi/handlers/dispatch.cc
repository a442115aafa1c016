#include "handlers/dispatch.h"

#include "handlers/cpu.h"
#include "handlers/handlers.h"
#include "host/ops.h"
#include "host/pages.h"

namespace jax_ep {

namespace {

// The receive buffers, before any peer writes to them.
void PrepareBuffers(const Shape& shape, const std::vector<Payload>& payloads) {
  for (const Payload& payload : payloads) {
    host::PreferHugePages(payload.out, shape.capacity * payload.row_bytes);
  }
}

struct DispatchShare final : Share {
  DispatchParams params;
  std::vector<Payload> payloads;
  host::SendCounts counts;

  DispatchShare(const DispatchParams& given, std::vector<Payload> moved)
      : params(given), payloads(std::move(moved)) {
    params.payloads = payloads.data();
    params.num_payloads = static_cast<int32_t>(payloads.size());
    PrepareBuffers(params.shape, payloads);
    counts = host::Count(params);
  }

  void Move(const std::vector<Share*>& shares) override {
    std::vector<const DispatchParams*> ranks;
    std::vector<const host::SendCounts*> all_counts;
    for (Share* share : shares) {
      ranks.push_back(&static_cast<DispatchShare*>(share)->params);
      all_counts.push_back(&static_cast<DispatchShare*>(share)->counts);
    }
    host::Dispatch(ranks, all_counts, params.rank);
  }
};

struct CachedDispatchShare final : Share {
  CachedDispatchParams params;
  std::vector<Payload> payloads;
  Factors factors;

  CachedDispatchShare(const CachedDispatchParams& given, std::vector<Payload> moved, Factors weighted)
      : params(given), payloads(std::move(moved)), factors(std::move(weighted)) {
    params.payloads = payloads.data();
    params.num_payloads = static_cast<int32_t>(payloads.size());
    params.factors = factors.rows.data();
    params.factor_type = factors.type;
    PrepareBuffers(params.shape, payloads);
  }

  void Move(const std::vector<Share*>& shares) override {
    std::vector<const CachedDispatchParams*> ranks;
    for (Share* share : shares) ranks.push_back(&static_cast<CachedDispatchShare*>(share)->params);
    host::CachedDispatch(ranks, params.rank);
  }
};

}  // namespace

static ffi::Future Run(const CpuContext& context, Seat seat, const DispatchParams& params,
                       std::vector<Payload> payloads) {
  return Meet(context, std::move(seat), std::make_unique<DispatchShare>(params, std::move(payloads)));
}

static ffi::Future Run(const CpuContext& context, Seat seat, const CachedDispatchParams& params,
                       std::vector<Payload> payloads, Factors factors) {
  return Meet(context, std::move(seat),
              std::make_unique<CachedDispatchShare>(params, std::move(payloads), std::move(factors)));
}

static ffi::ErrorOr<std::unique_ptr<CallSite>> InstantiateDispatch() {
  return std::make_unique<CallSite>("dispatch");
}

static ffi::ErrorOr<std::unique_ptr<CallSite>> InstantiateCachedDispatch() {
  return std::make_unique<CallSite>("dispatch (cached)");
}

static ffi::ErrorOr<std::unique_ptr<CallSite>> InstantiateWeightedDispatch() {
  return std::make_unique<CallSite>("dispatch (weighted)");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(DispatchInstantiate, InstantiateDispatch, ffi::Ffi::BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(DispatchHandler, Dispatch<CpuContext>,
                              BindDispatch(ffi::Ffi::Bind().Ctx<CpuContext>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(CachedDispatchInstantiate, InstantiateCachedDispatch,
                              ffi::Ffi::BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CachedDispatchHandler, CachedDispatch<CpuContext>,
                              BindCachedDispatch(ffi::Ffi::Bind().Ctx<CpuContext>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(WeightedDispatchInstantiate, InstantiateWeightedDispatch,
                              ffi::Ffi::BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(WeightedDispatchHandler, WeightedDispatch<CpuContext>,
                              BindWeightedDispatch(ffi::Ffi::Bind().Ctx<CpuContext>()));

}  // namespace jax_ep
