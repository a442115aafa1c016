// Combine: each token's rows, pulled from the peers' buffers and summed in registers.
#include "kernels/kernels.h"
#include "kernels/sum.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocks = 32;
constexpr int kRows = 4;     // rows whose loads are in flight at a time
constexpr int kVectors = 2;  // 16-byte loads a row and thread
constexpr int kMaxBiases = 8;

struct CombineArgs {
  Shape shape;
  Peers peers;
  const int32_t* rank_operand;
  HandleArrays handle;
  Summand summands[kMaxPayloads];
  int32_t num_summands;
  const float* row_weights;
  Bias biases[kMaxBiases];
  int32_t num_biases;
  const float* recv_topk_weights;
  float* topk_weights;
};

// A warp's view of one token: lane i holds the i-th of its rows, in the order of the sum.
struct Sources {
  int row;
  int rank;
  int count;  // rows
};

// By rank; by expert a rank's rows by k. `order` is room for a warp.
__device__ Sources FindSources(const CombineArgs& args, int t, int lane, uint8_t* order) {
  const Shape& shape = args.shape;
  const int width = shape.rows_per_token();
  int row = -1, rank = lane;
  if (lane < width) {
    row = args.handle.token_rows[int64_t{t} * width + lane];
    if (shape.order == Order::kExpert) {
      const int expert = args.handle.topk_idx[int64_t{t} * shape.top_k + lane];
      rank = IsExpert(expert, shape.num_experts) ? shape.rank_of(expert) : -1;
    }
    if (!IsRow(row, shape.capacity) || rank < 0) row = -1;
  }
  const unsigned earlier_lanes = (1u << lane) - 1;
  int place = 0, count = 0;
  for (int r = 0; r < shape.num_ranks; ++r) {
    const unsigned rows = __ballot_sync(kAllLanes, row >= 0 && rank == r);
    if (rank == r) place = count + __popc(rows & earlier_lanes);
    count += __popc(rows);
  }
  if (row >= 0) order[place] = static_cast<uint8_t>(lane);
  __syncwarp();
  const int from = lane < count ? order[lane] : 0;
  __syncwarp();
  return {__shfl_sync(kAllLanes, row, from), __shfl_sync(kAllLanes, rank, from), count};
}

