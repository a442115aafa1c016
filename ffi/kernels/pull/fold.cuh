// Folds rows, by expert: sums a token's rows at one rank before the sum travels.
#pragma once

#include "kernels/pull/args.cuh"
#include "kernels/rows/sum.cuh"

namespace jax_ep::cuda {

constexpr int kFoldWarps = 2;  // warps that share the slices of a sum

// Folds one part of the slices of a token's rows at this rank, if there are several rows. Lane k holds the
// row of the k-th choice.
template <typename T, int N>
__device__ void FoldRows(const PullArgs& args, int index, int64_t global_token, int row, int part, int lane) {
  constexpr int kColumns = kSlice<N, kFewRowsVectors>;
  const Summand& summand = args.summands[index];
  const int width = static_cast<int>(summand.num_elements);
  SumInputs<T> inputs{nullptr, 1.0f, __ballot_sync(kAllLanes, row >= 0)};
  if (__popc(inputs.lanes) < 2) return;
  if (row >= 0) {
    inputs.row = static_cast<const T*>(summand.rows) + int64_t{row} * width;
    if (args.row_weights != nullptr) inputs.factor = args.row_weights[row];
  }
  for (int first = part * kColumns; first < width; first += kFoldWarps * kColumns) {
    typename Sum<T>::Acc total[kFewRowsVectors][N] = {};
    SumSlice<T, N, kFewRows>(inputs, first, width, lane, total);
    StoreSlice<T, N>(static_cast<T*>(summand.partial) + global_token * width, first, width, lane, total);
  }
}

// A block's share of the sums of a wave: every num_blocks-th sum, from `block` on. Each sum is that of a
// global token, which is a token of any rank: `source * T + token`.
struct FoldShare {
  int begin;  // first token of the wave
  int block;  // negative: the block folds nothing
  int num_blocks;
  int num_sums;  // of the wave

  // Returns the number of sums in the share.
  __device__ int size() const {
    return block < 0 || block >= num_sums ? 0 : (num_sums - 1 - block) / num_blocks + 1;
  }
};

// Returns this block's share of a wave. All blocks share the first wave, because nothing can be pulled yet.
__device__ inline FoldShare FindShare(const PullArgs& args, int wave) {
  const int skipped = wave == 0 ? 0 : args.num_pullers;
  const int begin = args.waves.First(args.shape, wave), end = args.waves.First(args.shape, wave + 1);
  return {begin, static_cast<int>(blockIdx.x) - skipped, static_cast<int>(gridDim.x) - skipped,
          (end - begin) * args.shape.num_ranks};
}

// A warp's part of folding the sums of one ticket. The load of their rows has been issued. Of the i-th sum,
// lanes i * K to i * K + K - 1 hold one row each. Other lanes have row -1; if the block's tickets have one
// sum each, they also hold its global token.
struct FoldTask {
  int wave;
  int part;
  int num_sums;
  int global_token;
  int row;
};

// The state that the warps of a block share while they fold: the next ticket and, for each wave, the units of
// work that remain of the block's share. Every sum counts as `units_per_sum` units.
struct FoldCounts {
  unsigned next, remaining[kMaxWaves];

