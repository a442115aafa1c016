// The push kernel. If the push routes, it first exchanges the counts. Each row then goes straight to its
// final position in the receiver's buffer. By expert it goes to the first of the token's rows at a rank, and
// is copied from there to the others (spread.cuh).
#pragma once

#include "kernels/launch/plan.h"
#include "kernels/push/clear.cuh"
#include "kernels/push/counts.cuh"
#include "kernels/push/scale_by_ring.cuh"
#include "kernels/push/spread.cuh"

namespace jax_ep::cuda {

// Scaling and conversion to FP8 need more registers per thread.
template <typename Scale, bool kQuantizes>
constexpr int kPushThreads = std::is_void_v<Scale> && !kQuantizes ? 1024 : 512;
constexpr int kMaxBulkWarps = 12;  // helpers send what bulk copies do not take
// A named barrier of the block. Barrier 0 is __syncthreads.
constexpr int kHelpersBarrier = 1;

// Returns the size of the shared memory before the stages: what the ranks publish, the counts, and scratch to
// count few tokens.
JAX_EP_HD inline int64_t BytesBeforeStages(const PushArgs& args) {
  return PublishedBytes(args.shape.num_ranks) + BinCounts::Bytes(args.shape) +
         (args.counts_in_kernel ? Chunk::Bytes(args.shape.num_tokens, args.shape.top_k) : 0);
}

// Returns the number of the batch that this block sends after `batch`. Each block starts with the batch of
// its own number. The others go to the block that is free next, so that no block ends long after the others.
__device__ inline int NextBatch(const PushArgs& args, int batch, int num_batches) {
  if (args.is_local() || num_batches <= args.num_senders) return batch + args.num_senders;
  return args.num_senders + static_cast<int>(atomicAdd(&args.peers.own().sent[0], 1u));
}

// Counts a batch of `wave` that this block has sent. Called by one warp, once for each batch.
__device__ inline void FinishBatch(const PushArgs& args, const Session& session, int wave) {
  session.FinishShare(wave, args.batches.CountIn(args.shape, args.waves, wave));
}

// The role of a warp in a block that sends:
//
//   bulk warps      the first warps send long rows by bulk copies
//   helpers         compute the destinations of the next batch, and send the rest of the present batch
//   notifying warp  if the receivers spread, the last warp notifies the peers of the batch before the
//                   previous one, which has arrived. Its fence waits for the block's stores, and would delay
//                   warps that send
struct SenderWarp {
  bool sends_in_bulk;
  bool notifies;
  ThreadGroup helpers;

