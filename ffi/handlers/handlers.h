// The XLA FFI handlers that module.cc registers.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

XLA_FFI_DECLARE_HANDLER_SYMBOL(LayoutHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DispatchInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DispatchHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CachedDispatchInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CachedDispatchHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(WeightedDispatchInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(WeightedDispatchHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CombineInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CombineHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(PermuteHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CachedPermuteHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(UnpermuteHandler);

}  // namespace jax_ep
