// Memory that a group's control blocks lie in.
#include <cuda_runtime_api.h>

#include <optional>

#include "handlers/decode/check.h"
#include "handlers/gpu/handlers.h"

namespace jax_ep {

// What takes memory of JAX's, as an FFI call of its own can: `ffi::ScratchAllocator` would give it back.
struct MemoryOfJax {
  const XLA_FFI_Api* api;
  XLA_FFI_ExecutionContext* context;
  cudaStream_t stream;
};

}  // namespace jax_ep

namespace xla::ffi {

template <>
struct CtxDecoding<jax_ep::MemoryOfJax> {
  using Type = jax_ep::MemoryOfJax;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic) {
    auto stream = CtxDecoding<PlatformStream<cudaStream_t>>::Decode(api, ctx, diagnostic);
    if (!stream) return std::nullopt;
    return Type{api, ctx, *stream};
  }
};

}  // namespace xla::ffi

namespace jax_ep {

// Takes `bytes` of zeros for as long as the process lives; the result is the address, its lower half first.
static ffi::Error Reserve(const MemoryOfJax& memory, int64_t bytes, ffi::AnyBuffer,
                          ffi::Result<ffi::BufferR1<ffi::U32>> address) {
  XLA_FFI_DeviceMemory_Allocate_Args args{};
  args.struct_size = XLA_FFI_DeviceMemory_Allocate_Args_STRUCT_SIZE;
  args.ctx = memory.context;
  args.size = static_cast<size_t>(bytes);
  args.alignment = 16;  // the largest that may be asked for; JAX's allocators give 256
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
    // From pageable memory, so the value has been read when this returns.
    error =
        cudaMemcpyAsync(address->typed_data(), &value, sizeof(value), cudaMemcpyHostToDevice, memory.stream);
  }
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("clearing a control block: ") + cudaGetErrorString(error));
}

// Not to be recorded in a CUDA graph.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaReserveHandler, Reserve,
                              ffi::Ffi::Bind()
                                  .Ctx<MemoryOfJax>()
                                  .Attr<int64_t>("bytes")
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::BufferR1<ffi::U32>>());

}  // namespace jax_ep