  __device__ static SenderWarp Of(const PushArgs& args, bool in_bulk) {
    const int warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
    const int num_bulk_warps = in_bulk ? args.bulk.num_sending : 0, num_notifying = args.spreads ? 1 : 0;
    return {warp < num_bulk_warps,
            args.spreads && warp == num_warps - 1,
            {static_cast<int>(threadIdx.x) - num_bulk_warps * kWarp,
             (num_warps - num_bulk_warps - num_notifying) * kWarp, kHelpersBarrier}};
  }
  __device__ bool helps() const { return !sends_in_bulk && !notifies; }
};

// Returns the next of the three places of the queue.
__device__ inline int After(int step) { return step == 2 ? 0 : step + 1; }

// Sends the tokens, one batch at a time. The first slice of the first batch is already being loaded. Called
// by the whole block; synchronizes.
template <bool kInBulk, bool kQuantizes>
__device__ void Send(const PushArgs& args, const Session& session, BinCounts& counts,
                     const Published* published, Stages& stages) {
  __shared__ Batch queued[3];  // the present batch, the next one, and the one after it
  const bool routes = args.routes();
  const int num_batches = args.batches.Count(args.shape, args.waves);
  const SenderWarp warp = SenderWarp::Of(args, kInBulk);
  const ThreadGroup& helpers = warp.helpers;
  const auto send_rows = [&](int t, const Destinations& destinations) {
    const int lane = threadIdx.x % kWarp;
    if constexpr (!kQuantizes) {
      SendPayloads(args, t, destinations, published, lane);
    } else if constexpr (!kInBulk) {
      SendQuantized(args, t, destinations, published, lane);
    }
  };
  int number = blockIdx.x;  // of the batch queued last, valid in the thread that queues
  const auto fetch_batch = [&](Batch* batch) {
    if (helpers.thread != 0) return;
    number = NextBatch(args, number, num_batches);
    *batch = args.batches.Find(args.shape, args.waves, number);
  };
  const auto finalize_rows = [&](const Batch& batch) {
    if (routes) FinalizeSentRows(args, batch.begin, batch.end, counts, helpers);
  };
  int sent_wave = -1, arrived_wave = -1;  // waves of the previous batch, and of the one before it
  if (warp.helps()) {
    const Batch first = args.batches.Find(args.shape, args.waves, number);
    if (helpers.thread == 0) queued[0] = first;
    fetch_batch(&queued[1]);
    finalize_rows(first);
  }
  __syncthreads();
  for (int step = 0; queued[step].begin < args.shape.num_tokens; step = After(step)) {
    const Batch present = queued[step];
    const Batch& following = queued[After(step)];
    if (warp.sends_in_bulk) {
      if (kQuantizes || args.bulk.slice_tokens == 1) {
        SendInBulk<kQuantizes, 1>(args, present, following, published, stages);
      } else {
        SendInBulk<false, kMaxSliceTokens>(args, present, following, published, stages);
      }
    } else if (warp.notifies) {
      if (arrived_wave >= 0) FinishBatch(args, session, arrived_wave);
    } else {
      fetch_batch(&queued[After(After(step))]);
      finalize_rows(following);
      SendTokens<!kInBulk>(args, present.begin, present.end, published, helpers, send_rows);
    }
    arrived_wave = sent_wave;
    sent_wave = args.waves.Of(present.begin);
    __syncthreads();
  }
  if (kInBulk) WaitForStores();
  __syncthreads();
  for (int wave : {arrived_wave, sent_wave}) {
    if (warp.notifies && wave >= 0) FinishBatch(args, session, wave);
  }
}

// Fills in the addresses that this rank publishes. Called by one thread.
__device__ inline void DescribeBuffers(const PushArgs& args, Published& outgoing) {
  for (int p = 0; p < args.num_payloads; ++p) outgoing.buffers[p] = args.payloads[p].out;
  outgoing.weights = args.arrived_weights;
  outgoing.routing = args.sends_received_rows ? args.handle.received_rows : args.arrived_idx;
}

// Opens the op, and exchanges buffers and counts with the peers. `first` is the block's first token, which
// determines the chunks before it. Returns false if not all ranks arrive at the same op in time. Called by
// the whole block; synchronizes.
__device__ inline bool MeetPeers(const PushArgs& args, const Opening& opening, Session& session, bool sends,
                                 int first, BinCounts& counts, Published& outgoing, Published* published) {
  const bool routes = args.routes(), local = args.is_local();
  const WaitLog log = WaitLog::From(blockIdx.x == 0 ? args.attendance.wait_us : nullptr);
  if (!local && !session.Open(opening)) return false;
  if (!local && blockIdx.x == 0) session.Publish(outgoing, args.num_payloads);
  if (!local && routes && sends) {
    PublishCounts(args, session, counts);
    counts.chunk = args.counts_in_kernel ? 0 : min(first, args.shape.num_tokens) / kChunkTokens;
    // This overlaps with the arrival of the peers.
    AddChunks(args, 0, counts.chunk, 0, NumBins(args.shape), counts.in_earlier_chunks, WholeBlock());
  }
  return session.Meet(args.num_payloads, published, log,
                      [&] { return routes ? ReadCounts(args, session, counts) : kNone; });
}

// The role of a block. The last block also waits for the peers.
struct PushBlock {
  bool sends, is_last;

