#include "handlers/check.h"
#include "handlers/handlers.h"
#include "handlers/routing.h"
#include "host/ops.h"

namespace jax_ep {
namespace {

struct CombineShare final : Share {
  CombineParams params{};
  std::vector<Summand> summands;
  std::vector<Bias> biases;

  void Move(const std::vector<Share*>& shares) override {
    std::vector<const CombineParams*> ranks;
    for (Share* share : shares) ranks.push_back(&static_cast<CombineShare*>(share)->params);
    host::Combine(ranks, params.rank);
  }
};

ffi::ErrorOr<std::unique_ptr<CallSite>> InstantiateCombine() { return std::make_unique<CallSite>("combine"); }

// The operands are the summands, then the biases of the one summand.
ffi::Error DecodeSums(const Shape& shape, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                      CombineShare& share) {
  const char* op = "combine";
  if (args.size() < rets.size() || (args.size() > rets.size() && rets.size() != 1)) {
    return InvalidArgument(op,
                           ": expected one result for each summed array, and biases only with one of them");
  }
  for (size_t i = 0; i < args.size(); ++i) {
    auto arg = args.get<ffi::AnyBuffer>(i);
    if (arg.has_error()) return arg.error();
    auto ret = rets.get<ffi::AnyBuffer>(std::min(i, rets.size() - 1));
    if (ret.has_error()) return ret.error();
    const bool is_bias = i >= rets.size();
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
      share.biases.push_back({rows.untyped_data(), *type});
    } else {
      share.summands.push_back({rows.untyped_data(), out.untyped_data(), ElementsPerRow(rows), *type});
    }
  }
  return ffi::Error::Success();
}

ffi::Future Combine(ffi::RunId run, int32_t device, CallSite* site, ffi::BufferR0<ffi::S32> rank,
                    IntBuffer topk_idx, IntBuffer token_rows, FloatBuffer row_weights,
                    FloatBuffer recv_topk_weights, ffi::RemainingArgs args,
                    ffi::Result<FloatBuffer> topk_weights, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  const char* op = "combine";
  auto share = std::make_unique<CombineShare>();
  CombineParams& params = share->params;
  Seat seat;
  if (auto error = DecodeShape(op, attrs, topk_idx.dimensions(), params.shape); error.failure()) {
    return Failed(error);
  }
  const Shape& shape = params.shape;
  const bool weighted = row_weights.element_count() > 0;
  const bool returns_weights = recv_topk_weights.element_count() > 0;
  auto error = FirstError(
      {CheckShape("combine: handle.token_rows", token_rows, {shape.num_tokens, shape.rows_per_token()}),
       weighted ? CheckShape("combine: topk_weights", row_weights, {shape.capacity}) : ffi::Error::Success(),
       returns_weights
           ? CheckShape("combine: received topk_weights", recv_topk_weights, RecvWeightsShape(shape))
           : ffi::Error::Success(),
       returns_weights
           ? CheckShape("combine: returned topk_weights", *topk_weights, {shape.num_tokens, shape.top_k})
           : ffi::Error::Success(),
       DecodeSums(shape, args, rets, *share),
       FindSeat(op, attrs, device, *rank.typed_data(), shape.num_ranks, seat)});
  if (error.failure()) return Failed(error);

  params.rank = seat.place.rank;
  params.handle.topk_idx = topk_idx.typed_data();
  params.handle.token_rows = token_rows.typed_data();
  params.summands = share->summands.data();
  params.num_summands = static_cast<int32_t>(share->summands.size());
  params.row_weights = DataOrNull(row_weights);
  params.biases = share->biases.data();
  params.num_biases = static_cast<int32_t>(share->biases.size());
  params.recv_topk_weights = DataOrNull(recv_topk_weights);
  params.topk_weights = returns_weights ? topk_weights->typed_data() : nullptr;
  return Meet(*site, run.run_id, std::move(seat), std::move(share));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CombineInstantiate, InstantiateCombine, ffi::Ffi::BindInstantiate());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CombineHandler, Combine,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<CallSite>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // rank
                                  .Arg<IntBuffer>()                // handle.topk_idx [T, K]
                                  .Arg<IntBuffer>()                // handle.token_rows [T, R | K]
                                  .Arg<FloatBuffer>()              // weight of each row [C] or [0]
                                  .Arg<FloatBuffer>()  // received topk_weights [C, K] | [C] or [0]
                                  .RemainingArgs()     // rows [C, ...], then biases [T, ...]
                                  .Ret<FloatBuffer>()  // returned topk_weights [T, K] or [0]
                                  .RemainingRets()     // sums [T, ...]
                                  .Attrs());

}  // namespace jax_ep
