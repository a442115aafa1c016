// Decodes the operands of permute, repermute and unpermute for any platform, then calls
// RunPermute(context, params) or the like.
#pragma once

#include "handlers/decode/routing.h"

namespace jax_ep {

template <typename Context>
typename Context::Result Permute(Context context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                 PermuteAttributes attributes) {
  const char* op = "permute";
  PermuteParams params{};
  Shape& shape = params.shape;
  Arrays in(op, BuffersOf(args)), out(op, BuffersOf(rets));
  if (auto error = MakeShape(op, attributes.routing(), in.Peek(), shape); error.failure()) return error;
  params.topk_idx = in.TakeIds("topk_idx");
  const bool weighted = in.NextIsGiven();
  params.topk_weights = in.TakeFloats("topk_weights", {shape.num_tokens, shape.top_k}, weighted);
  // The payloads [C, ...] follow.

  params.row_map = out.TakeInts("row_map", {shape.num_tokens, shape.top_k});
  params.row_weights = out.TakeFloats("row_weights", {shape.capacity}, weighted);
  params.group_sizes = out.TakeInts("group_sizes", {shape.num_experts});
  params.tokens_per_expert = out.TakeInts("tokens_per_expert", {shape.num_experts});
  params.num_dropped = out.TakeInts("num_dropped", {1});
  const int64_t num_counts = int64_t{NumChunks(shape)} * NumBins(shape);
  params.chunk_counts = out.TakeInts("scratch", {num_counts + int64_t{shape.num_tokens} * shape.top_k});
  // The rows [P, ...] follow.
  if (auto error = FirstError({in.error(), out.error()}); error.failure()) return error;
  std::vector<Payload> payloads;
  auto error = DecodePayloads(op, in.Rest(), out.Rest(), shape.num_tokens, shape.capacity, payloads);
  if (error.failure()) return error;
  params.routed_idx = params.chunk_counts + num_counts;
  params.payloads = payloads.data();
  params.num_payloads = static_cast<int32_t>(payloads.size());
  return RunPermute(context, params);
}

template <typename Context>
typename Context::Result Repermute(Context context, ffi::BufferR2<ffi::S32> row_map, ffi::AnyBuffer leaf,
                                   ffi::Buffer<ffi::F32> topk_weights, ffi::AnyBuffer factors,
                                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::Buffer<ffi::F32>> dots,
                                   ffi::ResultBufferR1<ffi::U8> scratch) {
  RepermuteParams params{};
  const int64_t num_rows = row_map.dimensions()[0], top_k = row_map.dimensions()[1];
  const int64_t num_permuted = scratch->dimensions()[0];
  std::vector<Payload> payloads;
  auto error = FirstError({CheckProduct("repermute", "rows", {num_rows}),
                           CheckProduct("repermute", "permuted rows", {num_permuted}),
                           DecodePayloads("repermute", {leaf}, {*out}, num_rows, num_permuted, payloads)});
  if (error.failure()) return error;
  params.payload = payloads[0];
  if (IsGiven(topk_weights)) {
    const auto type = FloatOfType(leaf.element_type());
    if (!type || factors.element_type() != leaf.element_type()) {
      return InvalidArgument("repermute: rows with weights, and the factors, must be of one dtype: ",
                             "float16, bfloat16, float32 or float64");
    }
    if (factors.dimensions().size() == 0 || factors.dimensions()[0] != num_permuted ||
        ElementsPerRow(factors) != ElementsPerRow(leaf)) {
      return InvalidArgument("repermute: the factors must have ", num_permuted,
                             " rows of the payload's shape");
    }
    error = FirstError({CheckShape("repermute: topk_weights", topk_weights, {num_rows, top_k}),
                        CheckShape("repermute: dots", *dots, {num_rows, top_k})});
    if (error.failure()) return error;
    params.topk_weights = topk_weights.typed_data();
    params.type = *type;
    params.factors = factors.untyped_data();
    params.dots = dots->typed_data();
  }
  params.num_rows = static_cast<int32_t>(num_rows);
  params.top_k = static_cast<int32_t>(top_k);
  params.num_permuted = static_cast<int32_t>(num_permuted);
  params.row_map = row_map.typed_data();
  params.written = scratch->typed_data();
  return RunRepermute(context, params);
}

template <typename Context>
typename Context::Result Unpermute(Context context, ffi::AnyBuffer y, ffi::BufferR2<ffi::S32> row_map,
                                   ffi::Buffer<ffi::F32> topk_weights, ffi::AnyBuffer bias,
                                   ffi::AnyBuffer topk_idx, ffi::Result<ffi::AnyBuffer> out) {
  UnpermuteParams params{};
  Bias decoded_bias{};
  const int64_t num_rows = row_map.dimensions()[0], top_k = row_map.dimensions()[1];
  const auto y_type = FloatOfType(y.element_type());
  const auto out_type = FloatOfType(out->element_type());
  if (!y_type || !out_type) {
    return InvalidArgument("unpermute: y and the result must be float16, bfloat16, float32 or float64");
  }
  if (y.dimensions().size() == 0 || out->dimensions().size() == 0 || out->dimensions()[0] != num_rows ||
      ElementsPerRow(*out) != ElementsPerRow(y)) {
    return InvalidArgument("unpermute: the result must have ", num_rows, " rows of y's shape");
  }
  if (auto error = FirstError({CheckProduct("unpermute", "rows", {num_rows}),
                               CheckProduct("unpermute", "permuted rows", {y.dimensions()[0]}),
                               CheckProduct("unpermute", "elements of a row", {ElementsPerRow(y)})});
      error.failure()) {
    return error;
  }
  if (IsGiven(topk_weights)) {
    auto error = CheckShape("unpermute: topk_weights", topk_weights, {num_rows, top_k});
    if (error.failure()) return error;
  }
  if (IsGiven(bias)) {
    const auto bias_type = FloatOfType(bias.element_type());
    if (!bias_type || ElementsPerRow(bias) != ElementsPerRow(y)) {
      return InvalidArgument("unpermute: bias must be floating, with rows of y's shape");
    }
    auto error = FirstError({DecodeIds("unpermute: topk_idx", topk_idx, params.topk_idx),
                             CheckShape("unpermute: topk_idx", topk_idx, {num_rows, top_k})});
    if (error.failure()) return error;
    decoded_bias = {bias.untyped_data(), *bias_type};
    params.bias = &decoded_bias;
    params.num_local_experts = static_cast<int32_t>(bias.dimensions()[0]);
  }
  params.num_rows = static_cast<int32_t>(num_rows);
  params.top_k = static_cast<int32_t>(top_k);
  params.num_permuted = static_cast<int32_t>(y.dimensions()[0]);
  params.row_map = row_map.typed_data();
  params.y = {y.untyped_data(), out->untyped_data(), ElementsPerRow(y), *y_type, nullptr};
  params.out_type = *out_type;
  params.topk_weights = IsGiven(topk_weights) ? topk_weights.typed_data() : nullptr;
  return RunUnpermute(context, params);
}

// Bind the operands and results after the context.
template <typename Binding>
auto BindRepermute(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::BufferR2<ffi::S32>>()  // row_map [C, K]
      .template Arg<ffi::AnyBuffer>()           // leaf [C, ...]
      .template Arg<ffi::Buffer<ffi::F32>>()    // topk_weights [C, K] or [0]
      .template Arg<ffi::AnyBuffer>()           // factors [P, ...], read with weights
      .template Ret<ffi::AnyBuffer>()           // rows [P, ...]
      .template Ret<ffi::Buffer<ffi::F32>>()    // dots [C, K] or [0]
      .template Ret<ffi::BufferR1<ffi::U8>>();  // scratch [P]
}

template <typename Binding>
auto BindUnpermute(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()           // y [P, ...]
      .template Arg<ffi::BufferR2<ffi::S32>>()  // row_map [C, K]
      .template Arg<ffi::Buffer<ffi::F32>>()    // topk_weights [C, K] or [0]
      .template Arg<ffi::AnyBuffer>()           // bias [L, ...] or [0]
      .template Arg<ffi::AnyBuffer>()           // topk_idx [C, K], read with a bias
      .template Ret<ffi::AnyBuffer>();          // out [C, ...]
}

}  // namespace jax_ep
