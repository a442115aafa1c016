// Products of FP8 operands that are both stored along the sum: rows times the transposes of their groups'
// matrices [N, M], and the gradient of the matrices, for which both operands are transposed.
//
// Two blocks share a tile of 256 x 256 or 128 x 512 elements of the result, each half of it, and load the
// operand that both need only once. In each block one thread loads operands and scales, and two warpgroups
// multiply. One warp of the first block hands out tiles to both. Tensor cores add up 128 elements
// of the sum. Then these sums are scaled and added up in float32, while the other warpgroup's products run.
// Here a *rank* is a block's number in its cluster, and the *blocks* of a sum are of 128 elements.
#include <type_traits>

#include "kernels/products/engines.h"
#include "kernels/products/sm90/fp8_scales.cuh"
#include "kernels/products/sm90/pipeline.cuh"
#include "kernels/products/sm90/tile_queue.cuh"
#include "kernels/ptx/warpgroup.cuh"

namespace jax_ep::cuda::sm90 {
namespace {

constexpr int kStep = 32;  // elements of the sum that one product adds up
static_assert(kHalfColumns == kFp8Block);

// 128 elements of the sum, of both operands.
struct Stage {
  uint8_t rows[kTileRows][kFp8Block];
  uint8_t columns[kTileColumns][kFp8Block];
};

template <bool kOfWeights>
struct Shared {
  static constexpr int kStages = kOfWeights ? 3 : 4;

