// Plain copies between GPUs, with which the benchmark measures the links.
#include "handlers/gpu/handlers.h"
#include "handlers/gpu/launch.h"

namespace jax_ep {

static ffi::Error RunGather(CudaContext context, ffi::BufferR1<ffi::S32> place, ffi::AnyBuffer in,
                            ffi::Result<ffi::AnyBuffer> out, std::string_view group, int64_t num_ranks) {
  const char* op = "gather";
  Seat seat;
  auto error = FindSeat(op, group, context.FindGroup(group), context.device, kOnDevice,
                        static_cast<int32_t>(num_ranks), seat);
  if (error.failure()) return error;
  if (place.element_count() != 2 || in.dimensions().size() == 0 || in.size_bytes() % 16 != 0 ||
      out->size_bytes() != in.size_bytes() * num_ranks) {
    return InvalidArgument(op, ": expected a place, and an array of a multiple of 16 bytes, and a result ",
                           num_ranks, " times as many");
  }
  const int64_t rows = in.dimensions()[0];
  const GatherParams params{static_cast<int32_t>(num_ranks),
                            seat.place.rank,
                            reinterpret_cast<const MeshPlace*>(place.typed_data()),
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
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // place [2]
                                  .Arg<ffi::AnyBuffer>()           // [rows, ...]
                                  .Ret<ffi::AnyBuffer>()           // [R * rows, ...]
                                  .Attr<std::string_view>("group")
                                  .Attr<int64_t>("num_ranks"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
