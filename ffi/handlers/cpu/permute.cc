#include "handlers/decode/permute.h"

#include "handlers/cpu/context.h"
#include "handlers/cpu/handlers.h"
#include "host/ops.h"

namespace jax_ep {

static ffi::Error RunPermute(const CpuLocalContext&, const PermuteParams& params) {
  host::Permute(params);
  return ffi::Error::Success();
}

static ffi::Error RunRepermute(const CpuLocalContext&, const RepermuteParams& params) {
  host::Repermute(params);
  return ffi::Error::Success();
}

static ffi::Error RunUnpermute(const CpuLocalContext&, const UnpermuteParams& params) {
  host::Unpermute(params);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(PermuteHandler, Permute<CpuLocalContext>,
                              BindArrays<PermuteAttributes>(ffi::Ffi::Bind().Ctx<CpuLocalContext>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(RepermuteHandler, Repermute<CpuLocalContext>,
                              BindRepermute(ffi::Ffi::Bind().Ctx<CpuLocalContext>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(UnpermuteHandler, Unpermute<CpuLocalContext>,
                              BindUnpermute(ffi::Ffi::Bind().Ctx<CpuLocalContext>()));

}  // namespace jax_ep
