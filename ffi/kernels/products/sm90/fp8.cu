// Products of FP8 operands that are both stored along the sum: rows times the transposes of their groups'
// matrices [N, M], and the gradient of the matrices, for which both operands are transposed.
//
// Two blocks share a tile of 256 x 256 or 128 x 512 elements of the result, each half of it, and load the
// operand that both need only once. In each block one thread loads operands, one warp loads scales, and two
// warpgroups multiply. One warp of the first block hands out tiles to both. Tensor cores add up 128 elements
// of the sum. Then these sums are scaled and added up in float32, while the other warpgroup's products run.
// Here a *rank* is a block's number in its cluster, and the *blocks* of a sum are of 128 elements.
#include <cuda_bf16.h>

#include <algorithm>
#include <type_traits>

#include "kernels/launch/launch.h"
#include "kernels/products/engines.h"
#include "kernels/products/sm90/fp8_scales.cuh"
#include "kernels/products/sm90/fp8_tiles.cuh"
#include "kernels/products/sm90/tensor_map.h"
#include "kernels/ptx/hopper.cuh"

namespace jax_ep::cuda::sm90 {
namespace {

constexpr int kMultipliers = 2, kThreads = (1 + kMultipliers) * kWarpgroup;
constexpr int kTileSlots = 2;
constexpr int kBoxRows = 64;  // of the rows; of the matrix: kFp8Block
constexpr int kStep = 32;     // elements of the sum that one product adds up
constexpr int kWarps = kMultipliers * kWarpgroup / kWarp;
constexpr int kStoredRows = 16, kStoredColumns = kBf16BoxColumns;
constexpr uint16_t kBothBlocks = 3;
static_assert(kTileRows == kMultipliers * kBoxRows && kCluster == 2 && kHalves == 2);

// 128 elements of the sum, of both operands.
struct Stage {
  uint8_t rows[kTileRows][kFp8Block];
  uint8_t columns[kTileColumns][kFp8Block];
};

// A warp's rows of some columns, on their way out, swizzled as a tensor store reads them.
struct alignas(1024) Staged {
  uint4 rows[kStoredRows][kStoredColumns * sizeof(__nv_bfloat16) / sizeof(uint4)];
};

template <bool kOfWeights>
struct Shared {
  static constexpr int kStages = kOfWeights ? 3 : 4;

  Stage stages[kStages];
  Staged staged[kWarps][2];  // one is filled while the other is stored
  Scales<kOfWeights> scales[kStages];
  uint64_t full[kStages], empty[kStages];
  uint64_t tile_full[kTileSlots], tile_empty[kTileSlots];
  Tile tiles[kTileSlots];
};
constexpr int kMostSharedBytes = 227 * 1024;  // of a block
static_assert(sizeof(Shared<false>) <= kMostSharedBytes && sizeof(Shared<true>) <= kMostSharedBytes);

// A stage of the ring, and the parity of its phases.
template <bool kOfWeights>
struct Position {
  int stage = 0, phase = 0;

  __device__ void Advance() {
    stage = (stage + 1) % Shared<kOfWeights>::kStages;
    if (stage == 0) phase ^= 1;
  }
};

// Descriptions of the operands and the result. Matrices and gradients have a second one for redundant groups.
struct Maps {
  CUtensorMap rows, columns[2], out[2];
};

// The position of a group's matrix: its index among the redundant matrices, or among the home ones.
struct MatrixIndex {
  bool is_redundant;
  int index;

  __device__ MatrixIndex(const GroupedDotParams& params, int group) {
    is_redundant = group >= params.num_home;
    index = is_redundant ? group - params.num_home : group;
  }
};

// The sequence of a cluster's tiles, as each loading or multiplying warp of both blocks receives it.
template <bool kOfWeights>
struct Receiver {
  Shared<kOfWeights>& shared;
  unsigned lanes;  // the lanes of the warp that receive
  int count = 0;

