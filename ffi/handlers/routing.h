// Decodes the static part of a routing and the arrays of its handle.
#pragma once

#include "handlers/check.h"

namespace jax_ep {

using IntBuffer = ffi::Buffer<ffi::S32>;
using FloatBuffer = ffi::Buffer<ffi::F32>;

// A zero-element operand or result stands for one that is not used.
template <typename Buffer>
auto* DataOrNull(const Buffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : buffer.typed_data();
}

// Reads the attributes order, num_ranks, num_experts, capacity and alignment; T and K are the
// dimensions of topk_idx.
inline ffi::Error DecodeShape(const char* op, const ffi::Dictionary& attrs,
                              ffi::AnyBuffer::Dimensions topk_idx, Shape& shape) {
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
  if (topk_idx.size() != 2) return InvalidArgument(op, ": topk_idx must have two dimensions");
  shape = Shape{static_cast<Order>(values[0]),
                values[1],
                static_cast<int32_t>(topk_idx[0]),
                static_cast<int32_t>(topk_idx[1]),
                values[2],
                values[3],
                values[4]};
  if (shape.num_experts % shape.num_ranks != 0) {
    return InvalidArgument(op, ": the ", shape.num_ranks, " ranks must divide the ", shape.num_experts,
                           " experts");
  }
  return ffi::Error::Success();
}

inline std::vector<int64_t> RowMapShape(const Shape& shape) {
  if (shape.order == Order::kRank) return {0, shape.top_k};
  return {int64_t{shape.num_ranks} * shape.num_tokens, shape.top_k};
}

inline ffi::Error CheckHandle(const char* op, const Shape& shape, const IntBuffer& topk_idx,
                              const IntBuffer& token_rows, const IntBuffer& rank_prefix_matrix,
                              const IntBuffer& expert_counts, const IntBuffer& row_map) {
  const std::string prefix = std::string(op) + ": handle.";
  return FirstError(
      {CheckShape((prefix + "topk_idx").c_str(), topk_idx, {shape.num_tokens, shape.top_k}),
       CheckShape((prefix + "token_rows").c_str(), token_rows, {shape.num_tokens, shape.rows_per_token()}),
       CheckShape((prefix + "rank_prefix_matrix").c_str(), rank_prefix_matrix,
                  {shape.num_ranks, shape.num_ranks}),
       CheckShape((prefix + "expert_counts").c_str(), expert_counts, {shape.num_local_experts()}),
       CheckShape((prefix + "row_map").c_str(), row_map, RowMapShape(shape))});
}

// The arrays of a handle whose shapes were checked.
inline HandleArrays HandleOf(const IntBuffer& topk_idx, const IntBuffer& token_rows,
                             const IntBuffer& rank_prefix_matrix, const IntBuffer& expert_counts,
                             const IntBuffer& row_map) {
  return {topk_idx.typed_data(), token_rows.typed_data(), rank_prefix_matrix.typed_data(),
          expert_counts.typed_data(), row_map.typed_data()};
}

// Shape of the weights that arrive with the rows.
inline std::vector<int64_t> RecvWeightsShape(const Shape& shape) {
  if (shape.order == Order::kRank) return {shape.capacity, shape.top_k};
  return {shape.capacity};
}

}  // namespace jax_ep
