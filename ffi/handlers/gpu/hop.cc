// Hop 1 on GPUs over NCCL's device API. JAX's collectives do the same where there are no rails.
#include "handlers/gpu/handlers.h"
#include "handlers/gpu/launch.h"
#include "runtime/net/rails.h"

namespace jax_ep {

constexpr const char* kCompileAgain =
    "and this program was compiled while it stood. Make the Group anew in all processes, and compile again "
    "(jax.clear_caches())";

static ffi::Error RunRailHop(CudaContext context, ffi::BufferR1<ffi::S32> place, ffi::AnyBuffer in,
                             ffi::Result<ffi::AnyBuffer> out, std::string_view group,
                             std::string_view rail_key, int64_t num_ranks) {
  const char* op = "hop between hosts";
  Seat seat;
  auto error = FindSeat(op, group, context.FindGroup(group), context.device, kOnDevice,
                        static_cast<int32_t>(num_ranks), seat);
  if (error.failure()) return error;
  const auto rails = FindRails(std::string(rail_key));
  const Rails::Rail* const rail = rails == nullptr ? nullptr : rails->Find(context.device);
  const int64_t bytes = static_cast<int64_t>(in.size_bytes());
  if (bytes == 0) return ffi::Error::Success();
  HopParams hop = rail == nullptr ? HopParams{} : rail->hop;
  const int64_t hosts = in.dimensions().size() == 0 ? 0 : in.dimensions()[0];
  std::string obstacle;
  const bool fits =
      hosts == hop.window.hosts && place.element_count() == 2 && out->size_bytes() == in.size_bytes();
  if (rail == nullptr) {
    obstacle = Text("GPU ", context.device, " is not connected to other hosts by NCCL, ", kCompileAgain);
  } else if (!fits) {
    obstacle =
        Text("expected a block for each of ", hop.window.hosts, " hosts, and a result like the operand");
  } else if (const std::string why = rails->WhyFailed(); !why.empty()) {
    obstacle = Text("the connection by NCCL has failed and is not used again (", why, "), ", kCompileAgain);
  }
  hop.place_operand = reinterpret_cast<const MeshPlace*>(place.typed_data());
  hop.in = static_cast<const std::byte*>(in.untyped_data());
  hop.out = static_cast<std::byte*>(out->untyped_data());
  hop.block_bytes = hosts == 0 ? 0 : bytes / hosts;
  Announcement announced{op, [&] {
                           return Text(op, ", ", hosts, " blocks of ", hop.block_bytes, " bytes (",
                                       DtypeName(in.element_type()), ")");
                         }};
  announced.obstacle = obstacle;
  const auto launch = [&](const Peers& peers) {
    hop.call = peers.call.hash;
    hop.peers = peers;
    hop.timeout_ns = &peers.report->timeout_ns;
    return cuda::LaunchHop(hop, rail->gin, context.stream);
  };
  if (rail != nullptr && fits) {
    announced.tell_others = [&](const Peers& peers) {
      hop.is_refused = true;
      (void)launch(peers);
    };
  }
  return LaunchTogether(context, seat, announced, launch);
}

// Not to be recorded in a CUDA graph, whose nodes may run side by side: hops of a device follow one another.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaRailHopHandler, RunRailHop,
                              ffi::Ffi::Bind()
                                  .Ctx<CudaContext>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // place [2] among all ranks
                                  .Arg<ffi::AnyBuffer>()           // [hosts, ...]
                                  .Ret<ffi::AnyBuffer>()           // [hosts, ...]
                                  .Attr<std::string_view>("group")
                                  .Attr<std::string_view>("rails")
                                  .Attr<int64_t>("num_ranks"));

}  // namespace jax_ep