  // Called by these lanes together.
  __device__ Tile Next() {
    const int slot = count % kTileSlots;
    WaitForLoad(&shared.tile_full[slot], count / kTileSlots % 2);
    const Tile tile = shared.tiles[slot];
    const bool is_loaded = __all_sync(lanes, IsLoaded(tile.group ^ tile.is_wide));
    ArriveInBlock(&shared.tile_empty[slot], 0, is_loaded && threadIdx.x % kWarp == 0);
    ++count;
    // The compiler must know that all lanes have the same numbers.
    const auto common = [&](int number) { return __shfl_sync(lanes, number, 0); };
    return {common(tile.group),   common(tile.first_row),   common(tile.end_row),   common(tile.column),
            common(tile.is_wide), common(tile.first_block), common(tile.num_blocks)};
  }
};

// Hands out tiles to both blocks. Called by one warp of the cluster.
template <bool kOfWeights>
__device__ void HandOut(const GroupedDotParams& params, const GroupArrays& groups,
                        Shared<kOfWeights>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  TileFinder<kOfWeights> finder(params, groups);
  // The first tile is the cluster's own.
  int index = static_cast<int>(blockIdx.x) / kCluster;
  for (int count = 0;; ++count) {
    const Tile tile = finder.Find(index);
    const int slot = count % kTileSlots;
    WaitForLoad(&shared.tile_empty[slot], count / kTileSlots % 2 ^ 1);
    if (lane < kCluster) SendToBlock(&shared.tiles[slot], tile, &shared.tile_full[slot], lane);
    if (tile.is_end()) return;
    if (lane == 0) index = atomicAdd(groups.next_tile, 1) + static_cast<int>(gridDim.x) / kCluster;
    index = __shfl_sync(kAllLanes, index, 0);
  }
}

// Loads a tile's operands. Called by one thread of each block.
template <bool kOfWeights>
__device__ void LoadTile(const GroupedDotParams& params, const Maps& maps, Shared<kOfWeights>& shared,
                         int rank, const Tile& tile, Position<kOfWeights>& position) {
  const Part part(tile, rank);
  const MatrixIndex matrix(params, tile.group);
  const CUtensorMap* const columns = &maps.columns[!kOfWeights && matrix.is_redundant ? 1 : 0];
  const int column = part.first_column + (kOfWeights ? 0 : matrix.index * params.outer);
  const int boxes = part.num_rows > kBoxRows ? 2 : 1;
  const uint32_t bytes = sizeof(Stage::columns) + boxes * sizeof(Stage::rows) / 2;
  for (int block = 0; block < tile.num_blocks; ++block) {
    const int k = (tile.first_block + block) * kFp8Block;
    WaitForLoad(&shared.empty[position.stage], position.phase ^ 1);
    uint64_t* const full = &shared.full[position.stage];
    Stage& to = shared.stages[position.stage];
    ArriveAndExpect(full, bytes);
    if (tile.is_wide) {  // both blocks have the same rows
      if (rank < boxes) {
        LoadBox(to.rows[rank * kBoxRows], &maps.rows, k, part.first_row + rank * kBoxRows, full, kBothBlocks);
      }
      for (int i = 0; i < kTileColumns; i += kFp8Block) LoadBox(to.columns[i], columns, k, column + i, full);
    } else {  // both blocks have the same columns
      for (int i = 0; i < boxes * kBoxRows; i += kBoxRows) {
        LoadBox(to.rows[i], &maps.rows, k, part.first_row + i, full);
      }
      const int half = rank * kFp8Block;
      LoadBox(to.columns[half], columns, k, column + half, full, kBothBlocks);
    }
    position.Advance();
  }
}

// Loads the operands of all tiles. Called by one thread of each block.
template <bool kOfWeights>
__device__ void Load(const GroupedDotParams& params, const Maps& maps, Shared<kOfWeights>& shared, int rank) {
  Receiver<kOfWeights> receiver{shared, 1};
  Position<kOfWeights> position;
  for (Tile tile = receiver.Next(); !tile.is_end(); tile = receiver.Next()) {
    LoadTile(params, maps, shared, rank, tile, position);
  }
}

// Loads the scales of all tiles. Called by one warp of each block.
template <bool kOfWeights>
__device__ void LoadScales(const GroupedDotParams& params, Shared<kOfWeights>& shared, int rank) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  Receiver<kOfWeights> receiver{shared, kAllLanes};
  Position<kOfWeights> position;
  for (Tile tile = receiver.Next(); !tile.is_end(); tile = receiver.Next()) {
    const std::conditional_t<kOfWeights, ScalesOfColumns, ScalesOfRows> scales(params, tile, Part(tile, rank),
                                                                               lane);
    for (int block = 0; block < tile.num_blocks; ++block) {
      WaitForLoad(&shared.empty[position.stage], position.phase ^ 1);
      scales.Load(block, lane, shared.scales[position.stage]);
      __syncwarp();  // no lane waits while others have not arrived
      ArriveAfterCopies(&shared.full[position.stage]);
      position.Advance();
    }
  }
}

// What a warpgroup computes of a tile: 64 rows from first_row on, and one or two halves of the columns.
struct Work {
  int first_row, end_row;  // in the result; it stores none from end_row on
  int first_column;        // in the result
  int row, column;         // in the block's part of the tile
  int num_halves;          // of the columns, of 128 each

