// The push kernel: where it routes, after the count, each row goes straight to its final place in its
// receiver's buffer; by expert to the first of a token's places at a rank, and from there to the others
// (spread.cuh).
#pragma once

#include "kernels/launch/plan.h"
#include "kernels/protocol/fail.cuh"
#include "kernels/push/clear.cuh"
#include "kernels/push/counts.cuh"
#include "kernels/push/scale_by_ring.cuh"
#include "kernels/push/spread.cuh"

namespace jax_ep::cuda {

// Scaling takes registers, and so does making FP8.
template <typename Scale, bool kQuantizes>
constexpr int kPushThreads = std::is_void_v<Scale> && !kQuantizes ? 1024 : 512;
constexpr int kMaxBulkWarps = 12;  // the others send what bulk copies do not take
// Of the barriers that a block has; 0 is __syncthreads.
constexpr int kHelpersBarrier = 1;

// Shared memory before the stages: counts, and what few tokens are counted in.
JAX_EP_HD inline int64_t HeadBytes(const PushArgs& args) {
  const bool few = args.shape.num_tokens <= kFewTokens;
  return Counts::Bytes(args.shape) + (few ? Chunk::Bytes(args.shape.num_tokens, args.shape.top_k) : 0);
}

// The batches of tokens that this block sends: the first is its own, the others go to whoever is free, so
// that no block ends long after the others.
__device__ inline int NextBatch(const PushArgs& args, int batch, int num_batches) {
  if (args.is_local() || num_batches <= args.num_senders) return batch + args.num_senders;
  return args.num_senders + static_cast<int>(atomicAdd(&args.peers.own().next[0], 1u));
}

// Tells the peers of a batch that this block has sent, and which belongs to `wave`. One warp, once for each
// batch.
__device__ inline void FinishBatch(const PushArgs& args, int wave, uint32_t epoch) {
  const int first = args.waves.First(args.shape, wave), last = args.waves.First(args.shape, wave + 1);
  FinishShare(args.peers, wave, (last - first + args.batch - 1) / args.batch, epoch);
}

// Sends the tokens, a batch at a time. The first slice of the first batch is being loaded already. The first
// warps of the block send rows by bulk copies. Meanwhile its helpers find the places of the next batch's
// rows, and send what is left of the present batch. By expert the last warp tells the peers of the batch
// before the last one, which has arrived: its fence waits for the block's stores, and would hold up those
// that send.
template <bool kInBulk, bool kQuantizes>
__device__ void Send(const PushArgs& args, uint32_t epoch, Counts& counts, const Published* published,
                     Stages& stages) {
  __shared__ int dealt[2];
  const bool routes = args.routes();
  const int num_batches = (args.shape.num_tokens + args.batch - 1) / args.batch;
  const int warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
  const int num_bulk_warps = kInBulk ? args.bulk.num_sending : 0;
  const bool in_bulk = warp < num_bulk_warps, tells = args.spreads && warp == num_warps - 1;
  const Team helpers{static_cast<int>(threadIdx.x) - num_bulk_warps * kWarp,
                     (num_warps - num_bulk_warps - (args.spreads ? 1 : 0)) * kWarp, kHelpersBarrier};
  const auto send_rows = [&](int t, const Rows& rows) {
    const int lane = threadIdx.x % kWarp;
    if constexpr (!kQuantizes) {
      SendPayloads(args, t, rows, published, lane);
    } else if constexpr (!kInBulk) {
      QuantizeToRows(args, t, rows, published, lane);
    }
  };
  const auto tokens = [&](int batch) {
    const int T = args.shape.num_tokens;
    return Batch{min(batch * args.batch, T), min((batch + 1) * args.batch, T)};
  };
  const auto prepare = [&](int batch, int* next) {
    if (helpers.thread == 0) *next = NextBatch(args, batch, num_batches);
    if (routes) FinishRows(args, tokens(batch).begin, tokens(batch).end, counts, helpers);
  };
  int batch = blockIdx.x;
  int sent = -1, arrived = -1;  // the waves of the batches before
  if (!in_bulk && !tells) prepare(batch, &dealt[0]);
  __syncthreads();
  for (int turn = 0; batch < num_batches; ++turn) {
    const int following = dealt[turn % 2];
    const Batch present = tokens(batch);
    if (in_bulk) {
      SendInBulk<kQuantizes>(args, present, tokens(following), published, stages);
    } else if (tells) {
      if (arrived >= 0) FinishBatch(args, arrived, epoch);
    } else {
      prepare(following, &dealt[(turn + 1) % 2]);
      SendTokens(args, present.begin, present.end, published, helpers, send_rows);
    }
    __syncthreads();
    arrived = sent;
    sent = args.waves.Of(present.begin);
    batch = following;
  }
  if (kInBulk) WaitForStores();
  __syncthreads();
  for (int wave : {arrived, sent}) {
    if (tells && wave >= 0) FinishBatch(args, wave, epoch);
  }
}

// What this rank tells the peers of its buffers. One thread.
__device__ inline void DescribeBuffers(const PushArgs& args, Published& own) {
  for (int p = 0; p < args.num_payloads; ++p) own.buffers[p] = args.payloads[p].out;
  own.weights = args.arrived_weights;
  own.routing = args.sends_map ? args.handle.received_rows : args.arrived_idx;
}

// Opens the op, and tells and hears of buffers and counts. False if not all ranks come to the same op in
// time. The whole block. `first` is the block's first token, which decides what it must know of the counts
// before.
__device__ inline bool MeetPeers(const PushArgs& args, Op op, const State& state, bool sends, int first,
                                 Counts& counts, Published& mine, Published* published, uint32_t* epoch) {
  const Shape& shape = args.shape;
  const Peers& peers = args.peers;
  const bool routes = args.routes(), local = args.is_local();
  const WaitLog log = WaitLog::From(blockIdx.x == 0 ? args.wait_us : nullptr);
  if (!local && !Begin(peers, op, state, epoch)) return false;
  if (!local && blockIdx.x == 0) Enter(peers, state.call, mine, args.num_payloads, *epoch);
  if (!local && routes && sends) {
    PublishCounts(args, counts, *epoch);
    counts.chunk = args.counts_here ? 0 : min(first, shape.num_tokens) / kChunkTokens;
    // While the peers come.
    AddChunks(args, 0, counts.chunk, 0, NumBins(shape), counts.earlier, WholeBlock());
  }
  uint32_t missing =
      local ? 0 : ReadPublished(peers, op, state.call, args.num_payloads, *epoch, published, log);
  if (routes && missing == 0) missing = ReadCounts(args, counts, *epoch);
  return AreAllThere(peers, op, Phase::kEnter, *epoch, missing);
}

// Who does what, from top to bottom. The first num_senders blocks are senders; the last block closes the op,
// beside what it does as one of the others.
//
//           | senders                                         | the other blocks
//   load    | first warps: begin to load the first rows       | in bulk: zero the 4 KB that they clear with
//   count   | few tokens: each counts all of them. More: each | in a permute: add up all chunks, as the
//           | adds up its share of the chunks' counts         | senders do there
//   meet    | block 0 opens the op and tells of its buffers.  | wait for all ranks' buffers and counts
//           | Each tells of its share of the counts, then     |
//           | waits as the others do                          |
//   place   | find where the rows of each expert start        | the same, or along a handle find this rank's
//           |                                                 | own. The last block writes what the counts
//           |                                                 | say of this rank as a receiver
//   send    | first warps: rows, by bulk copies, if need be   | -
//           | as FP8. Helpers: where rows go, and what bulk   |
//           | copies do not take. By expert the last warp:    |
//           | tells the peers of batches that have arrived    |
//   leave   | each tells the peers that it is done with their memory
//   clear   | -                                               | what no row fills; in bulk the last warps
//   spread  | by expert: each token's row to its other places here; in bulk, unless rows are scaled,
//           | the first warps only. Long rows are scaled by rings, which lie where the stages were
//   close   | -                                               | the last one: waits until all have left; by
//           |                                                 | rank it counts what the capacity has cut
//   end     | each counts itself, so that the next op finds the channel free
//
// Along a handle nobody counts. A permute meets nobody: it neither leaves, spreads nor closes. An op that
// fails before the ranks have met ends in FailBlock, one that fails later in GiveUp by the last block; both
// leave NaN and -1 in the results (FillResults).
template <bool kInBulk, typename Scale, bool kQuantizes>
__global__ void __launch_bounds__(kPushThreads<Scale, kQuantizes>, 1)
    PushKernel(const __grid_constant__ PushArgs args) {
  extern __shared__ __align__(128) std::byte shared[];  // counts; for bulk copies then the stages
  __shared__ Published mine, published[kMaxRanks];
  __shared__ uint64_t barriers[kMaxBulkWarps][2];
  __shared__ __align__(128) uint4 zeros[kInBulk ? kZeroBytes / 16 : 1];
  constexpr bool kRings = kInBulk && !std::is_void_v<Scale>;
  __shared__ RingMemory memory[kRings ? kMaxTeams : 1];
  const Shape& shape = args.shape;
  const Peers& peers = args.peers;
  const bool routes = args.routes(), local = args.is_local();
  const bool sends = static_cast<int>(blockIdx.x) < args.num_senders, closes = blockIdx.x == gridDim.x - 1;
  const Op op = routes ? Op::kDispatch : Op::kRedispatch;
  const int warp = threadIdx.x / kWarp, me = peers.rank, L = shape.num_local_experts();
  Counts counts(shape, shared);
  std::byte* const bytes = shared + HeadBytes(args);

  const State state = local ? State{} : LoadState(peers, args.place_operand);
  Stages stages{bytes + int64_t{2} * warp * args.bulk.stage_bytes, barriers[warp % kMaxBulkWarps], 0,
                reinterpret_cast<float*>(bytes + int64_t{2} * args.bulk.num_warps * args.bulk.stage_bytes) +
                    warp * (args.bulk.stage_bytes / args.width / kFp8Block)};
  const Slice slice = FirstSlice(args, blockIdx.x * args.batch);
  const int end = min(static_cast<int>(blockIdx.x + 1) * args.batch, shape.num_tokens);
  const bool has_stages = kInBulk && warp < args.bulk.num_warps;
  const bool loads = kInBulk && sends && warp < args.bulk.num_sending;
  if (has_stages && threadIdx.x % kWarp == 0) InitBarriers(stages.barriers);
  if constexpr (kRings) Ring(args.ring, memory, bytes).Init();
  if (loads) LoadSlice(args, slice, end, stages, 0);
  if (kInBulk && !sends) {
    for (int i = threadIdx.x; i < kZeroBytes / 16; i += blockDim.x) zeros[i] = make_uint4(0, 0, 0, 0);
    FenceBulk();
  }
  for (int i = threadIdx.x; i < Counts::kArrays * NumBins(shape); i += blockDim.x) counts.own[i] = 0;
  if (threadIdx.x == 0) DescribeBuffers(args, local ? published[0] : mine);
  __syncthreads();
  if (routes && (local || sends)) CountOwn(args, counts, shared + Counts::Bytes(shape));
  uint32_t epoch = 0;
  if (!MeetPeers(args, op, state, sends, blockIdx.x * args.batch, counts, mine, published, &epoch)) {
    // A block does not end while it is being written to.
    if (loads && slice.token < end) WaitForLoad(&stages.barriers[0], 0);
    FailBlock(peers, op, epoch, [&] { FillResults(args); });
    return;
  }
  if (routes) {
    PlaceExperts(args, counts);
    if (closes) WriteReceiver(args, counts.own, counts.totals, counts.starts + me * (L + 1));
  }
  const bool counts_pairs = closes && !local && routes && !shape.has_row_per_choice();
  const int cut = counts_pairs ? CountWholeSources(args, counts.own) : 0;
  if (sends) {
    Send<kInBulk, kQuantizes>(args, epoch, counts, published, stages);
  } else if (!routes && shape.has_expert_blocks() && warp == 0) {
    FindStarts(shape, args.handle.expert_counts, counts.starts + me * (L + 1));
  }
  if (!local) LeavePeers(peers, epoch, true);
  if (!sends) ClearGaps(args, counts, kInBulk ? zeros : nullptr, epoch);
  if (local) return;
  if constexpr (kRings) ScaleByRing<Scale>(args, Ring(args.ring, memory, bytes), epoch);
  const bool by_ring = kRings && args.ring.teams > 0;
  if (args.spreads && !by_ring) SpreadRows<kInBulk, Scale>(args, op, stages, epoch);
  if (closes) {
    if (!Leave(peers, op, published, epoch, args.spreads)) {
      GiveUp(peers, op, epoch, Standing::kOpened, [&] { FillResults(args); });
    } else if (counts_pairs) {
      CountCutSource(args, cut);
    }
  }
  End(peers);
}

}  // namespace jax_ep::cuda
