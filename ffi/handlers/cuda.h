// What a handler on a GPU knows of its call.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "handlers/check.h"
#include "kernels/kernels.h"
#include "runtime/first_call.h"
#include "runtime/peers.h"

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

// The group's control blocks, once all local ranks have come to this call site. An error if an earlier wait
// of the group expired.
ffi::Error FindPeers(const char* op, const CudaContext& context, const Seat& seat,
                     std::shared_ptr<DevicePeers>& devices, Peers& peers);

// An error if one of the buffers that the op publishes cannot be reached from the group's other processes.
ffi::Error CheckReach(const char* op, const DevicePeers& devices, const Seat& seat,
                      const std::vector<const void*>& published);

// What a launch depends on; `group` is null for local ops.
cuda::Device ThisDevice(const Group* group);

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
