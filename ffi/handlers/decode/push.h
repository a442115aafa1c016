// Decodes the operands of pushes for any platform, then calls RunPush(context, ...).
#pragma once

#include "handlers/decode/routing.h"

namespace jax_ep {

// Finishes any push: decodes the rows, finds the rank's position in the group, and runs it.
template <typename Context>
typename Context::Result FinishPush(Context context, const char* op, PushParams params, Arrays& in,
                                    Arrays& out, std::string_view group) {
  const Shape& shape = params.shape;
  if (auto error = FirstError({in.error(), out.error()}); error.failure()) return Context::Fail(error);
  GroupMember member;
  const bool quantizes = params.quantize != Quantize::kNone;
  auto error =
      FirstError({quantizes ? DecodeQuantized(op, in.Rest(), out.Rest(), shape.num_tokens, shape.capacity,
                                              params.payloads, params.quantized_type)
                            : DecodePayloads(op, in.Rest(), out.Rest(), shape.num_tokens, shape.capacity,
                                             params.payloads, params.scales() ? &params : nullptr),
                  FindMember(op, group, context.FindGroup(group), context.device,
                             context.ReadPosition(params.position_operand), shape.num_ranks, member)});
  if (error.failure()) return context.FailRun(std::move(error));
  params.rank = member.position.rank;
  params.num_payloads = static_cast<int32_t>(params.payloads.size());
  return RunPush(context, op, std::move(member), std::move(params));
}

// Decodes a push that routes.
template <typename Context>
typename Context::Result Route(Context context, const std::vector<ffi::AnyBuffer>& args,
                               const std::vector<ffi::AnyBuffer>& rets, RoutingAttributes attributes) {
  const char* op = "dispatch";
  PushParams params{};
  Shape& shape = params.shape;
  Arrays in(op, args), out(op, rets);
  params.position_operand = in.TakePosition();
  if (auto error = MakeShape(op, attributes, in.Peek(), shape); error.failure()) return Context::Fail(error);
  params.topk_idx = in.TakeIds("topk_idx");
  const bool weighted = in.NextIsGiven();
  params.topk_weights = in.TakeFloats("topk_weights", {shape.num_tokens, shape.top_k}, weighted);
  params.handle = TakeHandle(out, shape);
  params.arrived_weights = out.TakeFloats("arrived weights", ArrivedWeightsShape(shape), weighted);
  params.arrived_idx =
      out.TakeInts("arrived topk_idx", {shape.capacity, shape.top_k}, !shape.has_row_per_choice());
  params.tokens_per_expert = out.TakeInts("tokens_per_expert", {shape.num_local_experts()});
  params.group_sizes = out.TakeInts("group_sizes", {shape.num_local_experts()}, shape.has_expert_blocks());
  params.num_tokens = out.TakeInts("num_tokens", {1});
  params.num_dropped = out.TakeInts("num_dropped", {1});
  params.chunk_counts = out.TakeInts("scratch", {int64_t{NumChunks(shape)} * NumBins(shape)});
  params.attendance = TakeAttendance(in, out, attributes);
  if (auto error = TakeQuantize(op, attributes, params.quantize); error.failure()) {
    return Context::Fail(error);
  }
  // The payloads [T, ...] follow.
  // The rows [C, ...] follow.
  return FinishPush(context, op, std::move(params), in, out, attributes.group);
}

template <typename Context>
typename Context::Result RouteArrays(Context context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                     RoutingAttributes attributes) {
  return Route(context, BuffersOf(args), BuffersOf(rets), attributes);
}

// Decodes a push along a handle. With weights of rows it scales, and the rows' dot products take the place of
// the weights that arrive.
template <typename Context>
typename Context::Result Push(Context context, const std::vector<ffi::AnyBuffer>& args,
                              const std::vector<ffi::AnyBuffer>& rets, RoutingAttributes attributes) {
  const char* op = "redispatch";
  PushParams params{};
  Shape& shape = params.shape;
  Arrays in(op, args), out(op, rets);
  params.position_operand = in.TakePosition();
  if (auto error = MakeShape(op, attributes, in.Peek(), shape); error.failure()) return Context::Fail(error);
  params.handle = TakeHandle(in, shape);
  const bool weighted = in.NextIsGiven();
  params.topk_weights = in.TakeFloats("topk_weights", {shape.num_tokens, shape.top_k}, weighted);
  const bool scales = in.NextIsGiven();
  params.row_weights = in.TakeFloats("row_weights", {shape.capacity}, scales);
  if (scales && (weighted || !shape.has_row_per_choice())) {
    return Context::Fail(
        InvalidArgument(op, ": only rows by expert can be scaled, and not together with other weights"));
  }
  // The payloads [T, ...] follow, then as many factors [C, ...] if it scales.

  params.arrived_weights = out.TakeFloats("arrived weights", ArrivedWeightsShape(shape), weighted || scales);
  // The rows [C, ...] follow.
  return FinishPush(context, op, std::move(params), in, out, attributes.group);
}

template <typename Context>
typename Context::Result PushArrays(Context context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                    RoutingAttributes attributes) {
  return Push(context, BuffersOf(args), BuffersOf(rets), attributes);
}

}  // namespace jax_ep
