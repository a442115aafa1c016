// XLA FFI handlers for the CPU, which module.cc registers.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

XLA_FFI_DECLARE_HANDLER_SYMBOL(LayoutHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(BalanceHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RouteInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RouteHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(PushInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(PushHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(PullInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(PullHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HopHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(PermuteHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RepermuteHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(UnpermuteHandler);

}  // namespace jax_ep
