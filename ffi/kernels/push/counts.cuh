// The counts of all ranks' rows, and the positions of this rank's rows that follow from them.
#pragma once

#include "kernels/push/receiver.cuh"
#include "kernels/routing/count.cuh"
#include "kernels/routing/starts.cuh"

namespace jax_ep::cuda {

// The counts of rows by bin, in shared memory, [E + R] each. A push along a handle uses only `starts`.
struct BinCounts {
  int32_t* sent;               // rows that this rank sends
  int32_t* totals;             // rows that all ranks send
  int32_t* first_row;          // first row, at the receiver, of the rows that this rank sends
  int32_t* in_earlier_chunks;  // rows that this rank sends from the chunks before `chunk`
  int32_t* starts;             // by expert [R, L + 1]: starts of the blocks of each rank's experts
  int chunk;

  static constexpr int kArrays = 5;
  JAX_EP_HD static int64_t Bytes(const Shape& shape) {
    return AlignUp(int64_t{sizeof(int32_t)} * kArrays * NumBins(shape), 128);
  }
  __device__ BinCounts(const Shape& shape, std::byte* shared) : chunk(0) {
    int32_t* array = reinterpret_cast<int32_t*>(shared);
    for (int32_t** member : {&sent, &totals, &first_row, &in_earlier_chunks, &starts}) {
      *member = array;
      array += NumBins(shape);
    }
  }
};

// Adds this rank's rows of chunks [begin, end) in `num_bins` bins to `sums` [E + R]. Several threads share a
// bin if there are enough. Called by the whole group.
__device__ inline void AddChunks(const PushArgs& args, int begin, int end, int first_bin, int num_bins,
                                 int32_t* sums, const ThreadGroup& group) {
  const int bins = NumBins(args.shape), threads_per_bin = max(1, group.threads / max(num_bins, 1));
  for (int i = group.thread; i < num_bins * threads_per_bin; i += group.threads) {
    const int bin = first_bin + i % num_bins;
    int rows = 0;
#pragma unroll 16
    for (int c = begin + i / num_bins; c < end; c += threads_per_bin)
      rows += args.chunk_counts[int64_t{c} * bins + bin];
    if (rows != 0) atomicAdd(&sums[bin], rows);
  }
  group.Sync();
}

// A range of bins: [first, last).
struct BinRange {
  int first;
  int last;
};

// Returns the bins that a block that sends publishes.
__device__ inline BinRange PublishedBins(const PushArgs& args, int block) {
  const int bins = NumBins(args.shape);
  return {bins * block / args.num_senders, bins * (block + 1) / args.num_senders};
}

// Counts the rows that this rank sends: those in the block's published bins, or in all bins. Called by the
// whole block.
__device__ inline void CountLocalRows(const PushArgs& args, const BinCounts& counts, std::byte* scratch) {
  const Shape& shape = args.shape;
  const int block = blockIdx.x;
  if (args.is_local()) {
    AddChunks(args, 0, NumChunks(shape), 0, NumBins(shape), counts.sent, WholeBlock());
  } else if (args.counts_in_kernel) {
    const Batch batch = args.batches.Find(shape, args.waves, block);
    int16_t* const experts = reinterpret_cast<int16_t*>(scratch);
    const Chunk chunk{0, shape.num_tokens, experts, experts + shape.num_tokens * shape.top_k, counts.sent};
    CountChunk(shape, args.topk_idx, chunk, batch.begin, batch.end, args.handle.topk_idx,
               args.handle.sent_rows);
  } else {
    const BinRange bins = PublishedBins(args, block);
    AddChunks(args, 0, NumChunks(shape), bins.first, bins.last - bins.first, counts.sent, WholeBlock());
  }
}

// Publishes the counts to the peers. If each block counts all tokens, the first block publishes all of them.
// Otherwise each block that sends publishes its bins. An op that finds the channel in use must not publish
// anything. The first block has already checked that; the others wait until it has.
__device__ inline void PublishCounts(const PushArgs& args, const Session& session, const BinCounts& counts) {
  const Peers& peers = args.peers;
  if (blockIdx.x > 0 && (args.counts_in_kernel || !session.AwaitOpened())) return;
  const uint32_t epoch = session.epoch();
  const BinRange bins =
      args.counts_in_kernel ? BinRange{0, NumBins(args.shape)} : PublishedBins(args, blockIdx.x);
  for (int i = threadIdx.x; i < (bins.last - bins.first) * peers.num_ranks; i += blockDim.x) {
    const int bin = bins.first + i / peers.num_ranks;
    StoreWord(&peers.mailbox(i % peers.num_ranks, peers.rank).counts[bin], counts.sent[bin], epoch);
  }
}

// Waits for the counts of all ranks, and computes `totals` and `first_row` from them. The block must
// synchronize before it uses these. Returns the rank that this thread has missed, or kNone.
__device__ inline int ReadCounts(const PushArgs& args, const Session& session, const BinCounts& counts) {
  constexpr int kWordsInFlight = 8;  // loads in flight
  const Peers& peers = args.peers;
  const uint32_t epoch = args.is_local() ? 0 : session.epoch();
  const int meeting_threads = args.is_local() ? 0 : kWarp;  // the first warp, which meets the peers meanwhile
  for (int bin = static_cast<int>(threadIdx.x) - meeting_threads; bin < NumBins(args.shape);
       bin += static_cast<int>(blockDim.x) - meeting_threads) {
    if (bin < 0) break;
    int from_earlier_ranks = 0, total = args.is_local() ? counts.sent[bin] : 0;
    for (int first = 0; first < peers.num_ranks; first += kWordsInFlight) {
      const auto word = [&](int i) { return &peers.mailbox(peers.rank, first + i).counts[bin]; };
      EpochWord seen[kWordsInFlight] = {};
#pragma unroll
      for (int i = 0; i < kWordsInFlight; ++i) {
        if (first + i < peers.num_ranks) seen[i] = LoadRelaxed(word(i));
      }
#pragma unroll
      for (int i = 0; i < kWordsInFlight; ++i) {
        if (first + i >= peers.num_ranks) break;
        const auto has_arrived = [&] { return HasEpoch(seen[i] = LoadRelaxed(word(i)), epoch); };
        if (!HasEpoch(seen[i], epoch) && !session.Await(has_arrived)) return first + i;
        const uint32_t rows = NumberOf(seen[i]);
        if (first + i < peers.rank) from_earlier_ranks += static_cast<int>(rows);
        total += static_cast<int>(rows);
      }
    }
    counts.totals[bin] = total;
    counts.first_row[bin] = from_earlier_ranks;
  }
  return kNone;
}

// Computes `starts`, and adds them to `first_row`, by expert. Called by the whole block; synchronizes.
__device__ inline void LocateExpertBlocks(const PushArgs& args, const BinCounts& counts) {
  const Shape& shape = args.shape;
  if (!shape.has_expert_blocks()) return;
  const int L = shape.num_local_experts();
  for (int r = threadIdx.x / kWarp; r < shape.num_ranks; r += blockDim.x / kWarp) {
    FindStarts(shape, counts.totals + r * L, counts.starts + r * (L + 1));
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < shape.num_experts; expert += blockDim.x) {
    counts.first_row[expert] += counts.starts[expert + expert / L];
  }
  __syncthreads();
}

// Computes the final sent_rows of tokens [begin, end), which so far hold each row's index within its chunk.
// Calls must follow the order of the tokens. Called by the whole group, which must be the same in all calls.
__device__ inline void FinalizeSentRows(const PushArgs& args, int begin, int end, BinCounts& counts,
                                        const ThreadGroup& group) {
  const Shape& shape = args.shape;
  const int width = shape.rows_per_token();
  for (int first = begin; first < end;) {
    const int chunk = args.counts_in_kernel ? 0 : first / kChunkTokens;
    if (chunk != counts.chunk)
      AddChunks(args, counts.chunk, chunk, 0, NumBins(shape), counts.in_earlier_chunks, group);
    counts.chunk = chunk;
    const int last = args.counts_in_kernel ? end : min(end, (chunk + 1) * kChunkTokens);
    for (int64_t i = int64_t{first} * width + group.thread; i < int64_t{last} * width; i += group.threads) {
      const int index = args.handle.sent_rows[i];
      if (index < 0) continue;
      const int bin = !shape.has_row_per_choice() ? shape.num_experts + static_cast<int>(i % width)
                                                  : args.handle.topk_idx[i];
      const int row = counts.first_row[bin] + counts.in_earlier_chunks[bin] + index;
      const int rows_end =
          shape.has_fixed_blocks() ? shape.EndOf(bin % shape.num_local_experts()) : shape.capacity;
      args.handle.sent_rows[i] = IsRow(row, rows_end) ? row : -1;
    }
    first = last;
    group.Sync();
  }
}

}  // namespace jax_ep::cuda