  // Initializes the counts. Called by the whole block; synchronizes.
  __device__ void Init(const PullArgs& args, int units_per_sum) {
    for (int i = threadIdx.x; i < args.waves.count; i += blockDim.x)
      remaining[i] = FindShare(args, i).size() * units_per_sum;
    if (threadIdx.x == 0) next = 0;
    __syncthreads();
  }
};

// Counts a warp's work on a wave. Notifies the peers when that was the last of the block's share. This is
// called for each sum, because counting once a wave would notify the peers later. All lanes take part,
// because lanes that skip the notification would diverge from the first lane during the next sums.
__device__ inline void CountFolds(const PullArgs& args, const Session& session, FoldCounts& counts, int wave,
                                  unsigned number) {
  // The stores of all lanes must come before the first lane counts them and notifies the peers.
  __syncwarp();
  __threadfence_block();
  bool last = false;
  if (threadIdx.x % kWarp == 0) last = atomicSub(&counts.remaining[wave], number) == number;
  if (__shfl_sync(kAllLanes, last, 0)) {
    const FoldShare share = FindShare(args, wave);
    session.FinishShare(wave, min(share.num_blocks, share.num_sums));
  }
}

// Returns a / b, for a >= 0 and b > 0, in fewer instructions than an integer division.
__device__ inline int Divide(int a, int b) {
  const int quotient = __float2int_rz(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
  const int rest = a - quotient * b;
  return quotient - (rest < 0) + (rest >= b);  // it was off by one at most, below 2^23
}

// Returns the row to fold that a lane holds for index `index` of rank `source`, -1 if none. By expert the
// index is that of a token, and lane k holds the row of its k-th choice. Otherwise lane 0 holds the index-th
// row that came from the source; the rows of a source are contiguous. A token's row has no higher index than
// the token, so it is folded in the token's wave or in an earlier one.
__device__ inline int FindRowToFold(const PullArgs& args, int source, int index, int lane) {
  const Shape& shape = args.shape;
  if (shape.has_row_per_choice()) {
    const int64_t token = int64_t{source} * shape.num_tokens + index;
    return lane < shape.top_k ? args.handle.received_rows[token * shape.top_k + lane] : -1;
  }
  if (lane > 0) return -1;
  const int32_t* const to_this_rank = args.handle.rank_prefix_matrix + args.peers.rank;
  const int row = (source == 0 ? 0 : to_this_rank[(source - 1) * shape.num_ranks]) + index;
  return row < to_this_rank[source * shape.num_ranks] ? row : -1;
}

// Hands out a block's tickets to its warps, wave by wave: kParts tickets for `sums` sums. kQuantizes: the
// sums become FP8, which are not only those by expert. Then a ticket has one sum.
template <int kParts, bool kQuantizes = false>
class FoldTasks {
 public:
  __device__ FoldTasks(const PullArgs& args, FoldCounts& counts, int sums)
      : args_(args),
        tickets_{&counts.next},
        sums_(sums),
        sum_of_lane_(min(static_cast<int>(threadIdx.x) % kWarp / args.shape.top_k, sums - 1)),
        num_waves_(static_cast<int>(blockIdx.x) < args.num_pullers ? 1 : args.waves.count) {
    Enter(0);
  }

  // Takes a ticket and issues the load of its rows. Returns false if no ticket is left.
  __device__ bool Take(FoldTask* task, int lane) {
    const Shape& shape = args_.shape;
    const int ticket = TicketCounter::Broadcast(tickets_.Request(lane));
    while (ticket - before_ >= num_tickets_) {
      before_ += num_tickets_;
      if (wave_ + 1 == num_waves_) return false;
      Enter(wave_ + 1);
    }
    const int first = (ticket - before_) / kParts * sums_;
    const int i = share_.block + (first + sum_of_lane_) * share_.num_blocks;
    task->wave = wave_;
    task->part = (ticket - before_) % kParts;
    task->num_sums = min(sums_, size_ - first);
    const int token = Divide(i, shape.num_ranks), source = i - token * shape.num_ranks;
    task->global_token = source * shape.num_tokens + share_.begin + token;
    if constexpr (kQuantizes) {
      task->row = FindRowToFold(args_, source, share_.begin + token, lane);
      return true;
    }
    const int choice = lane - sum_of_lane_ * shape.top_k;
    task->row = sum_of_lane_ < task->num_sums && choice < shape.top_k
                    ? args_.handle.received_rows[int64_t{task->global_token} * shape.top_k + choice]
                    : -1;
    return true;
  }

 private:
  __device__ void Enter(int wave) {
    wave_ = wave;
    share_ = FindShare(args_, wave);
    size_ = share_.size();
    num_tickets_ = (size_ + sums_ - 1) / sums_ * kParts;
  }

  const PullArgs& args_;
  TicketCounter tickets_;
  int sums_, sum_of_lane_;
  int num_waves_;
  int wave_;
  int before_ = 0;  // tickets of earlier waves
  FoldShare share_;
  int size_, num_tickets_;  // of the share
};

// Folds this block's share of all waves. Each warp takes one ticket after another, and looks up the rows of
// the next while it sums. No warp waits for another: the one that completes the block's share of a wave
// notifies the peers.
template <typename T>
__device__ void Fold(const PullArgs& args, const Session& session) {
  __shared__ FoldCounts counts;
  const int lane = threadIdx.x % kWarp;
  counts.Init(args, kFoldWarps);
  FoldTasks<kFoldWarps> tasks(args, counts, 1);
  FoldTask task, following;
  for (bool more = tasks.Take(&following, lane); more;) {
    task = following;
    more = tasks.Take(&following, lane);
    const int row = IsRow(task.row, args.shape.capacity) ? task.row : -1;
    for (int a = 0; a < args.num_summands; ++a) {
      WithVector<T>(args.summands[a].num_elements, [&](auto vector) {
        FoldRows<T, decltype(vector)::value>(args, a, task.global_token, row, task.part, lane);
      });
    }
    CountFolds(args, session, counts, task.wave, 1);
  }
}

}  // namespace jax_ep::cuda
