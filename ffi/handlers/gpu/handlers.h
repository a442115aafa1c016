// XLA FFI handlers for GPUs, which module.cc registers if the CUDA part was built.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuRouteHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuPushHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuPullHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuBesideInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuRouteBesideHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuPushBesideHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuPullBesideHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuGatherHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuRailHopHandler);  // if the NCCL part was built
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuReserveHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuLayoutHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuBalanceHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuPermuteHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuRepermuteHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuUnpermuteHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuProductsInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuGroupedDotHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuQuantizeHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GpuQuantizeGatedHandler);

}  // namespace jax_ep