// Sums one slice of a token's rows. A rank's rows are summed apart, as if it had sent one row.
template <typename T, int N>
__device__ void SumSlice(const CombineArgs& args, const Published* published, int index, int t, int64_t first,
                         const Sources& sources, float weight, int lane) {
  using Acc = typename Sum<T>::Acc;
  const Summand& summand = args.summands[index];
  const int64_t width = summand.num_elements;
  Acc total[kVectors][N] = {}, partial[kVectors][N] = {};
  int rank = -1;
  for (int begin = 0; begin < sources.count; begin += kRows) {
    Pack<T, N> packs[kRows][kVectors];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int from = min(begin + i, sources.count - 1);
      const int64_t row = __shfl_sync(kAllLanes, sources.row, from);
      const int owner = __shfl_sync(kAllLanes, sources.rank, from);
      const T* base = static_cast<const T*>(published[owner].buffers[index]) + row * width;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int64_t column = first + (v * kWarp + lane) * N;
        if (begin + i < sources.count && column < width) packs[i][v] = Pack<T, N>::Load(base + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (begin + i < sources.count) {
        const int owner = __shfl_sync(kAllLanes, sources.rank, begin + i);
        const Acc factor = __shfl_sync(kAllLanes, weight, begin + i);
        const bool starts = owner != rank;
        rank = owner;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
          for (int j = 0; j < N; ++j) {
            if (starts) {
              total[v][j] += partial[v][j];
              partial[v][j] = Acc{0};
            }
            partial[v][j] =
                MultiplyAdd(factor, static_cast<Acc>(Widen(packs[i][v].values[j])), partial[v][j]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t column = first + (v * kWarp + lane) * N;
    if (column >= width) continue;
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      Acc sum = total[v][j] + partial[v][j];
      for (int b = 0; b < args.num_biases; ++b) {
        sum += LoadAs<Acc>(args.biases[b].type, args.biases[b].data, t * width + column + j);
      }
      if constexpr (std::is_same_v<T, double>) {
        out.values[j] = sum;
      } else {
        out.values[j] = Narrow<T>(sum);
      }
    }
    out.Store(static_cast<T*>(summand.out) + t * width + column);
  }
}

// All slices of one array, spread over the warps of the grid.
template <typename T, int N>
__device__ void SumArray(const CombineArgs& args, const Published* published, int index) {
  __shared__ uint8_t order[kThreads / kWarp][kWarp];
  const int lane = threadIdx.x % kWarp;
  const int64_t width = args.summands[index].num_elements;
  const int64_t slice = int64_t{kWarp} * kVectors * N;
  const int64_t num_slices = (width + slice - 1) / slice;
  const int64_t warp = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp;
  const int64_t num_warps = int64_t{gridDim.x} * blockDim.x / kWarp;
  // A token is one warp's; where tokens are few, several warps share it, slice by slice.
  const int64_t splits = max(int64_t{1}, min(num_slices, num_warps / args.shape.num_tokens));
  for (int64_t unit = warp; unit < args.shape.num_tokens * splits; unit += num_warps) {
    const int t = static_cast<int>(unit / splits);
    const Sources sources = FindSources(args, t, lane, order[threadIdx.x / kWarp]);
    float weight = 1.0f;
    if (args.row_weights != nullptr && lane < sources.count) {
      weight = __ldcg(static_cast<const float*>(published[sources.rank].weights) + sources.row);
    }
    for (int64_t first = unit % splits * slice; first < width; first += splits * slice) {
      SumSlice<T, N>(args, published, index, t, first, sources, weight, lane);
    }
  }
}

template <typename T>
__device__ void SumArrayOf(const CombineArgs& args, const Published* published, int index) {
  constexpr int kFull = 16 / sizeof(T);
  if (args.summands[index].num_elements % kFull == 0) {
    SumArray<T, kFull>(args, published, index);
  } else {
    SumArray<T, 1>(args, published, index);
  }
}

// Takes each choice's weight back from the row it was sent with. The row weights' place in Published is
// taken by these: no op has both.
__device__ void ReturnWeights(const CombineArgs& args, const Published* published) {
  const Shape& shape = args.shape;
  const int width = shape.rows_per_token();
  const bool by_rank = shape.order == Order::kRank;
  const int64_t choices = int64_t{shape.num_tokens} * shape.top_k;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < choices;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t t = i / shape.top_k, k = i % shape.top_k;
    const int expert = args.handle.topk_idx[i];
    float weight = 0.0f;
    if (IsExpert(expert, shape.num_experts)) {
      const int rank = shape.rank_of(expert);
      const int64_t row = args.handle.token_rows[t * width + (by_rank ? rank : k)];
      if (IsRow(row, shape.capacity)) {
        weight = __ldcg(static_cast<const float*>(published[rank].weights) +
                        (by_rank ? row * shape.top_k + k : row));
      }
    }
    args.topk_weights[i] = weight;
  }
}

// Sums arrays of one type: each type then has the registers to itself.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1) CombineKernel(const __grid_constant__ CombineArgs args) {
  __shared__ Published published[kMaxRanks];
  const Peers& peers = args.peers;
  uint32_t epoch = 0;
  bool alive = Begin(peers, Op::kCombine, args.rank_operand, &epoch);
  if (alive) {
    if (blockIdx.x == 0) {
      Published mine{};
      for (int i = 0; i < args.num_summands; ++i) mine.buffers[i] = const_cast<void*>(args.summands[i].rows);
      mine.weights =
          const_cast<float*>(args.row_weights != nullptr ? args.row_weights : args.recv_topk_weights);
      Enter(peers, mine, epoch);
    }
    Control* own = peers.control[peers.rank];
    alive = WaitForAll(peers, Op::kCombine, Phase::kEnter, own->enter, epoch);
    if (alive) ReadPublished(peers, args.num_summands, published);
  }
  if (alive) {
    for (int i = 0; i < args.num_summands; ++i) SumArrayOf<T>(args, published, i);
    if (args.recv_topk_weights != nullptr) ReturnWeights(args, published);
  }
  if (IsLastBlock(peers)) Leave(peers, Op::kCombine, epoch);
}

}  // namespace

// Calls f with the kernel for arrays of a type.
template <typename F>
static cudaError_t WithKernel(Float type, F&& f) {
  switch (type) {
    case Float::kF16:
      return f(CombineKernel<__half>);
    case Float::kBF16:
      return f(CombineKernel<__nv_bfloat16>);
    case Float::kF32:
      return f(CombineKernel<float>);
    default:
      return f(CombineKernel<double>);
  }
}

constexpr Float kTypes[] = {Float::kF16, Float::kBF16, Float::kF32, Float::kF64};

cudaError_t LaunchCombine(const CombineParams& params, const Peers& peers, cudaStream_t stream) {
  CombineArgs args{};
  args.shape = params.shape;
  args.peers = peers;
  args.rank_operand = params.rank_operand;
  args.handle = params.handle;
  args.row_weights = params.row_weights;
  for (int i = 0; i < params.num_biases; ++i) args.biases[i] = params.biases[i];
  args.num_biases = params.num_biases;
  args.recv_topk_weights = params.recv_topk_weights;
  args.topk_weights = params.topk_weights;
  // One launch for each type among the arrays, nearly always one. The first takes the weights back.
  for (Float type : kTypes) {
    args.num_summands = 0;
    for (int i = 0; i < params.num_summands; ++i) {
      if (params.summands[i].type == type) args.summands[args.num_summands++] = params.summands[i];
    }
    const bool weights_alone = params.num_summands == 0 && type == Float::kF32;
    if (args.num_summands == 0 && !weights_alone) continue;
    const cudaError_t error = WithKernel(type, [&](auto* kernel) {
      kernel<<<kBlocks, kThreads, 0, stream>>>(args);
      return cudaPeekAtLastError();
    });
    if (error != cudaSuccess) return error;
    args.recv_topk_weights = nullptr;
  }
  return cudaSuccess;
}

cudaError_t PreloadCombine() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaSuccess;
  for (Float type : kTypes) {
    if (error == cudaSuccess) {
      error = WithKernel(type, [&](auto* kernel) { return cudaFuncGetAttributes(&attributes, kernel); });
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
