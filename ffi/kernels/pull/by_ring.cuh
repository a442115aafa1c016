// Sums through rings: one warp of a team looks up the rows of a sum and loads them, and the others add them.
#pragma once

#include "kernels/pull/fold.cuh"
#include "kernels/pull/sources.cuh"

namespace jax_ep::cuda {

static_assert(kMaxRingRows == kWarp, "a lane of the warp that loads stands for each row");

// Folds as Fold does. Each processing warp of a team counts the sums that it has stored.
template <typename T>
__device__ void FoldByRing(const PullArgs& args, const Session& session, Ring& ring) {
  constexpr int N = 16 / sizeof(T);
  __shared__ FoldCounts counts;
  const int lane = threadIdx.x % kWarp, summers = args.ring.summers;
  counts.Init(args, summers);
  if (!ring.loads()) {
    SumRows<T>(ring, [&](const Target& target, int first, const auto& total) {
      const Summand& summand = args.summands[target.array];
      T* const partial = static_cast<T*>(summand.partial) + target.number * summand.num_elements;
      StoreSlice<T, N, kRingVectors>(partial, first, static_cast<int>(summand.num_elements), lane, total);
      if (target.wave >= 0) CountFolds(args, session, counts, target.wave, 1);
    });
    return;
  }
  const auto factor_of = [&](const FoldTask& task) {
    const bool weighs = args.row_weights != nullptr && IsRow(task.row, args.shape.capacity);
    return weighs ? args.row_weights[task.row] : 1.0f;
  };
  const int top_k = args.shape.top_k, first_lane = lane / top_k * top_k;
  const unsigned lanes_of_sum = (kAllLanes >> (kWarp - top_k)) << first_lane;
  // Rows are looked up two tickets ahead, and their weights one ticket ahead.
  FoldTasks<1> tasks(args, counts, args.sums_per_ticket);
  FoldTask task, next, upcoming;
  bool has_next = tasks.Take(&next, lane);
  float factor = has_next ? factor_of(next) : 1.0f;
  bool has_upcoming = has_next && tasks.Take(&upcoming, lane);
  while (has_next) {
    task = next;
    SumInputs<T> inputs{nullptr, factor, 0};
    next = upcoming;
    has_next = has_upcoming;
    if (has_next) factor = factor_of(next);
    has_upcoming = has_upcoming && tasks.Take(&upcoming, lane);
    const bool is_row = IsRow(task.row, args.shape.capacity);
    const auto put = [&](unsigned lanes, int global_token) {
      inputs.lanes = lanes;
      for (int a = 0; a < args.num_summands; ++a) {
        const int64_t width = args.summands[a].num_elements;
        if (is_row) inputs.row = static_cast<const T*>(args.summands[a].rows) + int64_t{task.row} * width;
        PutSum<T>(ring, inputs, nullptr, a, width, global_token, a == args.num_summands - 1 ? task.wave : -1);
      }
    };
    const unsigned row_lanes = __ballot_sync(kAllLanes, is_row);
    int skipped = task.num_sums;
    if (args.sums_per_ticket == 1) {
      if (__popc(row_lanes) > 1) {
        put(row_lanes, task.global_token);
        skipped = 0;
      }
    } else {
      const unsigned lanes = row_lanes & lanes_of_sum;
      // The first lanes of the sums that have several rows.
      unsigned sums = __ballot_sync(kAllLanes, lane == first_lane && __popc(lanes) > 1);
      skipped -= __popc(sums);
      for (; sums != 0; sums &= sums - 1) {
        const int sum = __ffs(static_cast<int>(sums)) - 1;
        put(__shfl_sync(kAllLanes, lanes, sum), __shfl_sync(kAllLanes, task.global_token, sum));
      }
    }
    if (skipped > 0) CountFolds(args, session, counts, task.wave, skipped * summers);
  }
  EndPhase(ring);
}

// Pulls the tokens in order, ticket by ticket. The last request of each array may still be in flight at the
// end. Session::Leave puts it before the reset of the counter.
template <typename T>
__device__ void PullByRing(const PullArgs& args, const Session& session, Ring& ring,
                           const Published* published) {
  constexpr int N = 16 / sizeof(T);
  const int lane = threadIdx.x % kWarp, num_tokens = args.shape.num_tokens;
  if (!ring.loads()) {
    SumRows<T>(ring, [&](const Target& target, int first, auto& total) {
      const Summand& summand = args.summands[target.array];
      const int width = static_cast<int>(summand.num_elements);
      AddBiases<T, N, kRingVectors>(args.biases, args.num_biases, target.number, first, width, lane, total);
      T* const out = static_cast<T*>(summand.out) + int64_t{target.number} * width;
      StoreSlice<T, N, kRingVectors>(out, first, width, lane, total);
    });
    return;
  }
  FenceBulk();            // the peers' rows were stored before what this warp has read of them
  int awaited_wave = -1;  // the wave waited for last; later tickets are never of an earlier wave
  bool in_time = true;
  for (int i = 0; i < args.num_summands && in_time; ++i) {
    const TicketCounter tickets{&args.peers.own().sent[i]};
    unsigned requested = tickets.Request(lane);
    int next_token = num_tokens;
    HandleEntry entry;
    const auto look_up = [&] {
      next_token = TicketCounter::Broadcast(requested);
      requested = tickets.Request(lane);
      if (next_token < num_tokens) entry = LoadHandleEntry(args.shape, args.handle, next_token, lane);
    };
    // The next token is looked up while the rows of this one are put into the ring, where their weights
    // arrive too. Loaded values are not touched before they are needed, because that would wait for the load.
    // With a `continue` in this loop, nvcc 13.0 copies the requested ticket at once, and so waits for it.
    look_up();
    while (next_token < num_tokens) {
      const int token = next_token;
      const Destination destination = FindDestination(args.shape, entry, lane);
      look_up();
      const SumSources<T> sources = FindSumSources<T>(args, published, i, token, destination, lane);
      if (args.folds && args.waves.Of(token) != awaited_wave) {
        awaited_wave = args.waves.Of(token);
        in_time = session.AwaitWave(awaited_wave);
        if (!in_time) break;
        FenceBulk();
      }
      PutSum<T>(ring, {sources.row, 1.0f, sources.lanes}, sources.weight, i, args.summands[i].num_elements,
                token, -1, !args.adds_in_place);
    }
  }
  EndPhase(ring);
}

}  // namespace jax_ep::cuda
