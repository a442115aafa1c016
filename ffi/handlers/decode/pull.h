// Decodes the operands of a pull for any platform, then calls RunPull(context, ...).
#pragma once

#include "handlers/decode/routing.h"

namespace jax_ep {

// Returns the size of a summand's `partial`, if the kernels need it.
inline int64_t PartialBytes(const PullParams& params, const Summand& summand) {
  const Shape& shape = params.shape;
  if (params.quantize == Quantize::kNone) {
    return int64_t{shape.num_ranks} * shape.num_tokens * summand.num_elements * BytesOf(summand.type);
  }
  return Fp8Bytes(shape.num_partials() * summand.num_elements);
}

// Decodes the summands, then the biases of a single summand. The results are the sums, then as many arrays of
// partial sums, of which those that the kernels do not need are empty.
inline ffi::Error DecodeSums(const char* op, const std::vector<ffi::AnyBuffer>& args,
                             const std::vector<ffi::AnyBuffer>& rets, PullParams& params) {
  const Shape& shape = params.shape;
  const size_t num_sums = rets.size() / 2;
  if (rets.size() % 2 != 0 || args.size() < num_sums || (args.size() > num_sums && num_sums != 1)) {
    return InvalidArgument(op,
                           ": expected two results for each summed array, and biases only with a single one");
  }
  for (size_t i = 0; i < args.size(); ++i) {
    const bool is_bias = i >= num_sums;
    const ffi::AnyBuffer &rows = args[i], &out = rets[is_bias ? 0 : i];
    const auto type = FloatOfType(rows.element_type());
    if (!type) return InvalidArgument(op, ": operand ", i, " must be float16, bfloat16, float32 or float64");
    const int64_t num_rows = is_bias ? shape.num_tokens : shape.capacity;
    if (rows.dimensions().size() == 0 || rows.dimensions()[0] != num_rows || out.dimensions().size() == 0 ||
        out.dimensions()[0] != shape.num_tokens || ElementsPerRow(rows) != ElementsPerRow(out) ||
        (!is_bias && rows.element_type() != out.element_type())) {
      return InvalidArgument(op, ": operand ", i, " must have ", num_rows, " rows, and its result ",
                             shape.num_tokens, " rows of the same shape");
    }
    if (auto error = CheckProduct(op, "elements of a row", {ElementsPerRow(rows)}); error.failure()) {
      return error;
    }
    if (is_bias) {
      params.biases.push_back({rows.untyped_data(), *type});
      continue;
    }
    const bool quantizes = params.quantize != Quantize::kNone;
    if (quantizes && (*type == Float::kF64 || ElementsPerRow(rows) % kFp8Block != 0 || num_sums != 1)) {
      return InvalidArgument(op,
                             ": sums that are quantized must be those of one array of float16, bfloat16 or "
                             "float32, whose rows are multiples of ",
                             kFp8Block, " elements");
    }
    const ffi::AnyBuffer& partial = rets[num_sums + i];
    const auto bytes = static_cast<int64_t>(partial.size_bytes());
    Summand summand{rows.untyped_data(), out.untyped_data(), ElementsPerRow(rows), *type,
                    bytes == 0 ? nullptr : partial.untyped_data()};
    const int64_t expected = PartialBytes(params, summand);
    const ffi::DataType expected_type = quantizes ? ffi::U8 : rows.element_type();
    if (partial.element_type() != expected_type || (bytes != 0 && bytes != expected)) {
      return InvalidArgument(op, ": partial sum ", i, " must have no bytes or ", expected, ", got ", bytes);
    }
    params.summands.push_back(summand);
  }
  return ffi::Error::Success();
}

template <typename Context>
typename Context::Result Pull(Context context, const std::vector<ffi::AnyBuffer>& args,
                              const std::vector<ffi::AnyBuffer>& rets, RoutingAttributes attributes) {
  const char* op = "combine";
  PullParams params{};
  Shape& shape = params.shape;
  Arrays in(op, args), out(op, rets);
  params.position_operand = in.TakePosition();
  if (auto error = MakeShape(op, attributes, in.Peek(), shape); error.failure()) return Context::Fail(error);
  params.handle = TakeHandle(in, shape);
  params.row_weights = in.TakeFloats("row_weights", {shape.capacity}, in.NextIsGiven());
  const bool returns_weights = in.NextIsGiven();
  params.arrived_weights = in.TakeFloats("arrived weights", ArrivedWeightsShape(shape), returns_weights);
  params.topk_weights = out.TakeFloats("topk_weights", {shape.num_tokens, shape.top_k}, returns_weights);
  // The kernels publish a single array of weights: those of the rows, or those to return.
  if (params.row_weights != nullptr && returns_weights) {
    return Context::Fail(InvalidArgument(op, ": row_weights and weights to return exclude each other"));
  }
  params.attendance = TakeAttendance(in, out, attributes);
  if (auto error = TakeQuantize(op, attributes, params.quantize); error.failure()) {
    return Context::Fail(error);
  }
  if (params.quantize != Quantize::kNone && returns_weights) {
    return Context::Fail(InvalidArgument(op, ": sums are not quantized together with weights to return"));
  }
  // The rows [C, ...] follow, then biases [T, ...].
  // The sums [T, ...] follow, then scratch: partial sums.
  if (auto error = FirstError({in.error(), out.error()}); error.failure()) return Context::Fail(error);
  GroupMember member;
  auto error =
      FirstError({DecodeSums(op, in.Rest(), out.Rest(), params),
                  FindMember(op, attributes.group, context.FindGroup(attributes.group), context.device,
                             context.ReadPosition(params.position_operand), shape.num_ranks, member)});
  if (error.failure()) return context.FailRun(std::move(error));
  params.rank = member.position.rank;
  params.num_summands = static_cast<int32_t>(params.summands.size());
  params.num_biases = static_cast<int32_t>(params.biases.size());
  return RunPull(context, op, std::move(member), std::move(params));
}

template <typename Context>
typename Context::Result PullArrays(Context context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                    RoutingAttributes attributes) {
  return Pull(context, BuffersOf(args), BuffersOf(rets), attributes);
}

}  // namespace jax_ep