  __device__ Work(const GroupedDotParams& params, const Tile& tile, int rank, int warpgroup) {
    const Part part(tile, rank);
    // If there are rows for one warpgroup only, both take them, each half of the columns.
    const bool splits_columns = part.num_rows <= kBoxRows;
    row = splits_columns ? 0 : warpgroup * kBoxRows;
    column = splits_columns ? warpgroup * kFp8Block : 0;
    num_halves = max(0, min((params.outer - part.first_column - column) / kFp8Block, splits_columns ? 1 : 2));
    first_row = part.first_row + row;
    end_row = part.first_row + part.num_rows;
    first_column = part.first_column + column;
  }
};

// Where a tile's results go: the matrix of a group, or all rows.
struct Target {
  const CUtensorMap* map;
  __nv_bfloat16* rows;
  int first_row;  // of `rows` in the map

  __device__ Target(const GroupedDotParams& params, const Maps& maps, const Tile& tile, bool of_weights) {
    const MatrixIndex matrix(params, of_weights ? tile.group : 0);
    map = &maps.out[of_weights && matrix.is_redundant ? 1 : 0];
    first_row = of_weights ? matrix.index * params.inner : 0;
    void* const first = of_weights && matrix.is_redundant ? params.redundant : params.out;
    rows = static_cast<__nv_bfloat16*>(first) + int64_t{first_row} * params.outer;
  }
};

// Keeps the compiler from reading the sums of products before they are complete.
__device__ void Keep(float (&sums)[64]) {
  for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
}

// Stores a warp's 16 rows of 128 columns. The stores may still read the warp's staged rows when this returns.
__device__ void Store(const GroupedDotParams& params, const Target& target, const Work& work, int half,
                      const float (&sums)[64], Staged (&staged)[2]) {
  constexpr int kVectors = kStoredColumns * sizeof(__nv_bfloat16) / sizeof(uint4);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, row = lane % kStoredRows;
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) % kWarpgroup / kWarp, 0);
  const int first_row = work.first_row + warp * kStoredRows;
  const auto packed = [&](int i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(sums[i], sums[i + 1]);
    return *reinterpret_cast<const uint32_t*>(&pair);
  };
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int column = work.first_column + half * kFp8Block + part * kStoredColumns;
    auto& rows = staged[part].rows;
    WaitForStoresRead<1>();
    __syncwarp();
    // The position of 16 bytes depends on the row, so that 8 rows lie in different banks.
#pragma unroll
    for (int vector = 0; vector < kVectors; vector += 2) {
      const int i = part * kStoredColumns / 2 + 4 * vector;
      StoreMatrices(&rows[row][(vector + lane / 16) ^ row % 8], packed(i), packed(i + 2), packed(i + 4),
                    packed(i + 6));
    }
    if (first_row + kStoredRows <= work.end_row) {
      FenceBulkShared();
      __syncwarp();
      StoreBox(target.map, column, target.first_row + first_row, rows, lane == 0);
    } else {  // the rows behind are another group's
      __syncwarp();
      auto* const out = target.rows + column;
      for (int i = lane; i < kStoredRows * kVectors; i += kWarp) {
        const int at = i / kVectors, vector = i % kVectors;
        if (first_row + at >= work.end_row) continue;
        reinterpret_cast<uint4*>(out + int64_t{first_row + at} * params.outer)[vector] =
            rows[at][vector ^ at % 8];
      }
    }
    CommitStores();
  }
}

// Multiplies a tile, of which this warpgroup has `kCount` halves of the columns.
template <int kCount, bool kOfWeights>
__device__ void MultiplyTile(const GroupedDotParams& params, const Maps& maps, Shared<kOfWeights>& shared,
                             const Tile& tile, const Work& work, Position<kOfWeights>& position) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int row = work.row + static_cast<int>(threadIdx.x) % kWarpgroup / kWarp * 16 + lane / 4;
  const OperandRows rows(shared.stages[0].rows[work.row]), columns(shared.stages[0].columns[work.column]);
  float sums[kCount][64] = {}, part[64];
  for (int block = 0; block < tile.num_blocks; ++block, position.Advance()) {
    WaitForLoad(&shared.full[position.stage], position.phase);
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
    ArriveInBlock(&shared.empty[position.stage], lane % kCluster, IsLoaded(words) && lane < kCluster);
  }
  const Target target(params, maps, tile, kOfWeights);
  Staged(&staged)[2] = shared.staged[threadIdx.x / kWarp - kWarpgroup / kWarp];
#pragma unroll
  for (int half = 0; half < kCount; ++half) Store(params, target, work, half, sums[half], staged);
}

