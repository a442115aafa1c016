// By expert, on sm_90 and newer: the same sums, of rows that bulk copies load into shared memory. So more of
// them are under way at a time than registers hold.
#pragma once

#include "kernels/ptx/bulk.cuh"
#include "kernels/pull/args.cuh"
#include "kernels/rows/sum.cuh"

namespace jax_ep::cuda {

constexpr int kFoldMates = 2;               // warps that share the columns of a sum
constexpr int kFoldStageBytes = 6 * 1024;   // of which each warp has two
constexpr int kFoldStepBytes = kWarp * 16;  // that a warp sums at a time

// Folds a warp's parts of tokens, of which one piece is being loaded while the one before it is summed. The
// whole warp.
template <typename T>
class BulkFolder {
 public:
  __device__ BulkFolder(const PullArgs& args, const Stages& stages, int lane)
      : args_(args), stages_(stages), lane_(lane) {}

  // Begins one of the mates' part in folding a token's rows of an array, if there are several. Lane k holds
  // the row of the k-th choice, -1 none. False if there is nothing to be done.
  __device__ bool Begin(int index, int global_token, int row, int mate) {
    const unsigned lanes = __ballot_sync(kAllLanes, row >= 0);
    const int rows = __popc(lanes), place = __popc(lanes & ((1u << lane_) - 1));
    const Summand& summand = args_.summands[index];
    const int64_t bytes = summand.num_elements * sizeof(T);
    const int64_t share = AlignUp((bytes + kFoldMates - 1) / kFoldMates, kFoldStepBytes);
    const int64_t begin = mate * share, end = min(bytes, begin + share);
    if (rows < 2 || begin >= end) return false;
    const std::byte* const from = static_cast<const std::byte*>(summand.rows) + row * bytes;
    std::byte* const to = static_cast<std::byte*>(summand.partial) + global_token * bytes;
    const float factor = row >= 0 && args_.row_weights != nullptr ? args_.row_weights[row] : 1.0f;
    int piece = kFoldStageBytes / rows;
    piece -= piece % (piece >= kFoldStepBytes ? kFoldStepBytes : 16);
    for (int64_t offset = begin; offset < end; offset += piece) {
      const uint32_t size = static_cast<uint32_t>(min(int64_t{piece}, end - offset));
      const int stage = stages_.used % 2;
      uint64_t* const barrier = &stages_.barriers[stage];
      __syncwarp();  // all lanes have read what the stage held
      if (lane_ == 0) ExpectBytes(barrier, rows * size);
      __syncwarp();
      if (row >= 0) BulkLoadPart(Staged(stage) + place * size, from + offset, size, barrier);
      End();
      ++stages_.used;
      size_ = size;
      to_ = to + offset;
      lanes_ = lanes;
      factor_ = factor;
    }
    return true;
  }

  // Sums what has been loaded last.
  __device__ void End() {
    using Acc = typename Sum<T>::Acc;
    constexpr int N = 16 / sizeof(T);
    if (size_ == 0) return;
    const int stage = (stages_.used - 1) % 2;
    WaitForLoad(&stages_.barriers[stage], (stages_.used - 1) / 2 % 2);
#pragma unroll 2
    for (uint32_t first = 0; first < size_; first += kFoldStepBytes) {
      const uint32_t at = first + lane_ * 16;
      const std::byte* row = Staged(stage) + at;
      Acc total[N] = {};
      for (unsigned left = lanes_; left != 0; left &= left - 1, row += size_) {
        const Acc factor = __shfl_sync(kAllLanes, factor_, __ffs(left) - 1);
        if (at >= size_) continue;
        const Vector<T, N> vector = *reinterpret_cast<const Vector<T, N>*>(row);
#pragma unroll
        for (int j = 0; j < N; ++j) total[j] = MultiplyAdd(factor, static_cast<Acc>(vector[j]), total[j]);
      }
      if (at < size_) Vector<T, N>::Store(reinterpret_cast<T*>(to_ + at), total);
    }
    size_ = 0;
  }

 private:
  __device__ std::byte* Staged(int stage) const { return stages_.bytes + stage * kFoldStageBytes; }

  const PullArgs& args_;
  Stages stages_;
  int lane_;
  uint32_t size_ = 0;  // of a row in what has been loaded last and is yet to be summed
  std::byte* to_;
  unsigned lanes_;  // that hold its rows' factors, in their order
  float factor_;
};

}  // namespace jax_ep::cuda
