// An op that communicates, and a product of experts beside it, in one handler. XLA runs the handlers of a
// program one after the other, also those that it starts asynchronously.
#include <exception>
#include <utility>

#include "handlers/decode/pull.h"
#include "handlers/gpu/grouped_dot.h"
#include "handlers/gpu/handlers.h"
#include "handlers/gpu/launch.h"
#include "runtime/gpu/driver.h"

namespace jax_ep {

// The attributes of both, side by side because such a struct cannot have another one in it, and how many
// operands and results the first one has.
struct PullBesideAttributes {
  std::string_view group;
  int64_t order, num_ranks, num_experts, capacity, alignment, masks, quantize;
  std::string_view program;
  int64_t product, allow_tf32, num_sms, rows_per_group, first_column;
  int64_t num_operands, num_results;

  RoutingAttributes routing() const {
    return {group, order, num_ranks, num_experts, capacity, alignment, masks, quantize, program};
  }
  ProductAttributes of_product() const {
    return {product, allow_tf32, num_sms, rows_per_group, first_column};
  }
};

}  // namespace jax_ep

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_ep::PullBesideAttributes, StructMember<std::string_view>("group"), StructMember<int64_t>("order"),
    StructMember<int64_t>("num_ranks"), StructMember<int64_t>("num_experts"),
    StructMember<int64_t>("capacity"), StructMember<int64_t>("alignment"), StructMember<int64_t>("masks"),
    StructMember<int64_t>("quantize"), StructMember<std::string_view>("program"),
    StructMember<int64_t>("product"), StructMember<int64_t>("allow_tf32"), StructMember<int64_t>("num_sms"),
    StructMember<int64_t>("rows_per_group"), StructMember<int64_t>("first_column"),
    StructMember<int64_t>("num_operands"), StructMember<int64_t>("num_results"));

namespace jax_ep {

using Buffers = std::vector<ffi::AnyBuffer>;

static std::pair<Buffers, Buffers> SplitAt(const Buffers& buffers, int64_t first) {
  const auto middle = buffers.begin() + static_cast<std::ptrdiff_t>(first);
  return {Buffers(buffers.begin(), middle), Buffers(middle, buffers.end())};
}

// Runs before every execution of a program, and never while a CUDA graph is recorded.
static ffi::Error InitializePullBeside(GpuCallSite* site, int32_t device, ffi::RemainingArgs,
                                       ffi::RemainingRets, ffi::Dictionary) {
  if (auto error = site->CheckPeers(); error.failure()) return error;
  SideStream& side = site->SideStreamOf(device);
  if (side.is_open()) return ffi::Error::Success();
  try {
    return LaunchResult("combine", OnDevice(device, [&] { return side.Open(); }));
  } catch (const std::exception& error) {
    return ffi::Error::Internal(Text("combine: GPU ", device, ": ", error.what()));
  }
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuPullBesideInitialize, InitializePullBeside,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::State<GpuCallSite>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

// The pull is launched first, and usually starts first, while the product is set up. Its blocks wait for each
// other, so all of them need room at once. Otherwise it waits for the product, which never waits for it. The
// product hands out its tiles while it runs: a block that gets its SM later computes fewer of them.
static ffi::Error PullBeside(GpuContext context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             PullBesideAttributes attributes) {
  const Buffers operands = BuffersOf(args), results = BuffersOf(rets);
  if (attributes.num_operands < 0 || attributes.num_operands > static_cast<int64_t>(operands.size()) ||
      attributes.num_results < 0 || attributes.num_results > static_cast<int64_t>(results.size())) {
    return InvalidArgument("combine: it has ", operands.size(), " operands and ", results.size(),
                           " results, got ", attributes.num_operands, " and ", attributes.num_results);
  }
  const auto [of_pull, of_product] = SplitAt(operands, attributes.num_operands);
  const auto [pulled, products] = SplitAt(results, attributes.num_results);
  std::optional<GroupedDotParams> product;
  auto error = DecodeGroupedDot({"grouped_dot", of_product}, {"grouped_dot", products},
                                attributes.of_product(), product);
  if (error.failure()) return error;
  SideStream& side = context.site->SideStreamOf(context.device);
  error = LaunchResult("combine", side.Fork(context.stream));
  if (error.failure()) return error;
  GpuContext beside = context;
  beside.stream = side.stream();
  error = Pull(beside, of_pull, pulled, attributes.routing());
  // Also after a failure: a graph that is recorded must not end with a stream that was not joined.
  auto product_error = error.failure() ? ffi::Error::Success() : RunGroupedDot(product, context.stream);
  return FirstError(
      {std::move(error), std::move(product_error), LaunchResult("combine", side.Join(context.stream))});
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuPullBesideHandler, PullBeside,
                              BindArrays<PullBesideAttributes>(ffi::Ffi::Bind().Ctx<GpuContext>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
