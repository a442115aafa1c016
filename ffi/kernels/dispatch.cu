// Dispatch: counts, then each row straight to its final place in its receiver's buffer.
#include "kernels/device.cuh"
#include "kernels/kernels.h"
#include "kernels/topk.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kCountThreads = 288;
constexpr int kMoveThreads = 1024;
constexpr int kMoveBlocks = 24;
constexpr int kVectors = 4;  // 16-byte loads in flight a thread

// One block a chunk. Writes the routed experts, each row's index within its chunk to token_rows (-1: no
// row), and the chunk's counts by expert, then by rank. A bin is one thread's, so no atomics decide.
__global__ void CountKernel(Shape shape, TopkIds ids, int32_t* topk_idx, int32_t* token_rows,
                            int32_t* chunk_counts) {
  extern __shared__ int16_t experts[];                // [kChunkTokens, K]
  __shared__ uint8_t pairs[kChunkTokens][kMaxRanks];  // choices of each token at each rank
  const int first = blockIdx.x * kChunkTokens;
  const int tokens = min(kChunkTokens, shape.num_tokens - first);
  const int num_choices = tokens * shape.top_k;
  const bool by_rank = shape.order == Order::kRank;
  for (int i = threadIdx.x; i < num_choices; i += blockDim.x) {
    const int expert = RoutedAt(ids, shape, first + i / shape.top_k, i % shape.top_k);
    experts[i] = static_cast<int16_t>(expert);
    topk_idx[int64_t{first} * shape.top_k + i] = expert;
    if (!by_rank) token_rows[int64_t{first} * shape.top_k + i] = -1;
  }
  for (int i = threadIdx.x; i < tokens * shape.num_ranks; i += blockDim.x) {
    pairs[i / shape.num_ranks][i % shape.num_ranks] = 0;
  }
  __syncthreads();
  for (int t = threadIdx.x; t < tokens; t += blockDim.x) {
    for (int k = 0; k < shape.top_k; ++k) {
      const int expert = experts[t * shape.top_k + k];
      if (expert >= 0) ++pairs[t][shape.rank_of(expert)];
    }
  }
  __syncthreads();
  int32_t* counts = chunk_counts + int64_t{blockIdx.x} * NumBins(shape);
  // The ranks' bins first, by the first threads, while the others begin with the experts'.
  for (int i = threadIdx.x; i < NumBins(shape); i += blockDim.x) {
    int count = 0;
    if (i < shape.num_ranks) {
      for (int t = 0; t < tokens; ++t) {
        const int here = pairs[t][i];
        if (by_rank) token_rows[int64_t{first + t} * shape.num_ranks + i] = here > 0 ? count : -1;
        count += by_rank ? here > 0 : here;
      }
      counts[shape.num_experts + i] = count;
    } else {
      const int expert = i - shape.num_ranks;
#pragma unroll 8
      for (int c = 0; c < num_choices; ++c) {
        if (experts[c] != expert) continue;
        if (!by_rank) token_rows[int64_t{first} * shape.top_k + c] = count;
        ++count;
      }
      counts[expert] = count;
    }
  }
}

// A push, routed now or earlier, to peers or on one device. By value in the kernel's parameters.
struct MoveArgs {
  Shape shape;
  Peers peers;
  const int32_t* rank_operand;
  HandleArrays handle;
  const int32_t* chunk_counts;  // null: routed earlier, token_rows are final
  Payload payloads[kMaxPayloads];
  int32_t num_payloads;
  const float* topk_weights;
  float* recv_topk_weights;
  int32_t* recv_topk_idx;
  int32_t* tokens_per_expert;
  int32_t* group_sizes;
  int32_t* num_tokens;
  int32_t* num_dropped;
};

// Rows of rank `source` in bin `bin`, before drops.
__device__ int CountOf(const MoveArgs& args, const int32_t* own, int source, int bin) {
  return args.peers.num_ranks == 0 ? own[bin]
                                   : __ldcg(&args.peers.control[args.peers.rank]->counts[source][bin]);
}

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

// What the counts alone say about this rank as a receiver. One block.
__device__ void WriteReceiver(const MoveArgs& args, const int32_t* own, const int32_t* totals) {
  const Shape& shape = args.shape;
  const int R = shape.num_ranks, L = shape.num_local_experts(), me = args.peers.rank;
  for (int d = threadIdx.x; d < R; d += blockDim.x) {
    int rows = 0;
    for (int source = 0; source < R; ++source) {
      rows += CountOf(args, own, source, shape.num_experts + d);
      if (args.handle.rank_prefix_matrix != nullptr) args.handle.rank_prefix_matrix[source * R + d] = rows;
    }
  }
  for (int i = threadIdx.x; i < L; i += blockDim.x) {
    if (args.handle.expert_counts != nullptr) args.handle.expert_counts[i] = totals[me * L + i];
  }
  if (threadIdx.x != 0) return;
  const int num_rows = totals[shape.num_experts + me];
  int kept = RowsKept(0, num_rows, shape.capacity);
  if (shape.order == Order::kExpert) {
    int64_t begin = 0;
    kept = 0;
    for (int i = 0; i < L; ++i) {
      const int64_t rows = totals[me * L + i], end = begin + AlignUp(rows, shape.alignment);
      args.tokens_per_expert[i] = RowsKept(begin, begin + rows, shape.capacity);
      args.group_sizes[i] = RowsKept(begin, end, shape.capacity);
      kept += args.tokens_per_expert[i];
      begin = end;
    }
  }
  if (args.num_tokens != nullptr) *args.num_tokens = kept;
  *args.num_dropped = num_rows - kept;
}

