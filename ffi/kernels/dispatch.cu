// Dispatch: after the count, each row straight to its final place in its receiver's buffer.
#include <algorithm>

#include "kernels/kernels.h"
#include "kernels/send.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kMoveThreads = 1024;
constexpr int kSenders = 24;
constexpr int64_t kBytesToClear = 16 << 20;  // of the receive buffers for each block that clears
// Shared memory of a block: its counts, then its slots.
constexpr int kBulkBytes = 216 * 1024;
constexpr int kMaxSlotBytes = 16 * 1024;
constexpr int kMaxBulkWarps = 16;

// Into `totals` [E + R]: rows of all ranks in each bin. Into `first` [E + R]: the first row of this
// rank's block at the receiver. `own` are this rank's counts.
__device__ void FindFirstRows(const MoveArgs& args, const int32_t* own, int32_t* totals, int32_t* first) {
  const Shape& shape = args.shape;
  const int num_sources = shape.num_ranks;
  for (int bin = threadIdx.x; bin < NumBins(shape); bin += blockDim.x) {
    int before = 0, all = 0;
#pragma unroll 8
    for (int source = 0; source < num_sources; ++source) {
      const int rows = CountOf(args, own, source, bin);
      if (source < args.peers.rank) before += rows;
      all += rows;
    }
    totals[bin] = all;
    first[bin] = before;
  }
  __syncthreads();
  if (shape.order == Order::kExpert && threadIdx.x < shape.num_ranks) {
    int block = 0;
    for (int i = 0; i < shape.num_local_experts(); ++i) {
      const int expert = threadIdx.x * shape.num_local_experts() + i;
      first[expert] += block;
      block += static_cast<int>(AlignUp(totals[expert], shape.alignment));
    }
  }
  __syncthreads();
}

// Makes token_rows of tokens [begin, end) final. Into them goes the row's index within its chunk; `base`
// [E + R] is the first row of this rank's block at each receiver.
__device__ void FinishRows(const MoveArgs& args, int begin, int end, int32_t* base) {
  const Shape& shape = args.shape;
  const int width = shape.rows_per_token();
  int chunk = begin / kChunkTokens;
  for (int bin = threadIdx.x; bin < NumBins(shape); bin += blockDim.x) {
    int earlier = 0;
#pragma unroll 16
    for (int c = 0; c < chunk; ++c) earlier += args.chunk_counts[int64_t{c} * NumBins(shape) + bin];
    base[bin] += earlier;
  }
  __syncthreads();
  for (int first = begin; first < end; ++chunk) {
    const int last = min(end, (chunk + 1) * kChunkTokens);
    for (int64_t i = int64_t{first} * width + threadIdx.x; i < int64_t{last} * width; i += blockDim.x) {
      const int index = args.handle.token_rows[i];
      if (index < 0) continue;
      const int bin = shape.order == Order::kRank ? shape.num_experts + static_cast<int>(i % width)
                                                  : args.handle.topk_idx[i];
      const int row = base[bin] + index;
      args.handle.token_rows[i] = IsRow(row, shape.capacity) ? row : -1;
    }
    first = last;
    __syncthreads();
    for (int bin = threadIdx.x; bin < NumBins(shape) && first < end; bin += blockDim.x) {
      base[bin] += args.chunk_counts[int64_t{chunk} * NumBins(shape) + bin];
    }
    __syncthreads();
  }
}

// Bytes of shared memory that the counts take.
JAX_EP_HD inline int64_t SharedCounts(const MoveArgs& args) {
  return args.chunk_counts == nullptr ? 0 : AlignUp(int64_t{sizeof(int32_t)} * 3 * NumBins(args.shape), 128);
}

// This block's share of the tokens: an equal, contiguous part.
template <bool kInBulk>
__device__ void Send(const MoveArgs& args, int32_t* base, const Published* published, std::byte* slots,
                     uint64_t (*barriers)[2]) {
  const int64_t T = args.shape.num_tokens;
  const int begin = static_cast<int>(T * blockIdx.x / args.num_senders);
  const int end = static_cast<int>(T * (blockIdx.x + 1) / args.num_senders);
  if (begin >= end) return;
  if (args.chunk_counts != nullptr) FinishRows(args, begin, end, base);
  if (!kInBulk) return SendTokens(args, begin, end, published);
  const int warp = threadIdx.x / kWarp;
  if (warp >= args.bulk.num_warps) return;
  FenceBulk();
  SendTokensInBulk(args, begin, end, published, slots + int64_t{2} * warp * args.bulk.slot_bytes,
                   barriers[warp]);
}

