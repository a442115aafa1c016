#include "handlers/check.h"
#include "handlers/handlers.h"
#include "handlers/routing.h"
#include "host/ops.h"

namespace jax_ep {
namespace {

struct DispatchShare final : Share {
  DispatchParams params{};
  std::vector<Payload> payloads;
  host::SendCounts counts;

  void Move(const std::vector<Share*>& shares) override {
    std::vector<const DispatchParams*> ranks;
    std::vector<const host::SendCounts*> all_counts;
    for (Share* share : shares) {
      ranks.push_back(&static_cast<DispatchShare*>(share)->params);
      all_counts.push_back(&static_cast<DispatchShare*>(share)->counts);
    }
    host::Dispatch(ranks, all_counts, params.rank);
  }
};

struct CachedDispatchShare final : Share {
  CachedDispatchParams params{};
  std::vector<Payload> payloads;

  void Move(const std::vector<Share*>& shares) override {
    std::vector<const CachedDispatchParams*> ranks;
    for (Share* share : shares) ranks.push_back(&static_cast<CachedDispatchShare*>(share)->params);
    host::CachedDispatch(ranks, params.rank);
  }
};

ffi::ErrorOr<std::unique_ptr<CallSite>> InstantiateDispatch() {
  return std::make_unique<CallSite>("dispatch");
}

ffi::ErrorOr<std::unique_ptr<CallSite>> InstantiateCachedDispatch() {
  return std::make_unique<CallSite>("dispatch (cached)");
}

ffi::Future Dispatch(ffi::RunId run, int32_t device, CallSite* site, ffi::BufferR0<ffi::S32> rank,
                     ffi::AnyBuffer topk_idx, FloatBuffer topk_weights, ffi::RemainingArgs payloads,
                     ffi::Result<IntBuffer> routed_idx, ffi::Result<IntBuffer> token_rows,
                     ffi::Result<IntBuffer> rank_prefix_matrix, ffi::Result<IntBuffer> expert_counts,
                     ffi::Result<FloatBuffer> recv_topk_weights, ffi::Result<IntBuffer> recv_topk_idx,
                     ffi::Result<IntBuffer> tokens_per_expert, ffi::Result<IntBuffer> group_sizes,
                     ffi::Result<IntBuffer> num_tokens, ffi::Result<IntBuffer> num_dropped,
                     ffi::RemainingRets rows, ffi::Dictionary attrs) {
  const char* op = "dispatch";
  auto share = std::make_unique<DispatchShare>();
  DispatchParams& params = share->params;
  Seat seat;
  if (auto error = FirstError({DecodeShape(op, attrs, topk_idx.dimensions(), params.shape),
                               DecodeIds("dispatch: topk_idx", topk_idx, params.topk_idx)});
      error.failure()) {
    return Failed(error);
  }
  const Shape& shape = params.shape;
  const bool by_rank = shape.order == Order::kRank;
  const bool weighted = topk_weights.element_count() > 0;
  auto error = FirstError(
      {CheckHandle(op, shape, *routed_idx, *token_rows, *rank_prefix_matrix, *expert_counts),
       weighted ? CheckShape("dispatch: topk_weights", topk_weights, {shape.num_tokens, shape.top_k})
                : ffi::Error::Success(),
       weighted ? CheckShape("dispatch: received topk_weights", *recv_topk_weights, RecvWeightsShape(shape))
                : ffi::Error::Success(),
       by_rank ? CheckShape("dispatch: received topk_idx", *recv_topk_idx, {shape.capacity, shape.top_k})
               : CheckShape("dispatch: group_sizes", *group_sizes, {shape.num_local_experts()}),
       CheckShape("dispatch: tokens_per_expert", *tokens_per_expert, {shape.num_local_experts()}),
       CheckShape("dispatch: num_tokens", *num_tokens, {1}),
       CheckShape("dispatch: num_dropped", *num_dropped, {1}),
       DecodePayloads(op, payloads, rows, shape.num_tokens, shape.capacity, share->payloads),
       FindSeat(op, attrs, device, *rank.typed_data(), shape.num_ranks, seat)});
  if (error.failure()) return Failed(error);

  params.rank = seat.place.rank;
  params.topk_weights = DataOrNull(topk_weights);
  params.payloads = share->payloads.data();
  params.num_payloads = static_cast<int32_t>(share->payloads.size());
  params.handle = {routed_idx->typed_data(), token_rows->typed_data(), rank_prefix_matrix->typed_data(),
                   expert_counts->typed_data()};
  params.recv_topk_weights = weighted ? recv_topk_weights->typed_data() : nullptr;
  params.recv_topk_idx = by_rank ? recv_topk_idx->typed_data() : nullptr;
  params.tokens_per_expert = tokens_per_expert->typed_data();
  params.group_sizes = by_rank ? nullptr : group_sizes->typed_data();
  params.num_tokens = num_tokens->typed_data();
  params.num_dropped = num_dropped->typed_data();
  share->counts = host::Count(params);
  return Meet(*site, run.run_id, std::move(seat), std::move(share));
}

ffi::Future CachedDispatch(ffi::RunId run, int32_t device, CallSite* site, ffi::BufferR0<ffi::S32> rank,
                           IntBuffer topk_idx, IntBuffer token_rows, IntBuffer rank_prefix_matrix,
                           IntBuffer expert_counts, FloatBuffer topk_weights, ffi::RemainingArgs payloads,
                           ffi::Result<FloatBuffer> recv_topk_weights, ffi::RemainingRets rows,
                           ffi::Dictionary attrs) {
  const char* op = "dispatch (cached)";
  auto share = std::make_unique<CachedDispatchShare>();
  CachedDispatchParams& params = share->params;
  Seat seat;
  if (auto error = DecodeShape(op, attrs, topk_idx.dimensions(), params.shape); error.failure()) {
    return Failed(error);
  }
  const Shape& shape = params.shape;
  const bool weighted = topk_weights.element_count() > 0;
  auto error = FirstError(
      {CheckHandle(op, shape, topk_idx, token_rows, rank_prefix_matrix, expert_counts),
       weighted ? CheckShape("dispatch (cached): topk_weights", topk_weights, {shape.num_tokens, shape.top_k})
                : ffi::Error::Success(),
       weighted ? CheckShape("dispatch (cached): received topk_weights", *recv_topk_weights,
                             RecvWeightsShape(shape))
                : ffi::Error::Success(),
       DecodePayloads(op, payloads, rows, shape.num_tokens, shape.capacity, share->payloads),
       FindSeat(op, attrs, device, *rank.typed_data(), shape.num_ranks, seat)});
  if (error.failure()) return Failed(error);

  params.rank = seat.place.rank;
  params.handle = {topk_idx.typed_data(), token_rows.typed_data(), rank_prefix_matrix.typed_data(),
                   expert_counts.typed_data()};
  params.topk_weights = DataOrNull(topk_weights);
  params.recv_topk_weights = weighted ? recv_topk_weights->typed_data() : nullptr;
  params.payloads = share->payloads.data();
  params.num_payloads = static_cast<int32_t>(share->payloads.size());
  return Meet(*site, run.run_id, std::move(seat), std::move(share));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DispatchInstantiate, InstantiateDispatch, ffi::Ffi::BindInstantiate());

XLA_FFI_DEFINE_HANDLER_SYMBOL(DispatchHandler, Dispatch,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<CallSite>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // rank
                                  .Arg<ffi::AnyBuffer>()           // topk_idx [T, K]
                                  .Arg<FloatBuffer>()              // topk_weights [T, K] or [0]
                                  .RemainingArgs()                 // payloads [T, ...]
                                  .Ret<IntBuffer>()                // handle.topk_idx [T, K]
                                  .Ret<IntBuffer>()                // handle.token_rows [T, R | K]
                                  .Ret<IntBuffer>()                // handle.rank_prefix_matrix [R, R]
                                  .Ret<IntBuffer>()                // handle.expert_counts [L]
                                  .Ret<FloatBuffer>()  // received topk_weights [C, K] | [C] or [0]
                                  .Ret<IntBuffer>()    // received topk_idx [C, K] by rank, else [0]
                                  .Ret<IntBuffer>()    // tokens_per_expert [L]
                                  .Ret<IntBuffer>()    // group_sizes [L] by expert, else [0]
                                  .Ret<IntBuffer>()    // num_tokens [1]
                                  .Ret<IntBuffer>()    // num_dropped [1]
                                  .RemainingRets()     // rows [C, ...]
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CachedDispatchInstantiate, InstantiateCachedDispatch,
                              ffi::Ffi::BindInstantiate());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CachedDispatchHandler, CachedDispatch,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<CallSite>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // rank
                                  .Arg<IntBuffer>()                // handle.topk_idx [T, K]
                                  .Arg<IntBuffer>()                // handle.token_rows [T, R | K]
                                  .Arg<IntBuffer>()                // handle.rank_prefix_matrix [R, R]
                                  .Arg<IntBuffer>()                // handle.expert_counts [L]
                                  .Arg<FloatBuffer>()              // topk_weights [T, K] or [0]
                                  .RemainingArgs()                 // payloads [T, ...]
                                  .Ret<FloatBuffer>()  // received topk_weights [C, K] | [C] or [0]
                                  .RemainingRets()     // rows [C, ...]
                                  .Attrs());

}  // namespace jax_ep
