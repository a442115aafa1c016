// What a handler on a GPU knows of its call.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "handlers/check.h"
#include "runtime/first_call.h"

namespace jax_ep {

// The state of a call site whose op communicates: its devices meet once on the host before the first launch,
// so that what others load late on one device cannot hold up a kernel that its peers wait for.
struct CudaCallSite {
  static ffi::TypeId id;
  FirstCall first_call;
};

struct CudaContext {
  using Result = ffi::Error;

  cudaStream_t stream;
  int32_t device;
  CudaCallSite* site;

  static ffi::Error Fail(ffi::Error error) { return error; }
  // The rank lies on the device; the kernel compares it.
  static int32_t ReadRank(const ffi::BufferR0<ffi::S32>&) { return -1; }
};

struct CudaLocalContext {
  using Result = ffi::Error;

  cudaStream_t stream;
  int32_t device;

  static ffi::Error Fail(ffi::Error error) { return error; }
};

// The result of a launch.
ffi::Error Launched(const char* op, cudaError_t error);

}  // namespace jax_ep

namespace xla::ffi {

template <>
struct CtxDecoding<jax_ep::CudaContext> {
  using Type = jax_ep::CudaContext;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic) {
    auto stream = CtxDecoding<PlatformStream<cudaStream_t>>::Decode(api, ctx, diagnostic);
    auto device = CtxDecoding<DeviceOrdinal>::Decode(api, ctx, diagnostic);
    auto site = CtxDecoding<State<jax_ep::CudaCallSite>>::Decode(api, ctx, diagnostic);
    if (!stream || !device || !site) return std::nullopt;
    return Type{*stream, *device, *site};
  }
};

template <>
struct CtxDecoding<jax_ep::CudaLocalContext> {
  using Type = jax_ep::CudaLocalContext;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic) {
    auto stream = CtxDecoding<PlatformStream<cudaStream_t>>::Decode(api, ctx, diagnostic);
    auto device = CtxDecoding<DeviceOrdinal>::Decode(api, ctx, diagnostic);
    if (!stream || !device) return std::nullopt;
    return Type{*stream, *device};
  }
};

}  // namespace xla::ffi