  __device__ static PushBlock Of(const PushArgs& args) {
    return {static_cast<int>(blockIdx.x) < args.num_senders, blockIdx.x == gridDim.x - 1};
  }
};

// Steps of the kernel, from top to bottom. The first num_senders blocks are senders.
//
//           | senders                                         | other blocks
//   load    | first warps: start to load the first rows       | in bulk: zero the 4 KB that they clear with
//   count   | few tokens: each block counts all of them.      | in a permute: add up all chunks, as the
//           | Otherwise each adds up its bins over the chunks | senders do there
//   meet    | block 0 opens the op and publishes its buffers. | wait for the buffers and counts of all ranks
//           | Each block publishes its bins, then waits as    |
//           | the other blocks do                             |
//   locate  | compute where the rows of each expert start     | the same; along a handle, for this rank only.
//           |                                                 | The last block writes this rank's counts as
//           |                                                 | a receiver
//   send    | first warps: send rows by bulk copies, as FP8   | -
//           | if requested. Helpers: compute destinations,    |
//           | send what bulk copies do not take. By expert,   |
//           | last warp: notifies peers of arrived batches    |
//   leave   | each block reports to the peers that it no longer accesses their memory
//   clear   | -                                               | clear unfilled rows; in bulk, the last warps
//   spread  | by expert: copy each token's row to its other rows at this rank. In bulk, only the first
//           | warps do so, unless rows are scaled. Rings scale long rows, in the memory of the stages
//   wait    | -                                               | last block: waits until all blocks have left;
//           |                                                 | by rank it counts the source that was cut
//   close   | each block counts its end; the last block waits for the others, and frees the channel
//
// Along a handle, nothing is counted. A permute has no peers: it does not leave, spread or close. A rank that
// is alone does not spread: it sends a token to all of its rows, or scales rows where they lie. Tokens of one
// choice are not spread either, unless their rows are scaled. If an op fails, its results are NaN and -1
// (FillResults).
template <bool kInBulk, typename Scale, bool kQuantizes>
__global__ void __launch_bounds__(kPushThreads<Scale, kQuantizes>, 1)
    PushKernel(const __grid_constant__ PushArgs args) {
  extern __shared__ __align__(128) std::byte shared[];  // what the ranks publish, the counts, the stages
  __shared__ Published outgoing;
  __shared__ uint64_t barriers[kMaxBulkWarps][2];
  __shared__ __align__(128) uint4 zeros[kInBulk ? kZeroBytes / 16 : 1];
  constexpr bool kRings = kInBulk && !std::is_void_v<Scale>;
  __shared__ RingMemory memory[kRings ? kMaxTeams : 1];
  const Shape& shape = args.shape;
  const Peers& peers = args.peers;
  const bool routes = args.routes(), local = args.is_local();
  const PushBlock block = PushBlock::Of(args);
  const Op op = routes ? Op::kDispatch : Op::kRedispatch;
  const int warp = threadIdx.x / kWarp, me = peers.rank, L = shape.num_local_experts();
  Published* const published = reinterpret_cast<Published*>(shared);
  std::byte* const count_bytes = shared + PublishedBytes(shape.num_ranks);
  std::byte* const bytes = shared + BytesBeforeStages(args);
  BinCounts counts(shape, count_bytes);

  const Opening opening(peers, args.position_operand);
  Session session(peers, op, true);
  const Batch batch = args.batches.Find(shape, args.waves, blockIdx.x);  // the first batch of this block
  Stages stages{bytes + int64_t{2} * warp * args.bulk.stage_bytes, barriers[warp % kMaxBulkWarps], 0,
                reinterpret_cast<float*>(bytes + int64_t{2} * args.bulk.num_warps * args.bulk.stage_bytes) +
                    warp * (args.bulk.stage_bytes / args.element_bytes / kFp8Block)};
  const bool has_stages = kInBulk && warp < args.bulk.num_warps;
  const bool loads = kInBulk && block.sends && warp < args.bulk.num_sending;
  const Slice slice = loads ? FirstSlice<kQuantizes>(args, batch) : Slice{};
  if (has_stages && threadIdx.x % kWarp == 0) InitBarriers(stages.barriers);
  if constexpr (kRings) Ring(args.ring, memory, bytes).Init();
  if (loads) LoadSlice(args, slice, batch.end, stages, 0);
  if (kInBulk && !block.sends) {
    for (int i = threadIdx.x; i < kZeroBytes / 16; i += blockDim.x) zeros[i] = make_uint4(0, 0, 0, 0);
    FenceBulk();
  }
  for (int i = threadIdx.x; i < BinCounts::kArrays * NumBins(shape); i += blockDim.x) counts.sent[i] = 0;
  if (threadIdx.x == 0) DescribeBuffers(args, local ? published[0] : outgoing);
  __syncthreads();
  if (routes && (local || block.sends)) CountLocalRows(args, counts, count_bytes + BinCounts::Bytes(shape));
  const auto fill = [&] { FillResults(args); };
  if (!MeetPeers(args, opening, session, block.sends, batch.begin, counts, outgoing, published)) {
    // A block must not end while bulk copies write to its shared memory.
    if (loads && slice.token < batch.end) WaitForLoad(&stages.barriers[0], 0);
    return session.Abort(fill, [&] {
      if (args.counts_in_kernel && block.sends) FillCounted(args);
    });
  }
  if (routes) {
    LocateExpertBlocks(args, counts);
    if (block.is_last) {
      WriteReceiver(args, me, counts.totals, counts.starts + me * (L + 1), [&](int source, int d) {
        return CountOf(args, counts.sent, source, shape.num_experts + d);
      });
    }
  }
  const bool counts_pairs = block.is_last && !local && routes && !shape.has_row_per_choice();
  const int cut = counts_pairs ? CountWholeSources(args, counts.sent) : 0;
  if (block.sends) {
    Send<kInBulk, kQuantizes>(args, session, counts, published, stages);
  } else if (!routes && shape.has_expert_blocks() && warp == 0) {
    FindStarts(shape, args.handle.expert_counts, counts.starts + me * (L + 1));
  }
  if (!local) session.Leave();
  if (!block.sends) ClearUnfilled(args, counts, kInBulk ? zeros : nullptr);
  if (local) return;
  if constexpr (kRings) ScaleByRing<Scale>(args, session, Ring(args.ring, memory, bytes));
  const bool by_ring = kRings && args.ring.teams > 0;
  if ((args.spreads || args.scales()) && !by_ring) SpreadRows<kInBulk, Scale>(args, session, stages);
  if (block.is_last && session.AwaitLeft(published) && counts_pairs) CountCutSource(args, cut);
  session.Close(fill);
}

}  // namespace jax_ep::cuda
