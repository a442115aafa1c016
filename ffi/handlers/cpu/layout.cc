#include "handlers/decode/layout.h"

#include "handlers/cpu/context.h"
#include "handlers/cpu/handlers.h"
#include "host/ops.h"

namespace jax_ep {

static ffi::Error RunLayout(const CpuLocalContext&, const LayoutParams& params) {
  host::Layout(params);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(LayoutHandler, Layout<CpuLocalContext>,
                              BindLayout(ffi::Ffi::Bind().Ctx<CpuLocalContext>()));

}  // namespace jax_ep
