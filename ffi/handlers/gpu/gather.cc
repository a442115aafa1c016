// Plain copies between GPUs, by which the benchmark measures the links.
#include "handlers/gpu/handlers.h"
#include "handlers/gpu/launch.h"

namespace jax_ep {

static ffi::Error Gather(GpuContext context, ffi::BufferR1<ffi::S32> position, ffi::AnyBuffer in,
                         ffi::Result<ffi::AnyBuffer> out, std::string_view group, int64_t num_ranks,
                         std::string_view /*program*/) {
  const char* op = "gather";
  GroupMember member;
  auto error = FindMember(op, group, context.FindGroup(group), context.device, kPositionOnDevice,
                          static_cast<int32_t>(num_ranks), member);
  if (error.failure()) return error;
  if (position.element_count() != 2 || in.dimensions().size() == 0 || in.size_bytes() % 16 != 0 ||
      out->size_bytes() != in.size_bytes() * num_ranks) {
    return InvalidArgument(op, ": expected a position, an array of a multiple of 16 bytes and a result of ",
                           num_ranks, " times as many bytes");
  }
  const int64_t rows = in.dimensions()[0];
  const GatherParams params{static_cast<int32_t>(num_ranks),
                            member.position.rank,
                            reinterpret_cast<const MeshPosition*>(position.typed_data()),
                            static_cast<const std::byte*>(in.untyped_data()),
                            static_cast<std::byte*>(out->untyped_data()),
                            rows,
                            rows == 0 ? 0 : static_cast<int64_t>(in.size_bytes()) / rows};
  const OpDescription description{
      op, [&] { return Text(op, " of ", in.size_bytes(), " bytes a rank"); }, {out->untyped_data()}};
  return LaunchCollective(context, member, description, [&](const Peers& peers) {
    return cuda::LaunchGather(params, peers, ThisDevice(member.group.get()), context.stream);
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuGatherHandler, Gather,
                              ffi::Ffi::Bind()
                                  .Ctx<GpuContext>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // position [2]
                                  .Arg<ffi::AnyBuffer>()           // [rows, ...]
                                  .Ret<ffi::AnyBuffer>()           // [R * rows, ...]
                                  .Attr<std::string_view>("group")
                                  .Attr<int64_t>("num_ranks")
                                  .Attr<std::string_view>("program"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
