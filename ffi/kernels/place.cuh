// Where the rows of a rank's tokens belong, from the counts of all ranks.
#pragma once

#include "kernels/receive.cuh"

namespace jax_ep::cuda {

// Counts in shared memory, [E + R] each; what a launch with a handle needs of them is `starts`.
struct Counts {
  int32_t* own;      // this rank's rows
  int32_t* totals;   // all ranks' rows
  int32_t* first;    // the first row of this rank's block at the receiver
  int32_t* earlier;  // this rank's rows before chunk `chunk`
  int32_t* starts;   // by expert [R, L + 1]: where each rank's experts' blocks start
  int chunk;

  static constexpr int kArrays = 5;
  JAX_EP_HD static int64_t Bytes(const Shape& shape) {
    return AlignUp(int64_t{sizeof(int32_t)} * kArrays * NumBins(shape), 128);
  }
  __device__ Counts(const Shape& shape, std::byte* shared) : chunk(0) {
    int32_t* array = reinterpret_cast<int32_t*>(shared);
    for (int32_t** member : {&own, &totals, &first, &earlier, &starts}) {
      *member = array;
      array += NumBins(shape);
    }
  }
};

// Adds this rank's rows of chunks [begin, end) to `sums` [E + R], several threads to a bin. The whole block.
__device__ inline void AddChunks(const MoveArgs& args, int begin, int end, int32_t* sums) {
  constexpr int kParts = 4;
  const int bins = NumBins(args.shape);
  for (int i = threadIdx.x; i < bins * kParts; i += blockDim.x) {
    const int bin = i % bins;
    int rows = 0;
#pragma unroll 16
    for (int c = begin + i / bins; c < end; c += kParts) rows += args.chunk_counts[int64_t{c} * bins + bin];
    if (rows != 0) atomicAdd(&sums[bin], rows);
  }
  __syncthreads();
}

// From all ranks' counts: totals, first and starts. The whole block.
__device__ inline void FindFirstRows(const MoveArgs& args, const Counts& counts) {
  const Shape& shape = args.shape;
  for (int bin = threadIdx.x; bin < NumBins(shape); bin += blockDim.x) {
    int before = 0, all = 0;
#pragma unroll 8
    for (int source = 0; source < shape.num_ranks; ++source) {
      const int rows = CountOf(args, counts.own, source, bin);
      if (source < args.peers.rank) before += rows;
      all += rows;
    }
    counts.totals[bin] = all;
    counts.first[bin] = before;
  }
  __syncthreads();
  if (shape.order != Order::kExpert) return;
  const int L = shape.num_local_experts();
  for (int r = threadIdx.x / kWarp; r < shape.num_ranks; r += blockDim.x / kWarp) {
    FindStarts(shape, counts.totals + r * L, counts.starts + r * (L + 1));
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < shape.num_experts; expert += blockDim.x) {
    counts.first[expert] += counts.starts[expert + expert / L];
  }
  __syncthreads();
}

// Makes token_rows of tokens [begin, end) final: they hold the row's index within its chunk. Calls go on in
// the order of the tokens.
__device__ inline void FinishRows(const MoveArgs& args, int begin, int end, Counts& counts) {
  const Shape& shape = args.shape;
  const int width = shape.rows_per_token();
  for (int first = begin; first < end;) {
    const int chunk = first / kChunkTokens;
    if (chunk != counts.chunk) AddChunks(args, counts.chunk, chunk, counts.earlier);
    counts.chunk = chunk;
    const int last = min(end, (chunk + 1) * kChunkTokens);
    for (int64_t i = int64_t{first} * width + threadIdx.x; i < int64_t{last} * width; i += blockDim.x) {
      const int index = args.handle.token_rows[i];
      if (index < 0) continue;
      const int bin = shape.order == Order::kRank ? shape.num_experts + static_cast<int>(i % width)
                                                  : args.handle.topk_idx[i];
      const int row = counts.first[bin] + counts.earlier[bin] + index;
      args.handle.token_rows[i] = IsRow(row, shape.capacity) ? row : -1;
    }
    first = last;
    __syncthreads();
  }
}

}  // namespace jax_ep::cuda
