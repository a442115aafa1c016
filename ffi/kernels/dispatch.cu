// Dispatch: after the count, each row straight to its final place in its receiver's buffer.
#include "kernels/device.cuh"
#include "kernels/kernels.h"
#include "kernels/receive.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kMoveThreads = 1024;
constexpr int kMoveBlocks = 24;
constexpr int kVectors = 4;  // 16-byte loads in flight a thread

// Into `totals` [E + R]: rows of all ranks in each bin. Into `first` [E + R]: the first row of this
// rank's block at the receiver. `own` are this rank's counts.
__device__ void FindFirstRows(const MoveArgs& args, const int32_t* own, int32_t* totals, int32_t* first) {
  const Shape& shape = args.shape;
  const int num_sources = shape.num_ranks;
  for (int bin = threadIdx.x; bin < NumBins(shape); bin += blockDim.x) {
    int before = 0, all = 0;
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

// A row of 16-byte vectors (or bytes) to all its receivers. Called by a warp; lane i holds receiver i.
template <typename Vector>
__device__ void CopyRow(const Vector* source, int64_t n, unsigned receivers, Vector* target, int lane) {
  for (int64_t first = 0; first < n; first += kWarp * kVectors) {
    Vector values[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = first + v * kWarp + lane;
      if (i < n) values[v] = source[i];
    }
    for (unsigned left = receivers; left != 0; left &= left - 1) {
      Vector* to = reinterpret_cast<Vector*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(target), __ffs(left) - 1));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int64_t i = first + v * kWarp + lane;
        if (i < n) to[i] = values[v];
      }
    }
  }
}

// Sends token t to its rows. Called by a warp; `base` [E + R] is the row that index 0 of the token's chunk
// has in each bin, null if token_rows are final.
__device__ void SendToken(const MoveArgs& args, int t, const int32_t* base, const Published* published) {
  const Shape& shape = args.shape;
  const int lane = threadIdx.x % kWarp, width = shape.rows_per_token();
  const bool by_rank = shape.order == Order::kRank;
  const int32_t* experts = args.handle.topk_idx + int64_t{t} * shape.top_k;
  int row = -1, receiver = 0;
  if (lane < width) {
    int32_t* entry = args.handle.token_rows + int64_t{t} * width + lane;
    const int expert = by_rank ? -1 : experts[lane];
    receiver = lane;
    bool routed = *entry >= 0;
    if (!by_rank) {
      routed = routed && IsExpert(expert, shape.num_experts);
      receiver = routed ? shape.rank_of(expert) : 0;
    }
    if (routed) {
      row = base == nullptr ? *entry : base[by_rank ? shape.num_experts + lane : expert] + *entry;
      if (!IsRow(row, shape.capacity)) row = -1;
    }
    if (base != nullptr) *entry = row;
  }
  const unsigned receivers = __ballot_sync(kAllLanes, row >= 0);
  if (receivers == 0) return;
  const Published& there = published[receiver];
  for (int p = 0; p < args.num_payloads; ++p) {
    const int64_t bytes = args.payloads[p].row_bytes;
    const std::byte* source = args.payloads[p].in + t * bytes;
    std::byte* target = static_cast<std::byte*>(there.buffers[p]) + row * bytes;
    if (bytes % 16 == 0) {
      CopyRow(reinterpret_cast<const uint4*>(source), bytes / 16, receivers, reinterpret_cast<uint4*>(target),
              lane);
    } else {
      CopyRow(source, bytes, receivers, target, lane);
    }
  }
  if (!by_rank) {
    if (args.topk_weights != nullptr && row >= 0) {
      static_cast<float*>(there.weights)[row] = args.topk_weights[int64_t{t} * shape.top_k + lane];
    }
    return;
  }
  for (unsigned left = receivers; left != 0; left &= left - 1) {
    const int to = __ffs(left) - 1;
    const int64_t first = int64_t{__shfl_sync(kAllLanes, row, to)} * shape.top_k;
    for (int k = lane; k < shape.top_k; k += kWarp) {
      const bool here = experts[k] >= 0 && shape.rank_of(experts[k]) == to;
      if (args.topk_weights != nullptr) {
        static_cast<float*>(published[to].weights)[first + k] =
            here ? args.topk_weights[int64_t{t} * shape.top_k + k] : 0.0f;
      }
      if (base != nullptr) {
        static_cast<int32_t*>(published[to].topk_idx)[first + k] =
            here ? experts[k] - to * shape.num_local_experts() : -1;
      }
    }
  }
}

