// Decodes the operands of combine for any platform, then calls Run(context, ...), which does the work.
#pragma once

#include "handlers/check.h"
#include "handlers/routing.h"

namespace jax_ep {

struct Sums {
  std::vector<Summand> summands;
  std::vector<Bias> biases;
};

// The operands are the summands, then the biases of the one summand. The results are the sums, then as many
// partial sums: of R * T rows or, where the kernels need none, of none.
inline ffi::Error DecodeSums(const Shape& shape, const ffi::RemainingArgs& args,
                             const ffi::RemainingRets& rets, Sums& sums) {
  const char* op = "combine";
  const size_t num_sums = rets.size() / 2;
  if (rets.size() % 2 != 0 || args.size() < num_sums || (args.size() > num_sums && num_sums != 1)) {
    return InvalidArgument(op,
                           ": expected two results for each summed array, and biases only with one of them");
  }
  for (size_t i = 0; i < args.size(); ++i) {
    auto arg = args.get<ffi::AnyBuffer>(i);
    if (arg.has_error()) return arg.error();
    const bool is_bias = i >= num_sums;
    auto ret = rets.get<ffi::AnyBuffer>(is_bias ? 0 : i);
    if (ret.has_error()) return ret.error();
    const ffi::AnyBuffer& rows = *arg;
    const ffi::AnyBuffer& out = **ret;
    const auto type = FloatOfType(rows.element_type());
    if (!type) return InvalidArgument(op, ": operand ", i, " must be float16, bfloat16, float32 or float64");
    const int64_t num_rows = is_bias ? shape.num_tokens : shape.capacity;
    if (rows.dimensions().size() == 0 || rows.dimensions()[0] != num_rows || out.dimensions().size() == 0 ||
        out.dimensions()[0] != shape.num_tokens || ElementsPerRow(rows) != ElementsPerRow(out) ||
        (!is_bias && rows.element_type() != out.element_type())) {
      return InvalidArgument(op, ": operand ", i, " must have ", num_rows, " rows, and its result ",
                             shape.num_tokens, " rows of the same shape");
    }
    if (is_bias) {
      sums.biases.push_back({rows.untyped_data(), *type});
    } else {
      auto partial = rets.get<ffi::AnyBuffer>(num_sums + i);
      if (partial.has_error()) return partial.error();
      const int64_t elements = (*partial)->element_count();
      const int64_t expected = int64_t{shape.num_ranks} * shape.num_tokens * ElementsPerRow(rows);
      if ((*partial)->element_type() != rows.element_type() || (elements != 0 && elements != expected)) {
        return InvalidArgument(op, ": partial sum ", i, " must have no elements or ", expected, ", got ",
                               elements);
      }
      sums.summands.push_back({rows.untyped_data(), out.untyped_data(), ElementsPerRow(rows), *type,
                               elements == 0 ? nullptr : (*partial)->untyped_data()});
    }
  }
  return ffi::Error::Success();
}

template <typename Context>
typename Context::Result Combine(Context context, ffi::BufferR0<ffi::S32> rank, IntBuffer topk_idx,
                                 IntBuffer token_rows, IntBuffer row_map, FloatBuffer row_weights,
                                 FloatBuffer recv_topk_weights, ffi::RemainingArgs args,
                                 ffi::Result<FloatBuffer> topk_weights, ffi::RemainingRets rets,
                                 ffi::Dictionary attrs) {
  const char* op = "combine";
  CombineParams params{};
  Sums sums;
  Seat seat;
  if (auto error = DecodeShape(op, attrs, topk_idx.dimensions(), params.shape); error.failure()) {
    return Context::Fail(error);
  }
  const Shape& shape = params.shape;
  const bool weighted = row_weights.element_count() > 0;
  const bool returns_weights = recv_topk_weights.element_count() > 0;
  auto error = FirstError(
      {CheckShape("combine: handle.token_rows", token_rows, {shape.num_tokens, shape.rows_per_token()}),
       CheckShape("combine: handle.row_map", row_map, RowMapShape(shape)),
       weighted ? CheckShape("combine: topk_weights", row_weights, {shape.capacity}) : ffi::Error::Success(),
       returns_weights
           ? CheckShape("combine: received topk_weights", recv_topk_weights, RecvWeightsShape(shape))
           : ffi::Error::Success(),
       returns_weights
           ? CheckShape("combine: returned topk_weights", *topk_weights, {shape.num_tokens, shape.top_k})
           : ffi::Error::Success(),
       DecodeSums(shape, args, rets, sums),
       FindSeat(op, attrs, context.device, context.ReadRank(rank), shape.num_ranks, seat)});
  if (error.failure()) return Context::Fail(error);

  params.rank = seat.place.rank;
  params.rank_operand = rank.typed_data();
  params.handle.topk_idx = topk_idx.typed_data();
  params.handle.token_rows = token_rows.typed_data();
  params.handle.row_map = row_map.typed_data();
  params.row_weights = DataOrNull(row_weights);
  params.recv_topk_weights = DataOrNull(recv_topk_weights);
  params.topk_weights = returns_weights ? topk_weights->typed_data() : nullptr;
  return Run(context, std::move(seat), params, std::move(sums));
}

// The operands and results, after the context.
template <typename Binding>
auto BindCombine(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::BufferR0<ffi::S32>>()  // rank
      .template Arg<IntBuffer>()                // handle.topk_idx [T, K]
      .template Arg<IntBuffer>()                // handle.token_rows [T, R | K]
      .template Arg<IntBuffer>()                // handle.row_map [R * T, K] or [0, K]
      .template Arg<FloatBuffer>()              // weight of each row [C] or [0]
      .template Arg<FloatBuffer>()              // received topk_weights [C, K] | [C] or [0]
      .RemainingArgs()                          // rows [C, ...], then biases [T, ...]
      .template Ret<FloatBuffer>()              // returned topk_weights [T, K] or [0]
      .RemainingRets()                          // sums [T, ...], then scratch: partial sums
      .Attrs();
}

}  // namespace jax_ep
