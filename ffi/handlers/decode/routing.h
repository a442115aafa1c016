// Static part of a routing, from its attributes and operands, and the arrays of its handle.
#pragma once

#include "handlers/decode/arrays.h"

namespace jax_ep {

// Attributes of an op that moves rows between ranks. The members of each struct are in the order of their
// registration below.
struct RoutingAttributes {
  std::string_view group;
  int64_t order;
  int64_t num_ranks;
  int64_t num_experts;
  int64_t capacity;
  int64_t alignment;
  int64_t masks;     // 1: the op leaves out ranks that do not arrive in time
  int64_t quantize;  // Quantize
  std::string_view program;
};

// Attributes of a permute, which is a push by expert on one device.
struct PermuteAttributes {
  int64_t num_experts;
  int64_t capacity;
  int64_t alignment;

  RoutingAttributes routing() const {
    return {"", static_cast<int64_t>(Order::kExpert), 1, num_experts, capacity, alignment, 0, 0, ""};
  }
};

// Checks the attributes and makes the shape. T and K are the dimensions of topk_idx, which is null if the
// operand is missing.
inline ffi::Error MakeShape(const char* op, const RoutingAttributes& attributes,
                            const ffi::AnyBuffer* topk_idx, Shape& shape) {
  const auto& [group, order, num_ranks, num_experts, capacity, alignment, masks, quantize, program] =
      attributes;
  if (order < static_cast<int64_t>(Order::kRank) || order > static_cast<int64_t>(Order::kPlaced)) {
    return InvalidArgument(op, ": attribute order out of range: ", order);
  }
  for (const auto& [name, value] : {std::pair("num_ranks", num_ranks), std::pair("num_experts", num_experts),
                                    std::pair("capacity", capacity), std::pair("alignment", alignment)}) {
    if (value < 1 || value > INT32_MAX) {
      return InvalidArgument(op, ": attribute ", name, " out of range: ", value);
    }
  }
  if (topk_idx == nullptr || topk_idx->dimensions().size() != 2) {
    return InvalidArgument(op, ": topk_idx must have two dimensions");
  }
  if (num_experts % num_ranks != 0) {
    return InvalidArgument(op, ": the ", num_ranks, " ranks must divide the ", num_experts, " experts");
  }
  if (order == static_cast<int64_t>(Order::kExpertPadded) &&
      num_experts / num_ranks * alignment != capacity) {
    return InvalidArgument(op, ": ", num_experts / num_ranks, " blocks of ", alignment,
                           " rows must be the capacity, got ", capacity);
  }
  if (order == static_cast<int64_t>(Order::kPlaced) && capacity % alignment != 0) {
    return InvalidArgument(op, ": places of ", alignment, " rows must divide the capacity, got ", capacity);
  }
  const int64_t num_tokens = topk_idx->dimensions()[0], top_k = topk_idx->dimensions()[1];
  const int64_t aligned_tokens = AlignUp(num_tokens, kChunkTokens);
  auto error =
      FirstError({CheckProduct(op, "ranks * tokens * choices a token", {num_ranks, num_tokens, top_k}),
                  CheckProduct(op, "ranks * ranks", {num_ranks, num_ranks}),
                  CheckProduct(op, "tokens, rounded up to whole chunks,", {aligned_tokens}),
                  CheckProduct(op, "chunks of tokens * (experts + ranks)",
                               {aligned_tokens / kChunkTokens, num_experts + num_ranks})});
  if (error.failure()) return error;
  shape = Shape{static_cast<Order>(order),         static_cast<int32_t>(num_ranks),
                static_cast<int32_t>(num_tokens),  static_cast<int32_t>(top_k),
                static_cast<int32_t>(num_experts), static_cast<int32_t>(capacity),
                static_cast<int32_t>(alignment)};
  return ffi::Error::Success();
}

// Takes the next five arrays as a handle: operands of an op that reads it, results of an op that writes it.
inline HandleArrays TakeHandle(Arrays& arrays, const Shape& shape) {
  const int64_t T = shape.num_tokens, R = shape.num_ranks;
  HandleArrays handle{};
  handle.topk_idx = arrays.TakeInts("handle.topk_idx", {T, shape.top_k});
  handle.sent_rows = arrays.TakeInts("handle.sent_rows", {T, shape.rows_per_token()});
  handle.rank_prefix_matrix = arrays.TakeInts("handle.rank_prefix_matrix", {R, R});
  handle.expert_counts = arrays.TakeInts("handle.expert_counts", {shape.num_counts()});
  handle.received_rows =
      arrays.TakeInts("handle.received_rows", {R * T, shape.top_k}, shape.has_row_per_choice());
  return handle;
}

// Takes the attendance of the ranks: an operand and two results, each [R], or not given.
inline Attendance TakeAttendance(Arrays& in, Arrays& out, const RoutingAttributes& attributes) {
  const bool some = in.NextIsGiven();
  Attendance attendance{};
  attendance.active_ranks = in.TakeInts("active_ranks", {attributes.num_ranks}, some);
  attendance.active_after = out.TakeInts("active_ranks after it", {attributes.num_ranks}, some);
  attendance.wait_us = out.TakeFloats("wait_us", {attributes.num_ranks}, out.NextIsGiven());
  attendance.masks = attributes.masks != 0;
  return attendance;
}

// Sets `quantize` to the attribute, if that is in range.
inline ffi::Error TakeQuantize(const char* op, const RoutingAttributes& attributes, Quantize& quantize) {
  if (attributes.quantize < 0 || attributes.quantize > static_cast<int64_t>(Quantize::kFp8Rounded)) {
    return InvalidArgument(op, ": attribute quantize out of range: ", attributes.quantize);
  }
  quantize = static_cast<Quantize>(attributes.quantize);
  return ffi::Error::Success();
}

// Returns the shape of the weights that arrive with the rows.
inline std::vector<int64_t> ArrivedWeightsShape(const Shape& shape) {
  if (shape.has_row_per_choice()) return {shape.capacity};
  return {shape.capacity, shape.weights_per_row()};
}

}  // namespace jax_ep

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::RoutingAttributes, StructMember<std::string_view>("group"),
                                      StructMember<int64_t>("order"), StructMember<int64_t>("num_ranks"),
                                      StructMember<int64_t>("num_experts"), StructMember<int64_t>("capacity"),
                                      StructMember<int64_t>("alignment"), StructMember<int64_t>("masks"),
                                      StructMember<int64_t>("quantize"),
                                      StructMember<std::string_view>("program"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::PermuteAttributes, StructMember<int64_t>("num_experts"),
                                      StructMember<int64_t>("capacity"), StructMember<int64_t>("alignment"));