  Stage stages[kStages];
  Staged staged[kWarps][2];  // one is filled while the other is stored
  Scales<kOfWeights> scales[kStages];
  Ring<kStages> ring;
  TileQueue queue;
};
static_assert(sizeof(Shared<false>) <= kMostSharedBytes && sizeof(Shared<true>) <= kMostSharedBytes);

// Returns the number of blocks of a tile's sum. (Transposed rows end with a whole one.)
__device__ int NumBlocks(const Tile& tile) { return (tile.end - tile.begin + kFp8Block - 1) / kFp8Block; }

// Loads a tile's operands. Called by one thread of each block.
template <bool kOfWeights>
__device__ void LoadTile(const GroupedDotParams& params, const Maps& maps, const ScaleMaps& scale_maps,
                         Shared<kOfWeights>& shared, int rank, const Tile& tile,
                         Position<Shared<kOfWeights>::kStages>& position) {
  const Part part(tile, rank);
  const MatrixIndex matrix(params, tile.group);
  const CUtensorMap* const columns = &maps.columns[!kOfWeights && matrix.is_redundant ? 1 : 0];
  const int index = kOfWeights ? 0 : matrix.index, column = part.first_column;
  const int boxes = part.num_rows > kBoxRows ? 2 : 1;
  const ScaleLoader<kOfWeights> scales(params, scale_maps, tile, part);
  const uint32_t bytes = sizeof(Stage::columns) + boxes * sizeof(Stage::rows) / 2 + scales.kBytes;
  for (int block = 0; block < NumBlocks(tile); ++block) {
    const int k = tile.begin + block * kFp8Block;
    WaitForLoad(&shared.ring.empty[position.stage], position.phase ^ 1);
    uint64_t* const full = &shared.ring.full[position.stage];
    Stage& to = shared.stages[position.stage];
    ArriveAndExpect(full, bytes);
    scales.Load(block, shared.scales[position.stage], full);
    if (tile.is_wide) {  // both blocks have the same rows
      if (rank < boxes) {
        LoadBox(to.rows[rank * kBoxRows], &maps.rows, k, part.first_row + rank * kBoxRows, 0, full,
                kBothBlocks);
      }
      for (int i = 0; i < kTileColumns; i += kFp8Block)
        LoadBox(to.columns[i], columns, k, column + i, index, full);
    } else {  // both blocks have the same columns
      for (int i = 0; i < boxes * kBoxRows; i += kBoxRows) {
        LoadBox(to.rows[i], &maps.rows, k, part.first_row + i, 0, full);
      }
      const int half = rank * kFp8Block;
      LoadBox(to.columns[half], columns, k, column + half, index, full, kBothBlocks);
    }
    position.Advance();
  }
}

// Loads the operands of all tiles. Called by one thread of each block.
template <bool kOfWeights>
__device__ void Load(const GroupedDotParams& params, const Maps& maps, const ScaleMaps& scale_maps,
                     Shared<kOfWeights>& shared, int rank) {
  TileReceiver receiver{shared.queue, 1};
  Position<Shared<kOfWeights>::kStages> position;
  for (Tile tile = receiver.Next(); !tile.is_end(); tile = receiver.Next()) {
    LoadTile(params, maps, scale_maps, shared, rank, tile, position);
  }
}

// Multiplies a tile, of which this warpgroup has `kCount` halves of the columns.
template <int kCount, bool kOfWeights>
__device__ void MultiplyTile(const GroupedDotParams& params, const Maps& maps, Shared<kOfWeights>& shared,
                             const Tile& tile, const Work& work,
                             Position<Shared<kOfWeights>::kStages>& position) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int first_scale = kOfWeights ? 0 : (work.first_row - work.row) % kScalesAtOnce;
  const int row = first_scale + work.row + static_cast<int>(threadIdx.x) % kWarpgroup / kWarp * 16 + lane / 4;
  const OperandRows rows(shared.stages[0].rows[work.row]), columns(shared.stages[0].columns[work.column]);
  float sums[kCount][64] = {}, part[64];
  for (int block = 0; block < NumBlocks(tile); ++block, position.Advance()) {
    WaitForLoad(&shared.ring.full[position.stage], position.phase);
    const auto& scales = shared.scales[position.stage];
    const float of_rows[2] = {scales.rows[row], scales.rows[row + 8]};
    float of_halves[kHalves];
    if constexpr (!kOfWeights) {
      const float2 both = *reinterpret_cast<const float2*>(scales.columns);
      of_halves[0] = both.x;
      of_halves[1] = both.y;
    }
    const uint32_t begin = position.stage * sizeof(Stage);
#pragma unroll
    for (int half = 0; half < kCount; ++half) {
      const uint32_t first_column = begin + half * sizeof(Stage::columns) / kHalves;
      BeginProducts();
#pragma unroll
      for (int k = 0; k < kFp8Block; k += kStep) {
        MultiplyFp8(part, rows.At(begin + k), columns.At(first_column + k), k > 0);
      }
      CommitProducts();
      WaitForProducts<0>();
      Keep(part);
      if constexpr (kOfWeights) {
        Promote(of_rows, &scales.columns[work.column + half * kFp8Block + 2 * (lane % 4)], part, sums[half]);
      } else {
        Promote(of_rows, of_halves[work.column / kFp8Block + half], part, sums[half]);
      }
    }
    uint32_t words = __float_as_uint(of_rows[0]) ^ __float_as_uint(of_rows[1]);
    if constexpr (kOfWeights) {
      words ^= __float_as_uint(sums[kCount - 1][62]) ^ __float_as_uint(sums[kCount - 1][63]);
    } else {
      words ^= __float_as_uint(of_halves[0]) ^ __float_as_uint(of_halves[1]);
    }
    shared.ring.Release(position.stage, IsLoaded(words));
  }
  Target target(params, maps.out, tile, work, kOfWeights);
  Staged(&staged)[2] = shared.staged[threadIdx.x / kWarp - kWarpgroup / kWarp];
  constexpr int kParts = kHalfColumns / kStoredColumns;
#pragma unroll
  for (int part = 0; part < kCount * kParts; ++part, target.first_column += kStoredColumns) {
    const float* const of_part = &sums[part / kParts][part % kParts * 2 * kPackedWords];
    uint32_t words[kPackedWords];
    for (int i = 0; i < kPackedWords; ++i) words[i] = Pack<__nv_bfloat16>(of_part[2 * i], of_part[2 * i + 1]);
    StorePart<kOfWeights>(params, target, words, staged[part % 2]);
  }
}

// Multiplies all tiles. Called by one warpgroup.
template <bool kOfWeights>
__device__ void Multiply(const GroupedDotParams& params, const Maps& maps, Shared<kOfWeights>& shared,
                         int rank, int warpgroup) {
  TileReceiver receiver{shared.queue, kAllLanes};
  Position<Shared<kOfWeights>::kStages> position;
  for (Tile tile = receiver.Next(); !tile.is_end(); tile = receiver.Next()) {
    const Work work(params, tile, rank, warpgroup);
    if (work.num_halves == kHalves) {
      MultiplyTile<kHalves>(params, maps, shared, tile, work, position);
    } else if (work.num_halves > 0) {
      MultiplyTile<1>(params, maps, shared, tile, work, position);
    } else {
      shared.ring.Skip(NumBlocks(tile), position);
    }
  }
  WaitForStoresRead();  // the block's shared memory outlives them
}

template <bool kOfWeights>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    Fp8Kernel(const __grid_constant__ GroupedDotParams params, const __grid_constant__ GroupArrays groups,
              const __grid_constant__ Maps maps, const __grid_constant__ ScaleMaps scale_maps) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<Shared<kOfWeights>*>(memory);
  const int rank = RankInCluster();
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (threadIdx.x == 0) {
    shared.ring.Init(1 + ScaleLoader<kOfWeights>::kArrivals);
    shared.queue.Init(kWarps + 1);
    FenceBarriers();
    PrefetchMap(&maps.rows);
    PrefetchMap(&maps.columns[!kOfWeights && params.num_home == 0 ? 1 : 0]);
  }
  SyncCluster();
  if (warp < kWarpgroup / kWarp) {
    ReleaseRegisters<40>();
    if (threadIdx.x == 0) Load(params, maps, scale_maps, shared, rank);
    if (warp == 1 && rank == 0)
      HandOut<kOfWeights>(params, groups, kOfWeights ? 1 : params.inner, shared.queue);
  } else {
    TakeRegisters<232>();
    Multiply(params, maps, shared, rank, warp / (kWarpgroup / kWarp) - 1);
  }
  __syncwarp();
  SyncCluster();  // the other block may still arrive here
}