// Sends this block's share of the tokens: an equal, contiguous part.
__device__ void SendTokens(const MoveArgs& args, int32_t* base, const Published* published) {
  const Shape& shape = args.shape;
  const int64_t T = shape.num_tokens;
  const int begin = static_cast<int>(T * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(T * (blockIdx.x + 1) / gridDim.x);
  const int warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
  if (args.chunk_counts == nullptr) {
    for (int t = begin + warp; t < end; t += num_warps) SendToken(args, t, nullptr, published);
    return;
  }
  if (begin >= end) return;
  // base: the first row of the block, plus the rows of this rank's earlier chunks.
  int chunk = begin / kChunkTokens;
  for (int bin = threadIdx.x; bin < NumBins(shape); bin += blockDim.x) {
    int earlier = 0;
    for (int c = 0; c < chunk; ++c) earlier += args.chunk_counts[int64_t{c} * NumBins(shape) + bin];
    base[bin] += earlier;
  }
  __syncthreads();
  for (int first = begin; first < end; ++chunk) {
    const int last = min(end, (chunk + 1) * kChunkTokens);
    for (int t = first + warp; t < last; t += num_warps) SendToken(args, t, base, published);
    first = last;
    __syncthreads();
    for (int bin = threadIdx.x; bin < NumBins(shape) && first < end; bin += blockDim.x) {
      base[bin] += args.chunk_counts[int64_t{chunk} * NumBins(shape) + bin];
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kMoveThreads, 1) MoveKernel(const __grid_constant__ MoveArgs args) {
  extern __shared__ int32_t bins[];  // own, totals, base: [E + R] each
  __shared__ Published published[kMaxRanks];
  const Shape& shape = args.shape;
  const Peers& peers = args.peers;
  const bool routes = args.chunk_counts != nullptr, local = peers.num_ranks == 0;
  const Op op = routes ? Op::kDispatch : Op::kCachedDispatch;
  int32_t *own = bins, *totals = bins + NumBins(shape), *base = bins + 2 * NumBins(shape);

  uint32_t epoch = 0;
  bool alive = local || Begin(peers, op, args.rank_operand, &epoch);
  if (alive && routes && (local || blockIdx.x == 0)) {
    for (int bin = threadIdx.x; bin < NumBins(shape); bin += blockDim.x) {
      int rows = 0;
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
    if (alive && threadIdx.x < peers.num_ranks) {
      const Published* from = &peers.control[peers.rank]->published[threadIdx.x];
      for (int p = 0; p < args.num_payloads; ++p) {
        published[threadIdx.x].buffers[p] = *const_cast<void* const volatile*>(&from->buffers[p]);
      }
      published[threadIdx.x].weights = *const_cast<void* const volatile*>(&from->weights);
      published[threadIdx.x].topk_idx = *const_cast<void* const volatile*>(&from->topk_idx);
    }
  }
  __syncthreads();
  if (alive) {
    const int me = peers.rank, L = shape.num_local_experts();
    if (routes) {
      FindFirstRows(args, own, totals, base);
      if (blockIdx.x == 0) WriteReceiver(args, own, totals);
    }
    SendTokens(args, base, published);
    const int num_rows = routes
                             ? totals[shape.num_experts + me]
                             : args.handle.rank_prefix_matrix[(shape.num_ranks - 1) * shape.num_ranks + me];
    ClearGaps(args, routes ? totals + me * L : args.handle.expert_counts, num_rows);
  }
  if (local) return;
  if (!IsLastBlock(peers)) return;
  const bool counts_pairs = alive && routes && shape.order == Order::kRank;
  const int cut = counts_pairs ? CountWholeSources(args, own) : 0;
  if (Leave(peers, op, epoch) && counts_pairs) CountCutSource(args, cut);
}

cudaError_t Move(const MoveArgs& args, int blocks, cudaStream_t stream) {
  const size_t shared = args.chunk_counts == nullptr ? 0 : sizeof(int32_t) * 3 * NumBins(args.shape);
  MoveKernel<<<blocks, kMoveThreads, shared, stream>>>(args);
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

cudaError_t LaunchDispatch(const DispatchParams& params, const Peers& peers, cudaStream_t stream) {
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
  return Move(args, kMoveBlocks, stream);
}

cudaError_t LaunchCachedDispatch(const CachedDispatchParams& params, const Peers& peers,
                                 cudaStream_t stream) {
  MoveArgs args = ArgsOf(params);
  args.peers = peers;
  args.rank_operand = params.rank_operand;
  args.handle = params.handle;
  args.recv_topk_weights = params.recv_topk_weights;
  return Move(args, kMoveBlocks, stream);
}

// A dispatch within a group of one rank, which meets nobody. The routed ids are the row map's, and are
// not needed afterwards: they lie behind the chunks' counts.
cudaError_t LaunchPermute(const PermuteParams& params, int num_sms, cudaStream_t stream) {
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
  return Move(args, num_sms, stream);
}

cudaError_t PreloadDispatch() {
  cudaFuncAttributes attributes;
  cudaError_t error = PreloadCount();
  if (error != cudaSuccess) return error;
  // Counts of many experts need more than the default shared memory.
  error = cudaFuncSetAttribute(MoveKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               sizeof(int32_t) * 3 * kMaxBins);
  if (error != cudaSuccess) return error;
  return cudaFuncGetAttributes(&attributes, MoveKernel);
}

}  // namespace jax_ep::cuda
