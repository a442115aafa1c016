// Decodes the operands of dispatch for any platform, then calls Run(context, ...), which does the work.
#pragma once

#include "handlers/check.h"
#include "handlers/routing.h"

namespace jax_ep {

template <typename Context>
typename Context::Result Dispatch(
    Context context, ffi::BufferR0<ffi::S32> rank, ffi::AnyBuffer topk_idx, FloatBuffer topk_weights,
    ffi::RemainingArgs payloads, ffi::Result<IntBuffer> routed_idx, ffi::Result<IntBuffer> token_rows,
    ffi::Result<IntBuffer> rank_prefix_matrix, ffi::Result<IntBuffer> expert_counts,
    ffi::Result<IntBuffer> row_map, ffi::Result<FloatBuffer> recv_topk_weights,
    ffi::Result<IntBuffer> recv_topk_idx, ffi::Result<IntBuffer> tokens_per_expert,
    ffi::Result<IntBuffer> group_sizes, ffi::Result<IntBuffer> num_tokens, ffi::Result<IntBuffer> num_dropped,
    ffi::Result<IntBuffer> scratch, ffi::RemainingRets rows, ffi::Dictionary attrs) {
  const char* op = "dispatch";
  DispatchParams params{};
  std::vector<Payload> moved;
  Seat seat;
  if (auto error = FirstError({DecodeShape(op, attrs, topk_idx.dimensions(), params.shape),
                               DecodeIds("dispatch: topk_idx", topk_idx, params.topk_idx)});
      error.failure()) {
    return Context::Fail(error);
  }
  const Shape& shape = params.shape;
  const bool by_rank = shape.order == Order::kRank;
  const bool weighted = topk_weights.element_count() > 0;
  auto error = FirstError(
      {CheckHandle(op, shape, *routed_idx, *token_rows, *rank_prefix_matrix, *expert_counts, *row_map),
       weighted ? CheckShape("dispatch: topk_weights", topk_weights, {shape.num_tokens, shape.top_k})
                : ffi::Error::Success(),
       weighted ? CheckShape("dispatch: received topk_weights", *recv_topk_weights, RecvWeightsShape(shape))
                : ffi::Error::Success(),
       by_rank ? CheckShape("dispatch: received topk_idx", *recv_topk_idx, {shape.capacity, shape.top_k})
               : CheckShape("dispatch: group_sizes", *group_sizes, {shape.num_local_experts()}),
       CheckShape("dispatch: tokens_per_expert", *tokens_per_expert, {shape.num_local_experts()}),
       CheckShape("dispatch: num_tokens", *num_tokens, {1}),
       CheckShape("dispatch: num_dropped", *num_dropped, {1}),
       CheckShape("dispatch: scratch", *scratch, {NumChunks(shape) * NumBins(shape)}),
       DecodePayloads(op, payloads, rows, shape.num_tokens, shape.capacity, moved),
       FindSeat(op, attrs, context.device, context.ReadRank(rank), shape.num_ranks, seat)});
  if (error.failure()) return Context::Fail(error);

  params.rank = seat.place.rank;
  params.topk_weights = DataOrNull(topk_weights);
  params.handle = HandleOf(*routed_idx, *token_rows, *rank_prefix_matrix, *expert_counts, *row_map);
  params.recv_topk_weights = weighted ? recv_topk_weights->typed_data() : nullptr;
  params.recv_topk_idx = by_rank ? recv_topk_idx->typed_data() : nullptr;
  params.tokens_per_expert = tokens_per_expert->typed_data();
  params.group_sizes = by_rank ? nullptr : group_sizes->typed_data();
  params.num_tokens = num_tokens->typed_data();
  params.num_dropped = num_dropped->typed_data();
  params.chunk_counts = scratch->typed_data();
  params.rank_operand = rank.typed_data();
  return Run(context, std::move(seat), params, std::move(moved));
}

template <typename Context>
typename Context::Result CachedDispatch(Context context, ffi::BufferR0<ffi::S32> rank, IntBuffer topk_idx,
                                        IntBuffer token_rows, IntBuffer rank_prefix_matrix,
                                        IntBuffer expert_counts, IntBuffer row_map, FloatBuffer topk_weights,
                                        ffi::RemainingArgs payloads,
                                        ffi::Result<FloatBuffer> recv_topk_weights, ffi::RemainingRets rows,
                                        ffi::Dictionary attrs) {
  const char* op = "dispatch (cached)";
  CachedDispatchParams params{};
  std::vector<Payload> moved;
  Seat seat;
  if (auto error = DecodeShape(op, attrs, topk_idx.dimensions(), params.shape); error.failure()) {
    return Context::Fail(error);
  }
  const Shape& shape = params.shape;
  const bool weighted = topk_weights.element_count() > 0;
  auto error = FirstError(
      {CheckHandle(op, shape, topk_idx, token_rows, rank_prefix_matrix, expert_counts, row_map),
       weighted ? CheckShape("dispatch (cached): topk_weights", topk_weights, {shape.num_tokens, shape.top_k})
                : ffi::Error::Success(),
       weighted ? CheckShape("dispatch (cached): received topk_weights", *recv_topk_weights,
                             RecvWeightsShape(shape))
                : ffi::Error::Success(),
       DecodePayloads(op, payloads, rows, shape.num_tokens, shape.capacity, moved),
       FindSeat(op, attrs, context.device, context.ReadRank(rank), shape.num_ranks, seat)});
  if (error.failure()) return Context::Fail(error);

  params.rank = seat.place.rank;
  params.handle = HandleOf(topk_idx, token_rows, rank_prefix_matrix, expert_counts, row_map);
  params.rank_operand = rank.typed_data();
  params.topk_weights = DataOrNull(topk_weights);
  params.recv_topk_weights = weighted ? recv_topk_weights->typed_data() : nullptr;
  return Run(context, std::move(seat), params, std::move(moved), {});
}

// The gradient of a weighted combine.
template <typename Context>
typename Context::Result WeightedDispatch(Context context, ffi::BufferR0<ffi::S32> rank, IntBuffer topk_idx,
                                          IntBuffer token_rows, IntBuffer rank_prefix_matrix,
                                          IntBuffer expert_counts, IntBuffer row_map, FloatBuffer row_weights,
                                          ffi::RemainingArgs args, ffi::Result<FloatBuffer> dots,
                                          ffi::RemainingRets rows, ffi::Dictionary attrs) {
  const char* op = "dispatch (weighted)";
  CachedDispatchParams params{};
  std::vector<Payload> moved;
  Factors factors;
  Seat seat;
  if (auto error = DecodeShape(op, attrs, topk_idx.dimensions(), params.shape); error.failure()) {
    return Context::Fail(error);
  }
  const Shape& shape = params.shape;
  if (shape.order != Order::kExpert) return Context::Fail(InvalidArgument(op, ": rows must be by expert"));
  auto error =
      FirstError({CheckHandle(op, shape, topk_idx, token_rows, rank_prefix_matrix, expert_counts, row_map),
                  CheckShape("dispatch (weighted): weights", row_weights, {shape.capacity}),
                  CheckShape("dispatch (weighted): dot products", *dots, {shape.capacity}),
                  DecodePayloads(op, args, rows, shape.num_tokens, shape.capacity, moved, &factors),
                  FindSeat(op, attrs, context.device, context.ReadRank(rank), shape.num_ranks, seat)});
  if (error.failure()) return Context::Fail(error);

  params.rank = seat.place.rank;
  params.handle = HandleOf(topk_idx, token_rows, rank_prefix_matrix, expert_counts, row_map);
  params.rank_operand = rank.typed_data();
  params.recv_topk_weights = dots->typed_data();
  params.row_weights = row_weights.typed_data();
  return Run(context, std::move(seat), params, std::move(moved), std::move(factors));
}

// The operands and results, after the context.
template <typename Binding>
auto BindDispatch(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::BufferR0<ffi::S32>>()  // rank
      .template Arg<ffi::AnyBuffer>()           // topk_idx [T, K]
      .template Arg<FloatBuffer>()              // topk_weights [T, K] or [0]
      .RemainingArgs()                          // payloads [T, ...]
      .template Ret<IntBuffer>()                // handle.topk_idx [T, K]
      .template Ret<IntBuffer>()                // handle.token_rows [T, R | K]
      .template Ret<IntBuffer>()                // handle.rank_prefix_matrix [R, R]
      .template Ret<IntBuffer>()                // handle.expert_counts [L]
      .template Ret<IntBuffer>()                // handle.row_map [R * T, K] by expert, else [0, K]
      .template Ret<FloatBuffer>()              // received topk_weights [C, K] | [C] or [0]
      .template Ret<IntBuffer>()                // received topk_idx [C, K] by rank, else [0]
      .template Ret<IntBuffer>()                // tokens_per_expert [L]
      .template Ret<IntBuffer>()                // group_sizes [L] by expert, else [0]
      .template Ret<IntBuffer>()                // num_tokens [1]
      .template Ret<IntBuffer>()                // num_dropped [1]
      .template Ret<IntBuffer>()                // scratch: counts of every chunk
      .RemainingRets()                          // rows [C, ...]
      .Attrs();
}

template <typename Binding>
auto BindCachedDispatch(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::BufferR0<ffi::S32>>()  // rank
      .template Arg<IntBuffer>()                // handle.topk_idx [T, K]
      .template Arg<IntBuffer>()                // handle.token_rows [T, R | K]
      .template Arg<IntBuffer>()                // handle.rank_prefix_matrix [R, R]
      .template Arg<IntBuffer>()                // handle.expert_counts [L]
      .template Arg<IntBuffer>()                // handle.row_map [R * T, K] by expert, else [0, K]
      .template Arg<FloatBuffer>()              // topk_weights [T, K] or [0]
      .RemainingArgs()                          // payloads [T, ...]
      .template Ret<FloatBuffer>()              // received topk_weights [C, K] | [C] or [0]
      .RemainingRets()                          // rows [C, ...]
      .Attrs();
}

template <typename Binding>
auto BindWeightedDispatch(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::BufferR0<ffi::S32>>()  // rank
      .template Arg<IntBuffer>()                // handle.topk_idx [T, K]
      .template Arg<IntBuffer>()                // handle.token_rows [T, K]
      .template Arg<IntBuffer>()                // handle.rank_prefix_matrix [R, R]
      .template Arg<IntBuffer>()                // handle.expert_counts [L]
      .template Arg<IntBuffer>()                // handle.row_map [R * T, K]
      .template Arg<FloatBuffer>()              // weight of each row [C]
      .RemainingArgs()                          // payloads [T, ...], then factors [C, ...]
      .template Ret<FloatBuffer>()              // dot products of the rows with the factors [C]
      .RemainingRets()                          // rows [C, ...]
      .Attrs();
}

}  // namespace jax_ep
