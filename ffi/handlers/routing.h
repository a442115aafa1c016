// Decodes the static part of a routing and the arrays of its handle.
#pragma once

#include "handlers/arrays.h"

namespace jax_ep {

// Reads the attributes order, num_ranks, num_experts, capacity and alignment; T and K are the dimensions of
// topk_idx, which is null if the operand is missing.
inline ffi::Error DecodeShape(const char* op, const ffi::Dictionary& attrs, const ffi::AnyBuffer* topk_idx,
                              Shape& shape) {
  int32_t values[5];
  const char* names[] = {"order", "num_ranks", "num_experts", "capacity", "alignment"};
  for (int i = 0; i < 5; ++i) {
    auto value = attrs.get<int64_t>(names[i]);
    if (value.has_error()) return value.error();
    if (*value < (i == 0 ? 0 : 1) || *value > INT32_MAX || (i == 0 && *value > 1)) {
      return InvalidArgument(op, ": attribute ", names[i], " out of range: ", *value);
    }
    values[i] = static_cast<int32_t>(*value);
  }
  if (topk_idx == nullptr || topk_idx->dimensions().size() != 2) {
    return InvalidArgument(op, ": topk_idx must have two dimensions");
  }
  shape = Shape{static_cast<Order>(values[0]),
                values[1],
                static_cast<int32_t>(topk_idx->dimensions()[0]),
                static_cast<int32_t>(topk_idx->dimensions()[1]),
                values[2],
                values[3],
                values[4]};
  if (shape.num_experts % shape.num_ranks != 0) {
    return InvalidArgument(op, ": the ", shape.num_ranks, " ranks must divide the ", shape.num_experts,
                           " experts");
  }
  return ffi::Error::Success();
}

// Takes the arrays of a handle, the next five: operands of what reads it, results of what writes it.
inline HandleArrays TakeHandle(Arrays& arrays, const Shape& shape) {
  const int64_t T = shape.num_tokens, R = shape.num_ranks;
  HandleArrays handle{};
  handle.topk_idx = arrays.TakeInts("handle.topk_idx", {T, shape.top_k});
  handle.sent_rows = arrays.TakeInts("handle.sent_rows", {T, shape.rows_per_token()});
  handle.rank_prefix_matrix = arrays.TakeInts("handle.rank_prefix_matrix", {R, R});
  handle.expert_counts = arrays.TakeInts("handle.expert_counts", {shape.num_local_experts()});
  handle.received_rows =
      arrays.TakeInts("handle.received_rows", {R * T, shape.top_k}, shape.has_row_per_choice());
  return handle;
}

// Shape of the weights that arrive with the rows.
inline std::vector<int64_t> ArrivedWeightsShape(const Shape& shape) {
  if (shape.has_row_per_choice()) return {shape.capacity};
  return {shape.capacity, shape.weights_per_row()};
}

// What every op that communicates takes: all operands, all results, all attributes.
template <typename Binding>
auto BindArrays(Binding binding) {
  return std::move(binding).RemainingArgs().RemainingRets().Attrs();
}

}  // namespace jax_ep