// Releases the operands of a tile of which this warpgroup has no columns.
template <bool kOfWeights>
__device__ void SkipTile(const Tile& tile, Shared<kOfWeights>& shared, Position<kOfWeights>& position) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int block = 0; block < tile.num_blocks; ++block, position.Advance()) {
    WaitForLoad(&shared.full[position.stage], position.phase);
    ArriveInBlock(&shared.empty[position.stage], lane % kCluster, lane < kCluster);
  }
}

// Multiplies all tiles. Called by one warpgroup.
template <bool kOfWeights>
__device__ void Multiply(const GroupedDotParams& params, const Maps& maps, Shared<kOfWeights>& shared,
                         int rank, int warpgroup) {
  Receiver<kOfWeights> receiver{shared, kAllLanes};
  Position<kOfWeights> position;
  for (Tile tile = receiver.Next(); !tile.is_end(); tile = receiver.Next()) {
    const Work work(params, tile, rank, warpgroup);
    if (work.num_halves == kHalves) {
      MultiplyTile<kHalves>(params, maps, shared, tile, work, position);
    } else if (work.num_halves > 0) {
      MultiplyTile<1>(params, maps, shared, tile, work, position);
    } else {
      SkipTile(tile, shared, position);
    }
  }
  WaitForStoresRead();  // the block's shared memory outlives them
}

template <bool kOfWeights>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    Fp8Kernel(const __grid_constant__ GroupedDotParams params, const __grid_constant__ GroupArrays groups,
              const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<Shared<kOfWeights>*>(memory);
  const int rank = RankInCluster();
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : shared.full) InitBarrier(&barrier, 1 + kWarp);
    for (uint64_t& barrier : shared.empty) InitBarrier(&barrier, kCluster * kWarps);
    for (uint64_t& barrier : shared.tile_full) InitBarrier(&barrier, 1);
    for (uint64_t& barrier : shared.tile_empty) InitBarrier(&barrier, kCluster * (kWarps + 2));
    FenceBarriers();
    PrefetchMap(&maps.rows);
    PrefetchMap(&maps.columns[!kOfWeights && params.num_home == 0 ? 1 : 0]);
  }
  SyncCluster();
  if (warp < kWarpgroup / kWarp) {
    ReleaseRegisters<40>();
    if (threadIdx.x == 0) Load(params, maps, shared, rank);
    if (warp == 1) LoadScales(params, shared, rank);
    if (warp == 2 && rank == 0) HandOut(params, groups, shared);
  } else {
    TakeRegisters<232>();
    Multiply(params, maps, shared, rank, warp / (kWarpgroup / kWarp) - 1);
  }
  __syncwarp();
  SyncCluster();  // the other block may still arrive here
}

// Describes the operands and the result.
cudaError_t Describe(const GroupedDotParams& params, bool of_weights, Maps& maps) {
  cudaError_t error = cudaSuccess;
  const auto describe = [&](const void* data, int64_t rows, int64_t width, int box_rows, CUtensorMap& map) {
    if (error == cudaSuccess && rows > 0) error = DescribeFp8(data, rows, width, box_rows, map);
  };
  const auto describe_out = [&](void* data, int64_t rows, CUtensorMap& map) {
    if (error == cudaSuccess && rows > 0) error = DescribeBf16(data, rows, params.outer, kStoredRows, map);
  };
  const int64_t home = params.num_home, redundant = params.num_groups - params.num_home;
  if (of_weights) {
    describe(params.rows, params.inner, params.num_rows, kBoxRows, maps.rows);
    describe(params.others, params.outer, params.num_rows, kFp8Block, maps.columns[0]);
    describe_out(params.out, home * params.inner, maps.out[0]);
    describe_out(params.redundant, redundant * params.inner, maps.out[1]);
  } else {
    describe(params.rows, params.num_rows, params.inner, kBoxRows, maps.rows);
    describe(params.others, home * params.outer, params.inner, kFp8Block, maps.columns[0]);
    describe(params.redundant, redundant * params.outer, params.inner, kFp8Block, maps.columns[1]);
    describe_out(params.out, params.num_rows, maps.out[0]);
  }
  return error;
}

template <bool kOfWeights>
cudaError_t LaunchFp8(const GroupedDotParams& params, const GroupArrays& groups, int num_sms,
                      cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(Shared<kOfWeights>);
  const auto kernel = Fp8Kernel<kOfWeights>;
  Maps maps{};
  cudaError_t error = Describe(params, kOfWeights, maps);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const int blocks = std::max(num_sms / kCluster, 1) * kCluster;
  return Launch(kernel, dim3(blocks), kThreads, kSharedBytes, stream, false, params, groups, maps);
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