template <bool kInBulk>
__global__ void __launch_bounds__(kMoveThreads, 1) MoveKernel(const __grid_constant__ MoveArgs args) {
  // own, totals, base: [E + R] each; for bulk copies then the slots, or where nothing is sent zeros
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ Published published[kMaxRanks];
  __shared__ uint64_t barriers[kMaxBulkWarps][2];
  const Shape& shape = args.shape;
  const Peers& peers = args.peers;
  const bool routes = args.chunk_counts != nullptr, local = peers.num_ranks == 0;
  const Op op = routes ? Op::kDispatch : Op::kCachedDispatch;
  int32_t* const own = reinterpret_cast<int32_t*>(shared);
  int32_t *const totals = own + NumBins(shape), *const base = totals + NumBins(shape);

  if (kInBulk && threadIdx.x < 2 * kMaxBulkWarps) InitBarrier(&barriers[threadIdx.x / 2][threadIdx.x % 2]);
  uint32_t epoch = 0;
  bool alive = local || Begin(peers, op, args.rank_operand, &epoch);
  if (alive && routes && (local || blockIdx.x == 0)) {
    for (int bin = threadIdx.x; bin < NumBins(shape); bin += blockDim.x) {
      int rows = 0;
#pragma unroll 16
      for (int c = 0; c < NumChunks(shape); ++c) rows += args.chunk_counts[int64_t{c} * NumBins(shape) + bin];
      own[bin] = rows;
      for (int r = 0; r < peers.num_ranks; ++r) peers.control[r]->counts[peers.rank][bin] = rows;
    }
  }
  Published mine{};
  for (int p = 0; p < args.num_payloads; ++p) mine.buffers[p] = args.payloads[p].out;
  mine.weights = args.recv_topk_weights;
  mine.topk_idx = args.recv_topk_idx;
  if (local) {
    if (threadIdx.x == 0) published[0] = mine;
  } else if (alive) {
    if (blockIdx.x == 0) Enter(peers, mine, epoch);
    alive = WaitForAll(peers, op, Phase::kEnter, peers.control[peers.rank]->enter, epoch);
    if (alive) ReadPublished(peers, args.num_payloads, published);
  }
  __syncthreads();
  if (alive) {
    const int me = peers.rank, L = shape.num_local_experts();
    if (routes) {
      FindFirstRows(args, own, totals, base);
      if (blockIdx.x == 0) WriteReceiver(args, own, totals);
    }
    if (static_cast<int>(blockIdx.x) < args.num_senders) {
      Send<kInBulk>(args, base, published, shared + SharedCounts(args), barriers);
    } else {
      const int num_rows = routes
                               ? totals[shape.num_experts + me]
                               : args.handle.rank_prefix_matrix[(shape.num_ranks - 1) * shape.num_ranks + me];
      const int32_t* rows = routes ? totals + me * L : args.handle.expert_counts;
      const int64_t thread = int64_t{blockIdx.x - args.num_senders} * blockDim.x + threadIdx.x;
      const int64_t num_threads = int64_t{gridDim.x - args.num_senders} * blockDim.x;
      std::byte* const zeros = kInBulk ? shared + SharedCounts(args) : nullptr;
      if (kInBulk) {
        Clear(zeros, kZeroBytes, {threadIdx.x, blockDim.x, nullptr});
        FenceBulk();
        __syncthreads();
      }
      ClearGaps(args, rows, num_rows, {thread, num_threads, zeros});
    }
  }
  if (local) return;
  if (!IsLastBlock(peers)) return;
  const bool counts_pairs = alive && routes && shape.order == Order::kRank;
  const int cut = counts_pairs ? CountWholeSources(args, own) : 0;
  if (Leave(peers, op, epoch) && counts_pairs) CountCutSource(args, cut);
}

// Two slots a warp, as many warps as have room.
BulkPlan PlanBulk(const MoveArgs& args, const Device& device) {
  int64_t longest = 0;
  for (int p = 0; p < args.num_payloads; ++p) {
    if (IsBulkRow(args.payloads[p].row_bytes)) longest = std::max(longest, args.payloads[p].row_bytes);
  }
  if (longest == 0 || !device.copies_in_bulk) return {0, 0};
  const int64_t slot = std::min(AlignUp(longest, 128), int64_t{kMaxSlotBytes});
  const int64_t room = kBulkBytes - SharedCounts(args);
  return {static_cast<int32_t>(std::min(room / (2 * slot), int64_t{kMaxBulkWarps})),
          static_cast<int32_t>(slot)};
}

