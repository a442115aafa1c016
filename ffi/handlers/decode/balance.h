// Decodes the operands of the placement of redundant experts for any platform, then calls
// RunBalance(context, params).
#pragma once

#include "handlers/decode/check.h"

namespace jax_ep {

template <typename Context>
typename Context::Result Balance(Context context, ffi::Buffer<ffi::S32> counts, ffi::Buffer<ffi::S32> source,
                                 ffi::ResultBuffer<ffi::S32> physical_to_logical,
                                 ffi::ResultBuffer<ffi::S32> quotas, ffi::ResultBuffer<ffi::S32> order,
                                 ffi::ResultBuffer<ffi::S32> ends, int64_t num_redundant_experts,
                                 int64_t tolerance, int64_t min_rows) {
  if (counts.dimensions().size() != 2) return InvalidArgument("balance: counts must have two dimensions");
  const int64_t num_ranks = counts.dimensions()[0], num_experts = counts.dimensions()[1];
  if (num_ranks < 1 || num_experts < 1 || num_experts % num_ranks != 0) {
    return InvalidArgument("balance: the ", num_ranks, " ranks must divide the ", num_experts, " experts");
  }
  const int64_t num_local_experts = num_experts / num_ranks;
  if (num_redundant_experts < 1 || num_redundant_experts > num_local_experts) {
    return InvalidArgument("balance: num_redundant_experts must be between 1 and the ", num_local_experts,
                           " home experts of a rank, got ", num_redundant_experts);
  }
  if (tolerance < 0 || tolerance > 1000) {
    return InvalidArgument("balance: tolerance must be between 0 and 1000, got ", tolerance);
  }
  if (min_rows < 0 || min_rows > INT32_MAX) {
    return InvalidArgument("balance: attribute min_rows out of range: ", min_rows);
  }
  const int64_t per_rank = num_local_experts + num_redundant_experts;
  auto error =
      CheckProduct("balance", "ranks * ranks * physical experts a rank", {num_ranks, num_ranks, per_rank});
  if (error.failure()) return error;
  const int64_t num_physical = num_ranks * per_rank;
  error = FirstError({CheckShape("balance: source", source, {1}),
                      CheckShape("balance: physical_to_logical", *physical_to_logical, {num_physical}),
                      CheckShape("balance: quotas", *quotas, {num_physical}),
                      CheckShape("balance: order", *order, {num_physical}),
                      CheckShape("balance: ends", *ends, {num_physical})});
  if (error.failure()) return error;
  BalanceParams params{};
  params.num_ranks = static_cast<int32_t>(num_ranks);
  params.num_experts = static_cast<int32_t>(num_experts);
  params.num_redundant_experts = static_cast<int32_t>(num_redundant_experts);
  params.tolerance = static_cast<int32_t>(tolerance);
  params.min_rows = static_cast<int32_t>(min_rows);
  params.counts = counts.typed_data();
  params.source = source.typed_data();
  params.physical_to_logical = physical_to_logical->typed_data();
  params.quotas = quotas->typed_data();
  params.order = order->typed_data();
  params.ends = ends->typed_data();
  return RunBalance(context, params);
}

// Binds the operands and results after the context.
template <typename Binding>
auto BindBalance(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::Buffer<ffi::S32>>()  // counts [R, E]
      .template Arg<ffi::Buffer<ffi::S32>>()  // source [1]
      .template Ret<ffi::Buffer<ffi::S32>>()  // physical_to_logical [P]
      .template Ret<ffi::Buffer<ffi::S32>>()  // quotas [P]
      .template Ret<ffi::Buffer<ffi::S32>>()  // order [P]
      .template Ret<ffi::Buffer<ffi::S32>>()  // ends [P]
      .template Attr<int64_t>("num_redundant_experts")
      .template Attr<int64_t>("tolerance")
      .template Attr<int64_t>("min_rows");
}

}  // namespace jax_ep
