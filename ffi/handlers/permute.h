// Decodes the operands of permute and unpermute for any platform, then calls Run(context, params).
#pragma once

#include "handlers/check.h"
#include "handlers/routing.h"

namespace jax_ep {

template <typename Context>
typename Context::Result Permute(Context context, ffi::AnyBuffer topk_idx, FloatBuffer topk_weights,
                                 ffi::RemainingArgs payloads, ffi::Result<IntBuffer> row_map,
                                 ffi::Result<FloatBuffer> permuted_weights,
                                 ffi::Result<IntBuffer> group_sizes, ffi::Result<IntBuffer> tokens_per_expert,
                                 ffi::Result<IntBuffer> num_dropped, ffi::Result<IntBuffer> scratch,
                                 ffi::RemainingRets rows, ffi::Dictionary attrs) {
  const char* op = "permute";
  PermuteParams params{};
  std::vector<Payload> decoded;
  if (auto error = FirstError({DecodeShape(op, attrs, topk_idx.dimensions(), params.shape),
                               DecodeIds("permute: topk_idx", topk_idx, params.topk_idx)});
      error.failure()) {
    return error;
  }
  const Shape& shape = params.shape;
  const bool weighted = topk_weights.element_count() > 0;
  auto error = FirstError(
      {weighted ? CheckShape("permute: topk_weights", topk_weights, {shape.num_tokens, shape.top_k})
                : ffi::Error::Success(),
       weighted ? CheckShape("permute: permuted topk_weights", *permuted_weights, {shape.capacity})
                : ffi::Error::Success(),
       CheckShape("permute: row_map", *row_map, {shape.num_tokens, shape.top_k}),
       CheckShape("permute: group_sizes", *group_sizes, {shape.num_experts}),
       CheckShape("permute: tokens_per_expert", *tokens_per_expert, {shape.num_experts}),
       CheckShape("permute: num_dropped", *num_dropped, {1}),
       CheckShape("permute: scratch", *scratch,
                  {NumChunks(shape) * NumBins(shape) + int64_t{shape.num_tokens} * shape.top_k}),
       DecodePayloads(op, payloads, rows, shape.num_tokens, shape.capacity, decoded)});
  if (error.failure()) return error;
  params.topk_weights = DataOrNull(topk_weights);
  params.payloads = decoded.data();
  params.num_payloads = static_cast<int32_t>(decoded.size());
  params.row_map = row_map->typed_data();
  params.permuted_weights = weighted ? permuted_weights->typed_data() : nullptr;
  params.group_sizes = group_sizes->typed_data();
  params.tokens_per_expert = tokens_per_expert->typed_data();
  params.num_dropped = num_dropped->typed_data();
  params.chunk_counts = scratch->typed_data();
  params.routed_idx = params.chunk_counts + NumChunks(shape) * NumBins(shape);
  return Run(context, params);
}

template <typename Context>
typename Context::Result CachedPermute(Context context, ffi::BufferR2<ffi::S32> row_map,
                                       ffi::RemainingArgs payloads, ffi::RemainingRets rows,
                                       int64_t num_permuted) {
  CachedPermuteParams params{};
  std::vector<Payload> decoded;
  auto error =
      DecodePayloads("permute (cached)", payloads, rows, row_map.dimensions()[0], num_permuted, decoded);
  if (error.failure()) return error;
  params.num_rows = static_cast<int32_t>(row_map.dimensions()[0]);
  params.top_k = static_cast<int32_t>(row_map.dimensions()[1]);
  params.num_permuted = static_cast<int32_t>(num_permuted);
  params.row_map = row_map.typed_data();
  params.payloads = decoded.data();
  params.num_payloads = static_cast<int32_t>(decoded.size());
  return Run(context, params);
}

template <typename Context>
typename Context::Result Unpermute(Context context, ffi::AnyBuffer y, ffi::BufferR2<ffi::S32> row_map,
                                   FloatBuffer topk_weights, ffi::AnyBuffer bias, ffi::AnyBuffer topk_idx,
                                   ffi::Result<ffi::AnyBuffer> out) {
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
  if (topk_weights.element_count() > 0) {
    auto error = CheckShape("unpermute: topk_weights", topk_weights, {num_rows, top_k});
    if (error.failure()) return error;
  }
  if (bias.element_count() > 0) {
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
  params.y = {y.untyped_data(), out->untyped_data(), ElementsPerRow(y), *y_type};
  params.out_type = *out_type;
  params.topk_weights = DataOrNull(topk_weights);
  return Run(context, params);
}

// The operands and results, after the context.
template <typename Binding>
auto BindPermute(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // topk_idx [C, K]
      .template Arg<FloatBuffer>()     // topk_weights [C, K] or [0]
      .RemainingArgs()                 // payloads [C, ...]
      .template Ret<IntBuffer>()       // row_map [C, K]
      .template Ret<FloatBuffer>()     // permuted topk_weights [P] or [0]
      .template Ret<IntBuffer>()       // group_sizes [L]
      .template Ret<IntBuffer>()       // tokens_per_expert [L]
      .template Ret<IntBuffer>()       // num_dropped [1]
      .template Ret<IntBuffer>()       // scratch: counts of every chunk
      .RemainingRets()                 // rows [P, ...]
      .Attrs();
}

template <typename Binding>
auto BindCachedPermute(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::BufferR2<ffi::S32>>()  // row_map [C, K]
      .RemainingArgs()                          // payloads [C, ...]
      .RemainingRets()                          // rows [P, ...]
      .template Attr<int64_t>("num_permuted");
}

template <typename Binding>
auto BindUnpermute(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()           // y [P, ...]
      .template Arg<ffi::BufferR2<ffi::S32>>()  // row_map [C, K]
      .template Arg<FloatBuffer>()              // topk_weights [C, K] or [0]
      .template Arg<ffi::AnyBuffer>()           // bias [L, ...] or [0]
      .template Arg<ffi::AnyBuffer>()           // topk_idx [C, K], read with a bias
      .template Ret<ffi::AnyBuffer>();          // out [C, ...]
}

}  // namespace jax_ep