cudaError_t Move(MoveArgs args, const Device& device, int num_senders, cudaStream_t stream) {
  args.bulk = PlanBulk(args, device);
  args.num_senders = num_senders;
  const auto kernel = args.bulk.num_warps > 0 ? MoveKernel<true> : MoveKernel<false>;
  int64_t shared = SharedCounts(args);
  if (args.bulk.num_warps > 0) {
    shared += std::max(int64_t{2} * args.bulk.num_warps * args.bulk.slot_bytes, int64_t{kZeroBytes});
  }
  // As many blocks clear as pays if nothing arrives.
  int64_t bytes = 0;
  for (int p = 0; p < args.num_payloads; ++p) bytes += args.payloads[p].row_bytes * args.shape.capacity;
  const int64_t most = std::max(device.num_sms - num_senders, device.num_sms / 2);
  const int clearers = static_cast<int>(std::clamp(bytes / kBytesToClear, int64_t{1}, most));
  // Slots, and counts of many experts, need more than the default.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  kernel<<<num_senders + clearers, kMoveThreads, shared, stream>>>(args);
  return cudaPeekAtLastError();
}

template <typename Params>
MoveArgs ArgsOf(const Params& params) {
  MoveArgs args{};
  args.shape = params.shape;
  for (int p = 0; p < params.num_payloads; ++p) args.payloads[p] = params.payloads[p];
  args.num_payloads = params.num_payloads;
  args.topk_weights = params.topk_weights;
  return args;
}

}  // namespace

cudaError_t LaunchDispatch(const DispatchParams& params, const Peers& peers, const Device& device,
                           cudaStream_t stream) {
  const cudaError_t error = LaunchCount(params.shape, params.topk_idx, params.handle.topk_idx,
                                        params.handle.token_rows, params.chunk_counts, stream);
  if (error != cudaSuccess) return error;
  MoveArgs args = ArgsOf(params);
  args.peers = peers;
  args.rank_operand = params.rank_operand;
  args.handle = params.handle;
  args.chunk_counts = params.chunk_counts;
  args.recv_topk_weights = params.recv_topk_weights;
  args.recv_topk_idx = params.recv_topk_idx;
  args.tokens_per_expert = params.tokens_per_expert;
  args.group_sizes = params.group_sizes;
  args.num_tokens = params.num_tokens;
  args.num_dropped = params.num_dropped;
  return Move(args, device, kSenders, stream);
}

cudaError_t LaunchCachedDispatch(const CachedDispatchParams& params, const Peers& peers, const Device& device,
                                 cudaStream_t stream) {
  MoveArgs args = ArgsOf(params);
  args.peers = peers;
  args.rank_operand = params.rank_operand;
  args.handle = params.handle;
  args.recv_topk_weights = params.recv_topk_weights;
  return Move(args, device, kSenders, stream);
}

// A dispatch within a group of one rank, which meets nobody. The routed ids are the row map's, and are
// not needed afterwards: they lie behind the chunks' counts.
cudaError_t LaunchPermute(const PermuteParams& params, const Device& device, cudaStream_t stream) {
  const cudaError_t error = LaunchCount(params.shape, params.topk_idx, params.routed_idx, params.row_map,
                                        params.chunk_counts, stream);
  if (error != cudaSuccess) return error;
  MoveArgs args = ArgsOf(params);
  args.handle = {params.routed_idx, params.row_map, nullptr, nullptr};
  args.chunk_counts = params.chunk_counts;
  args.recv_topk_weights = params.permuted_weights;
  args.tokens_per_expert = params.tokens_per_expert;
  args.group_sizes = params.group_sizes;
  args.num_dropped = params.num_dropped;
  return Move(args, device, device.num_sms, stream);
}

// Whether the kernel that runs on the current device was compiled for bulk copies: what counts is the
// architecture it was compiled for, not the device's own.
static bool IsBulkBuilt() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, MoveKernel<true>) == cudaSuccess && attributes.ptxVersion >= 90;
}

Device DescribeDevice(bool plain_copies) {
  int device = 0, num_sms = 1;
  (void)cudaGetDevice(&device);
  (void)cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  return {num_sms, !plain_copies && IsBulkBuilt()};
}

cudaError_t PreloadDispatch() {
  cudaFuncAttributes attributes;
  cudaError_t error = PreloadCount();
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, MoveKernel<false>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, MoveKernel<true>);
  return error;
}

}  // namespace jax_ep::cuda
