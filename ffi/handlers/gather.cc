// Plain copies between GPUs, with which the benchmark measures the links.
#include "handlers/cuda.h"
#include "handlers/cuda_handlers.h"

namespace jax_ep {

static ffi::Error RunGather(CudaContext context, ffi::BufferR0<ffi::S32> place, ffi::AnyBuffer in,
                            ffi::Result<ffi::AnyBuffer> out, std::string_view group, int64_t num_ranks) {
  const char* op = "gather";
  Seat seat;
  auto error = FindSeat(op, group, context.device, -1, static_cast<int32_t>(num_ranks), seat);
  if (error.failure()) return error;
  if (in.dimensions().size() == 0 || in.size_bytes() % 16 != 0 ||
      out->size_bytes() != in.size_bytes() * num_ranks) {
    return InvalidArgument(op, ": the array must have a multiple of 16 bytes, and the result ", num_ranks,
                           " times as many");
  }
  const int64_t rows = in.dimensions()[0];
  const GatherParams params{static_cast<int32_t>(num_ranks),
                            seat.place.rank,
                            place.typed_data(),
                            static_cast<const std::byte*>(in.untyped_data()),
                            static_cast<std::byte*>(out->untyped_data()),
                            rows,
                            rows == 0 ? 0 : static_cast<int64_t>(in.size_bytes()) / rows};
  const Announcement announced{
      op, [&] { return Text(op, " of ", in.size_bytes(), " bytes a rank"); }, {out->untyped_data()}};
  return LaunchTogether(context, seat, announced, [&](const Peers& peers) {
    return cuda::LaunchGather(params, peers, ThisDevice(seat.group.get()), context.stream);
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaGatherHandler, RunGather,
                              ffi::Ffi::Bind()
                                  .Ctx<CudaContext>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // place
                                  .Arg<ffi::AnyBuffer>()           // [rows, ...]
                                  .Ret<ffi::AnyBuffer>()           // [R * rows, ...]
                                  .Attr<std::string_view>("group")
                                  .Attr<int64_t>("num_ranks"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
