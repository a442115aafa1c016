// Sums through rings: one warp of a team looks up the rows of a sum and loads them, and the others add them.
#pragma once

#include "kernels/pull/fold.cuh"
#include "kernels/pull/sources.cuh"

namespace jax_ep::cuda {

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
  // Rows are looked up two sums ahead, and their weights one sum ahead.
  FoldTasks tasks(args, counts, 1);
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
    inputs.lanes = __ballot_sync(kAllLanes, is_row);
    if (__popc(inputs.lanes) < 2) {
      CountFolds(args, session, counts, task.wave, summers);
      continue;
    }
    for (int a = 0; a < args.num_summands; ++a) {
      const int64_t width = args.summands[a].num_elements;
      if (is_row) inputs.row = static_cast<const T*>(args.summands[a].rows) + int64_t{task.row} * width;
      PutSum<T>(ring, inputs, a, width, task.global_token, a == args.num_summands - 1 ? task.wave : -1);
    }
  }
  EndPhase(ring);
}

// A token whose sum comes next.
template <typename T>
struct PullTask {
  int token;
  SumInputs<T> inputs;
};

// Pulls the tokens in order, ticket by ticket.
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
    const auto find = [&](PullTask<T>& task) {
      task.token = next_token;
      if (next_token >= num_tokens) return;
      const Destination destination = FindDestination(args.shape, entry, lane);
      task.inputs = FindSumInputs<T>(args, published, i, next_token, destination, lane);
    };
    // Destinations are looked up two tokens ahead, and the peers' weights one token ahead. Loaded values are
    // not touched before they are needed, not even to move them, because that would wait for the load.
    const auto pull = [&](const PullTask<T>& task, PullTask<T>& next) {
      if (task.token >= num_tokens) return false;
      find(next);
      look_up();
      if (args.folds && args.waves.Of(task.token) != awaited_wave) {
        awaited_wave = args.waves.Of(task.token);
        in_time = session.AwaitWave(awaited_wave);
        if (!in_time) return false;
        FenceBulk();
      }
      PutSum<T>(ring, task.inputs, i, args.summands[i].num_elements, task.token, -1);
      return true;
    };
    PullTask<T> even, odd;
    look_up();
    find(even);
    look_up();
    while (pull(even, odd) && pull(odd, even)) {
    }
  }
  EndPhase(ring);
}

}  // namespace jax_ep::cuda