// By rank: kept (row, k) pairs of each local expert, as far as the counts tell. Returns the first row of the
// one source that the capacity cuts, C if none is cut. One block, before Leave: the counts are then the
// peers' to write again.
__device__ int CountWholeSources(const MoveArgs& args, const int32_t* own) {
  const Shape& shape = args.shape;
  const int L = shape.num_local_experts(), me = args.peers.rank;
  int begin = 0, source = 0;
  for (; source < shape.num_ranks; ++source) {
    const int end = begin + CountOf(args, own, source, shape.num_experts + me);
    if (end > shape.capacity) break;
    begin = end;
  }
  for (int i = threadIdx.x; i < L; i += blockDim.x) {
    int pairs = 0;
    for (int s = 0; s < source; ++s) pairs += CountOf(args, own, s, me * L + i);
    args.tokens_per_expert[i] = pairs;
  }
  __syncthreads();
  return source == shape.num_ranks ? shape.capacity : begin;
}

// The rest of them, counted where the rows arrived. One block, after Leave.
__device__ void CountCutSource(const MoveArgs& args, int begin) {
  const int64_t last = int64_t{args.shape.capacity} * args.shape.top_k;
  for (int64_t i = int64_t{begin} * args.shape.top_k + threadIdx.x; i < last; i += blockDim.x) {
    const int expert = __ldcg(&args.recv_topk_idx[i]);
    if (expert >= 0) atomicAdd(&args.tokens_per_expert[expert], 1);
  }
}

// Zeroes rows [begin, end) of this rank's buffers that hold no token.
__device__ void ClearRows(const MoveArgs& args, int64_t begin, int64_t end) {
  const Shape& shape = args.shape;
  begin = min(max(begin, int64_t{0}), int64_t{shape.capacity});
  end = min(max(end, int64_t{0}), int64_t{shape.capacity});
  if (begin >= end) return;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t num_threads = int64_t{gridDim.x} * blockDim.x;
  for (int p = 0; p < args.num_payloads; ++p) {
    const int64_t bytes = args.payloads[p].row_bytes;
    ZeroBytes(args.payloads[p].out + begin * bytes, (end - begin) * bytes, thread, num_threads);
  }
  const int64_t per_row = shape.order == Order::kRank ? shape.top_k : 1;
  for (int64_t i = begin * per_row + thread; i < end * per_row; i += num_threads) {
    if (args.recv_topk_weights != nullptr) args.recv_topk_weights[i] = 0.0f;
    if (args.recv_topk_idx != nullptr) args.recv_topk_idx[i] = -1;
  }
}

__device__ void ClearGaps(const MoveArgs& args, const int32_t* expert_rows, int num_rows) {
  if (args.shape.order == Order::kRank) return ClearRows(args, num_rows, args.shape.capacity);
  int64_t block = 0;
  for (int i = 0; i < args.shape.num_local_experts(); ++i) {
    const int64_t end = block + AlignUp(expert_rows[i], args.shape.alignment);
    ClearRows(args, block + expert_rows[i], end);
    block = end;
  }
  ClearRows(args, block, args.shape.capacity);
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

cudaError_t Count(const Shape& shape, const TopkIds& ids, int32_t* topk_idx, int32_t* token_rows,
                  int32_t* chunk_counts, cudaStream_t stream) {
  const size_t shared = sizeof(int16_t) * kChunkTokens * shape.top_k;
  CountKernel<<<NumChunks(shape), kCountThreads, shared, stream>>>(shape, ids, topk_idx, token_rows,
                                                                   chunk_counts);
  return cudaPeekAtLastError();
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
  const cudaError_t error = Count(params.shape, params.topk_idx, params.handle.topk_idx,
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
  const cudaError_t error =
      Count(params.shape, params.topk_idx, params.routed_idx, params.row_map, params.chunk_counts, stream);
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
  cudaError_t error = cudaFuncGetAttributes(&attributes, CountKernel);
  if (error != cudaSuccess) return error;
  // Counts of many experts need more than the default shared memory.
  error = cudaFuncSetAttribute(MoveKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               sizeof(int32_t) * 3 * kMaxBins);
  if (error != cudaSuccess) return error;
  return cudaFuncGetAttributes(&attributes, MoveKernel);
}

}  // namespace jax_ep::cuda
