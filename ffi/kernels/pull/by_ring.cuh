// Sums by rings: one warp of a team finds out what a sum is made of, the others sum it.
#pragma once

#include "kernels/pull/find.cuh"
#include "kernels/pull/fold.cuh"

namespace jax_ep::cuda {

// As Fold. Each of a team's warps that sums counts what it has stored.
template <typename T>
__device__ void FoldByRing(const PullArgs& args, const Session& session, Ring& ring) {
  constexpr int N = 16 / sizeof(T);
  __shared__ FoldCounts counts;
  const int lane = threadIdx.x % kWarp, summers = args.ring.summers;
  counts.Init(args, summers);
  if (!ring.loads()) {
    SumRows<T>(ring, [&](const Goal& goal, int first, const auto& total) {
      const Summand& summand = args.summands[goal.array];
      T* const partial = static_cast<T*>(summand.partial) + goal.number * summand.num_elements;
      StoreSlice<T, N, kRingVectors>(partial, first, static_cast<int>(summand.num_elements), lane, total);
      if (goal.wave >= 0) CountFolds(args, session, counts, goal.wave, 1);
    });
    return;
  }
  const auto factor_of = [&](const FoldTask& task) {
    const bool weighs = args.row_weights != nullptr && IsRow(task.row, args.shape.capacity);
    return weighs ? args.row_weights[task.row] : 1.0f;
  };
  // Rows are looked up two sums ahead, and their weights one.
  FoldTasks tasks(args, counts, 1);
  FoldTask task, next, coming;
  bool has_next = tasks.Take(&next, lane);
  float factor = has_next ? factor_of(next) : 1.0f;
  bool has_coming = has_next && tasks.Take(&coming, lane);
  while (has_next) {
    task = next;
    Terms<T> terms{nullptr, factor, 0};
    next = coming;
    has_next = has_coming;
    if (has_next) factor = factor_of(next);
    has_coming = has_coming && tasks.Take(&coming, lane);
    const bool is_row = IsRow(task.row, args.shape.capacity);
    terms.lanes = __ballot_sync(kAllLanes, is_row);
    if (__popc(terms.lanes) < 2) {
      CountFolds(args, session, counts, task.wave, summers);
      continue;
    }
    for (int a = 0; a < args.num_summands; ++a) {
      const int64_t width = args.summands[a].num_elements;
      if (is_row) terms.row = static_cast<const T*>(args.summands[a].rows) + int64_t{task.row} * width;
      PutSum<T>(ring, terms, a, width, task.global_token, a == args.num_summands - 1 ? task.wave : -1);
    }
  }
  EndNotes(ring);
}

// A token whose sum is next.
template <typename T>
struct Task {
  int token;
  Terms<T> terms;
};

// The tokens in their order, a ticket of the dealer after the other.
template <typename T>
__device__ void PullByRing(const PullArgs& args, const Session& session, Ring& ring,
                           const Published* published) {
  constexpr int N = 16 / sizeof(T);
  const int lane = threadIdx.x % kWarp, num_tokens = args.shape.num_tokens;
  if (!ring.loads()) {
    SumRows<T>(ring, [&](const Goal& goal, int first, auto& total) {
      const Summand& summand = args.summands[goal.array];
      const int width = static_cast<int>(summand.num_elements);
      AddBiases<T, N, kRingVectors>(args.biases, args.num_biases, goal.number, first, width, lane, total);
      T* const out = static_cast<T*>(summand.out) + int64_t{goal.number} * width;
      StoreSlice<T, N, kRingVectors>(out, first, width, lane, total);
    });
    return;
  }
  FenceBulk();      // the peers' rows were there before what this warp has read of them
  int folded = -1;  // the last wave that was waited for; later tickets never belong to an earlier one
  bool in_time = true;
  for (int i = 0; i < args.num_summands && in_time; ++i) {
    const Dealer dealer{&args.peers.own().sent[i]};
    unsigned asked = dealer.Take(lane);
    int coming = num_tokens;
    LoadedPlace place;
    const auto look_up = [&] {
      coming = Dealer::Show(asked);
      asked = dealer.Take(lane);
      if (coming < num_tokens) place = LoadPlace(args.shape, args.handle, coming, lane);
    };
    const auto find = [&](Task<T>& task) {
      task.token = coming;
      if (coming >= num_tokens) return;
      const Source source = FindSource(args, FindPlace(args.shape, place, lane), lane);
      task.terms = FindTerms<T>(args, published, i, coming, source, lane);
    };
    // Two tokens ahead the places are being loaded, and one ahead the peers' weights: what is loaded is not
    // touched before it is needed, not even to be kept elsewhere.
    const auto pull = [&](const Task<T>& task, Task<T>& next) {
      if (task.token >= num_tokens) return false;
      find(next);
      look_up();
      if (args.folds && args.waves.Of(task.token) != folded) {
        folded = args.waves.Of(task.token);
        in_time = session.AwaitWave(folded);
        if (!in_time) return false;
        FenceBulk();
      }
      PutSum<T>(ring, task.terms, i, args.summands[i].num_elements, task.token, -1);
      return true;
    };
    Task<T> one, other;
    look_up();
    find(one);
    look_up();
    while (pull(one, other) && pull(other, one)) {
    }
  }
  EndNotes(ring);
}

}  // namespace jax_ep::cuda
