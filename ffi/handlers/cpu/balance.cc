#include "handlers/decode/balance.h"

#include "handlers/cpu/context.h"
#include "handlers/cpu/handlers.h"
#include "host/ops.h"

namespace jax_ep {

static ffi::Error RunBalance(const CpuLocalContext&, const BalanceParams& params) {
  host::Balance(params);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(BalanceHandler, Balance<CpuLocalContext>,
                              BindBalance(ffi::Ffi::Bind().Ctx<CpuLocalContext>()));

}  // namespace jax_ep
