// Hop 1 on GPUs by NCCL's device API. Without rails, JAX's collectives do the same.
#include "handlers/gpu/handlers.h"
#include "handlers/gpu/launch.h"
#include "runtime/net/rails.h"

namespace jax_ep {

constexpr const char* kCompileAgain =
    "but this program was compiled for that connection. Make the Group anew in all processes, and compile "
    "again (jax.clear_caches())";

static ffi::Error RailHop(GpuContext context, ffi::BufferR1<ffi::S32> position, ffi::AnyBuffer in,
                          ffi::Result<ffi::AnyBuffer> out, std::string_view group, std::string_view rail_key,
                          int64_t num_ranks, std::string_view /*program*/) {
  const char* op = "hop between domains";
  GroupMember member;
  auto error = FindMember(op, group, context.FindGroup(group), context.device, kPositionOnDevice,
                          static_cast<int32_t>(num_ranks), member);
  if (error.failure()) return error;
  const auto rails = FindRails(std::string(rail_key));
  const Rails::Rail* const rail = rails == nullptr ? nullptr : rails->Find(context.device);
  const int64_t bytes = static_cast<int64_t>(in.size_bytes());
  if (bytes == 0) return ffi::Error::Success();
  HopParams hop = rail == nullptr ? HopParams{} : rail->hop;
  const int64_t domains = in.dimensions().size() == 0 ? 0 : in.dimensions()[0];
  std::string precondition_error;
  const bool fits =
      domains == hop.window.domains && position.element_count() == 2 && out->size_bytes() == in.size_bytes();
  if (rail == nullptr) {
    precondition_error =
        Text("GPU ", context.device, " is not connected to other domains by NCCL, ", kCompileAgain);
  } else if (!fits) {
    precondition_error =
        Text("expected a block for each of ", hop.window.domains, " domains and a result like the operand");
  } else if (const std::string why = rails->DescribeFailure(); !why.empty()) {
    precondition_error =
        Text("the connection by NCCL has failed and is not used again (", why, "), ", kCompileAgain);
  }
  hop.position_operand = reinterpret_cast<const MeshPosition*>(position.typed_data());
  hop.in = static_cast<const std::byte*>(in.untyped_data());
  hop.out = static_cast<std::byte*>(out->untyped_data());
  hop.block_bytes = domains == 0 ? 0 : bytes / domains;
  OpDescription description{op, [&] {
                              return Text(op, ", ", domains, " blocks of ", hop.block_bytes, " bytes (",
                                          DtypeName(in.element_type()), ")");
                            }};
  description.precondition_error = precondition_error;
  const auto launch = [&](const Peers& peers) {
    hop.call = peers.call.hash;
    hop.peers = peers;
    hop.timeout_ns = &peers.report->timeout_ns;
    return cuda::LaunchHop(hop, rail->gin, context.stream);
  };
  if (rail != nullptr && fits) {
    description.notify_other_domains = [&](const Peers& peers) {
      hop.is_refused = true;
      (void)launch(peers);
    };
  }
  return LaunchCollective(context, member, description, launch);
}

// Must not be recorded in a CUDA graph, whose nodes may run concurrently: hops of a device must follow one
// another.
XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuRailHopHandler, RailHop,
                              ffi::Ffi::Bind()
                                  .Ctx<GpuContext>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // position [2] among all ranks
                                  .Arg<ffi::AnyBuffer>()           // [domains, ...]
                                  .Ret<ffi::AnyBuffer>()           // [domains, ...]
                                  .Attr<std::string_view>("group")
                                  .Attr<std::string_view>("rails")
                                  .Attr<int64_t>("num_ranks")
                                  .Attr<std::string_view>("program"));

}  // namespace jax_ep
