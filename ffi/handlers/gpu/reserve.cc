// Allocation of the memory of a group's control blocks.
#include <cuda_runtime_api.h>

#include <optional>

#include "handlers/decode/check.h"
#include "handlers/gpu/handlers.h"

namespace jax_ep {

// Access to JAX's allocator. `ffi::ScratchAllocator` would free the memory at the end of the call.
struct JaxMemory {
  const XLA_FFI_Api* api;
  XLA_FFI_ExecutionContext* context;
  cudaStream_t stream;
};

}  // namespace jax_ep

namespace xla::ffi {

template <>
struct CtxDecoding<jax_ep::JaxMemory> {
  using Type = jax_ep::JaxMemory;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic) {
    auto stream = CtxDecoding<PlatformStream<cudaStream_t>>::Decode(api, ctx, diagnostic);
    if (!stream) return std::nullopt;
    return Type{api, ctx, *stream};
  }
};

}  // namespace xla::ffi

namespace jax_ep {

// Allocates `bytes` of zeros for the life of the process. The result is the address, lower half first.
static ffi::Error Reserve(const JaxMemory& memory, int64_t bytes, ffi::AnyBuffer,
                          ffi::Result<ffi::BufferR1<ffi::U32>> address) {
  XLA_FFI_DeviceMemory_Allocate_Args args{};
  args.struct_size = XLA_FFI_DeviceMemory_Allocate_Args_STRUCT_SIZE;
  args.ctx = memory.context;
  args.size = static_cast<size_t>(bytes);
  args.alignment = 16;  // the largest that FFI permits; JAX's allocators align to 256
  if (XLA_FFI_Error* error = memory.api->XLA_FFI_DeviceMemory_Allocate(&args)) {
    const std::string text = ffi::internal::GetErrorMessage(memory.api, error);
    ffi::internal::DestroyError(memory.api, error);
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for a group's control block: " + text);
  }
  const uint64_t value = reinterpret_cast<uint64_t>(args.data);
  if (value == 0 || value % 128 != 0) {
    return ffi::Error::Internal("the memory of a group's control block is not aligned to 128 bytes");
  }
  cudaError_t error = cudaMemsetAsync(args.data, 0, args.size, memory.stream);
  if (error == cudaSuccess) {
    // The source is pageable memory, so it has been read when this returns.
    error =
        cudaMemcpyAsync(address->typed_data(), &value, sizeof(value), cudaMemcpyHostToDevice, memory.stream);
  }
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("clearing a control block: ") + cudaGetErrorString(error));
}

// Must not be recorded in a CUDA graph.
XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuReserveHandler, Reserve,
                              ffi::Ffi::Bind()
                                  .Ctx<JaxMemory>()
                                  .Attr<int64_t>("bytes")
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::BufferR1<ffi::U32>>());

}  // namespace jax_ep