template <bool kOfWeights>
cudaError_t LaunchFp8(const GroupedDotParams& params, const GroupArrays& groups, int num_sms,
                      cudaStream_t stream) {
  Maps maps{};
  ScaleMaps scale_maps{};
  cudaError_t error = Describe(params, 1, kOfWeights, {kBoxRows, kFp8Block}, {kFp8Block, kFp8Block}, maps);
  if (error == cudaSuccess) error = DescribeScales(params, groups, scale_maps);
  if (error != cudaSuccess) return error;
  return LaunchClusters(Fp8Kernel<kOfWeights>, sizeof(Shared<kOfWeights>), num_sms, stream, params, groups,
                        maps, scale_maps);
}

template <bool kOfWeights>
cudaError_t PreloadFp8() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, Fp8Kernel<kOfWeights>);
}

}  // namespace

using RowsKernel = ProductKernel<GroupedDot::kRowsTransposed, Operands::kFp8>;
using WeightsKernel = ProductKernel<GroupedDot::kWeights, Operands::kFp8>;

template <>
cudaError_t RowsKernel::Launch(const GroupedDotParams& params, const GroupArrays& groups, int num_sms,
                               cudaStream_t stream) {
  return LaunchFp8<false>(params, groups, num_sms, stream);
}
template <>
cudaError_t RowsKernel::Preload() {
  return PreloadFp8<false>();
}

template <>
cudaError_t WeightsKernel::Launch(const GroupedDotParams& params, const GroupArrays& groups, int num_sms,
                                  cudaStream_t stream) {
  return LaunchFp8<true>(params, groups, num_sms, stream);
}
template <>
cudaError_t WeightsKernel::Preload() {
  return PreloadFp8<true>();
}

}  // namespace jax_ep::cuda::sm90
