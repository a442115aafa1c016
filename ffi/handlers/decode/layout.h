// Decodes the operands of the layout for any platform, then calls RunLayout(context, params).
#pragma once

#include "handlers/decode/check.h"

namespace jax_ep {

template <typename Context>
typename Context::Result Layout(Context context, ffi::AnyBuffer topk_idx,
                                ffi::ResultBuffer<ffi::S32> num_tokens_per_rank,
                                ffi::ResultBuffer<ffi::S32> num_tokens_per_domain,
                                ffi::ResultBuffer<ffi::S32> num_tokens_per_expert,
                                ffi::ResultBuffer<ffi::PRED> is_token_in_rank, int64_t ranks_per_domain) {
  LayoutParams params{};
  if (auto error = DecodeIds("layout", topk_idx, params.topk_idx); error.failure()) return error;
  // A thread adds the number of all threads to its token's number before it finds that no token is left.
  constexpr int64_t kMostThreads = 1 << 13;
  const int64_t num_tokens = topk_idx.dimensions()[0];
  const int64_t num_ranks = num_tokens_per_rank->element_count();
  const int64_t num_experts = num_tokens_per_expert->element_count();
  if (num_ranks < 1 || num_experts < 1 || num_experts % num_ranks != 0) {
    return InvalidArgument("layout: the ", num_ranks, " ranks must divide the ", num_experts, " experts");
  }
  if (ranks_per_domain < 1 || num_ranks % ranks_per_domain != 0) {
    return InvalidArgument("layout: ranks_per_domain must divide the ", num_ranks, " ranks, got ",
                           ranks_per_domain);
  }
  auto error = FirstError(
      {CheckProduct("layout", "tokens * choices a token", {num_tokens, topk_idx.dimensions()[1]}),
       CheckProduct("layout", "tokens, and one for each thread,", {num_tokens + kMostThreads}),
       CheckProduct("layout", "ranks", {num_ranks}), CheckProduct("layout", "experts", {num_experts}),
       CheckShape("layout: num_tokens_per_domain", *num_tokens_per_domain, {num_ranks / ranks_per_domain}),
       CheckShape("layout: is_token_in_rank", *is_token_in_rank, {num_tokens, num_ranks})});
  if (error.failure()) return error;
  params.shape.num_ranks = static_cast<int32_t>(num_ranks);
  params.shape.num_tokens = static_cast<int32_t>(num_tokens);
  params.shape.top_k = static_cast<int32_t>(topk_idx.dimensions()[1]);
  params.shape.num_experts = static_cast<int32_t>(num_experts);
  params.ranks_per_domain = static_cast<int32_t>(ranks_per_domain);
  params.num_tokens_per_rank = num_tokens_per_rank->typed_data();
  params.num_tokens_per_domain = num_tokens_per_domain->typed_data();
  params.num_tokens_per_expert = num_tokens_per_expert->typed_data();
  params.is_token_in_rank = is_token_in_rank->typed_data();
  return RunLayout(context, params);
}

// Binds the operands and results after the context.
template <typename Binding>
auto BindLayout(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()          // topk_idx [T, K]
      .template Ret<ffi::Buffer<ffi::S32>>()   // num_tokens_per_rank [R]
      .template Ret<ffi::Buffer<ffi::S32>>()   // num_tokens_per_domain [R / n]
      .template Ret<ffi::Buffer<ffi::S32>>()   // num_tokens_per_expert [E]
      .template Ret<ffi::Buffer<ffi::PRED>>()  // is_token_in_rank [T, R]
      .template Attr<int64_t>("ranks_per_domain");
}

}  // namespace jax_ep
