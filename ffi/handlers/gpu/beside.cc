// An op that communicates, and a product of experts beside it, in one handler. XLA runs the handlers of a
// program one after the other, also those that it starts asynchronously.
#include <exception>
#include <utility>

#include "handlers/decode/pull.h"
#include "handlers/decode/push.h"
#include "handlers/gpu/grouped_dot.h"
#include "handlers/gpu/handlers.h"
#include "handlers/gpu/launch.h"
#include "runtime/gpu/driver.h"

namespace jax_ep {

// The attributes of both, side by side because such a struct cannot have another one in it, and how many
// operands and results the first one has.
struct BesideAttributes {
  std::string_view group;
  int64_t order, num_ranks, num_experts, capacity, alignment, masks, quantize;
  std::string_view program;
  int64_t product, allow_tf32, num_sms, rows_per_group, first_column, clears_rows;
  int64_t num_operands, num_results;

  RoutingAttributes routing() const {
    return {group, order, num_ranks, num_experts, capacity, alignment, masks, quantize, program};
  }
  ProductAttributes of_product() const {
    return {product, allow_tf32, num_sms, rows_per_group, first_column, clears_rows};
  }
};

}  // namespace jax_ep

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_ep::BesideAttributes, StructMember<std::string_view>("group"), StructMember<int64_t>("order"),
    StructMember<int64_t>("num_ranks"), StructMember<int64_t>("num_experts"),
    StructMember<int64_t>("capacity"), StructMember<int64_t>("alignment"), StructMember<int64_t>("masks"),
    StructMember<int64_t>("quantize"), StructMember<std::string_view>("program"),
    StructMember<int64_t>("product"), StructMember<int64_t>("allow_tf32"), StructMember<int64_t>("num_sms"),
    StructMember<int64_t>("rows_per_group"), StructMember<int64_t>("first_column"),
    StructMember<int64_t>("clears_rows"), StructMember<int64_t>("num_operands"),
    StructMember<int64_t>("num_results"));

namespace jax_ep {

using Buffers = std::vector<ffi::AnyBuffer>;

// Decodes and launches an op that communicates.
using Launch = ffi::Error (*)(GpuContext, const Buffers&, const Buffers&, RoutingAttributes);

static std::pair<Buffers, Buffers> SplitAt(const Buffers& buffers, int64_t first) {
  const auto middle = buffers.begin() + static_cast<std::ptrdiff_t>(first);
  return {Buffers(buffers.begin(), middle), Buffers(middle, buffers.end())};
}

// Runs before every execution of a program, and never while a CUDA graph is recorded.
static ffi::Error InitializeBeside(GpuCallSite* site, int32_t device, ffi::RemainingArgs, ffi::RemainingRets,
                                   ffi::Dictionary) {
  if (auto error = site->CheckPeers(); error.failure()) return error;
  SideStream& side = site->SideStreamOf(device);
  if (side.is_open()) return ffi::Error::Success();
  try {
    return LaunchResult("moe", OnDevice(device, [&] { return side.Open(); }));
  } catch (const std::exception& error) {
    return ffi::Error::Internal(Text("moe: GPU ", device, ": ", error.what()));
  }
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuBesideInitialize, InitializeBeside,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::State<GpuCallSite>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

// The kernel that communicates is launched first, and usually starts first, while the product is set up or
// its launch is on the way. Its blocks wait for each other, so all of them need room at once. Otherwise it
// waits for the product, which never waits for it. Most products hand out their tiles while they run, so a
// block that gets its SM later computes fewer. Those of few rows do not, but they are short.
template <Launch launch>
ffi::Error Beside(GpuContext context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  BesideAttributes attributes) {
  const Buffers operands = BuffersOf(args), results = BuffersOf(rets);
  if (attributes.num_operands < 0 || attributes.num_operands > static_cast<int64_t>(operands.size()) ||
      attributes.num_results < 0 || attributes.num_results > static_cast<int64_t>(results.size())) {
    return InvalidArgument("moe: it has ", operands.size(), " operands and ", results.size(),
                           " results, got ", attributes.num_operands, " and ", attributes.num_results);
  }
  const auto [sent, of_product] = SplitAt(operands, attributes.num_operands);
  const auto [received, products] = SplitAt(results, attributes.num_results);
  std::optional<GroupedDotParams> product;
  auto error = DecodeGroupedDot({"grouped_dot", of_product}, {"grouped_dot", products},
                                attributes.of_product(), product);
  if (error.failure()) return error;
  SideStream& side = context.site->SideStreamOf(context.device);
  error = LaunchResult("moe", side.Fork(context.stream));
  if (error.failure()) return error;
  GpuContext beside = context;
  beside.stream = side.stream();
  beside.starting = side.starting();
  error = launch(beside, sent, received, attributes.routing());
  if (error.success()) error = LaunchResult("moe", side.AwaitStart(context.stream));
  if (error.success()) error = RunGroupedDot(product, context.stream);
  // Also after a failure: a graph that is recorded must not end with a stream that was not joined.
  return FirstError({std::move(error), LaunchResult("moe", side.Join(context.stream))});
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuRouteBesideHandler, Beside<Route<GpuContext>>,
                              BindArrays<BesideAttributes>(ffi::Ffi::Bind().Ctx<GpuContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuPushBesideHandler, Beside<Push<GpuContext>>,
                              BindArrays<BesideAttributes>(ffi::Ffi::Bind().Ctx<GpuContext>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuPullBesideHandler, Beside<Pull<GpuContext>>,
                              BindArrays<BesideAttributes>(ffi::Ffi::Bind().Ctx<GpuContext>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
