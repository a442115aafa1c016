// The XLA FFI handlers for GPUs that module.cc registers where the CUDA part was built.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaRouteHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaPushHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaPullHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaGatherHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaRailHopHandler);  // where the part for NCCL was built
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaReserveHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaLayoutHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaPermuteHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaRepermuteHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaUnpermuteHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaGroupedDotHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaGroupedDotFp8Handler);

}  // namespace jax_ep
