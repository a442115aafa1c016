// FP8 rows times their group's matrix, which is stored transposed.
//
// Two blocks share a tile of 256 x 256 or 128 x 512 elements of the result, each half of it, and load the
// operand that both need only once. In a block one warp loads, one hands out tiles, and two warpgroups
// multiply. Tensor cores add up 128 elements of the sum. Then these sums are scaled and added up in float32,
// while the other warpgroup's products run.
#include <cuda_bf16.h>

#include <algorithm>

#include "kernels/launch/launch.h"
#include "kernels/products/engines.h"
#include "kernels/products/sm90/fp8_tiles.cuh"
#include "kernels/products/sm90/tensor_map.h"
#include "kernels/ptx/hopper.cuh"

namespace jax_ep::cuda::sm90 {
namespace {

constexpr int kMultipliers = 2, kThreads = (1 + kMultipliers) * kWarpgroup;
constexpr int kStages = 4, kTileSlots = 2;
constexpr int kBoxRows = 64;  // of the rows; of the matrix: kFp8Block
constexpr int kHalves = kTileColumns / kFp8Block;
constexpr int kStep = 32;  // elements of the sum that one product adds up
constexpr int kWarps = kMultipliers * kWarpgroup / kWarp;
constexpr int kStoredRows = 16, kStoredColumns = kBf16BoxColumns;
constexpr uint16_t kBothBlocks = 3;
static_assert(kTileRows == kMultipliers * kBoxRows && kCluster == 2 && kHalves == 2);

// 128 elements of the sum, of both operands.
struct Stage {
  uint8_t rows[kTileRows][kFp8Block];
  uint8_t matrix[kTileColumns][kFp8Block];
};

struct Scales {
  float rows[kTileRows];
  float2 matrix;  // of both halves of the columns
};

// A warp's rows of some columns, on their way out, swizzled as a tensor store reads them.
struct alignas(1024) Staged {
  uint4 rows[kStoredRows][kStoredColumns * sizeof(__nv_bfloat16) / sizeof(uint4)];
};

struct Shared {
  Stage stages[kStages];
  Staged staged[kWarps][2];  // one is filled while the other is stored
  Scales scales[kStages];
  uint64_t full[kStages], empty[kStages];
  uint64_t tile_full[kTileSlots], tile_empty[kTileSlots];
  int4 tiles[kTileSlots];
};
static_assert(sizeof(Shared) <= 227 * 1024, "the shared memory that a block may have");

// A stage of the ring, and the parity of its phases.
struct Position {
  int stage = 0, phase = 0;

  __device__ void Advance() {
    stage = (stage + 1) % kStages;
    if (stage == 0) phase ^= 1;
  }
};

struct Maps {
  CUtensorMap rows, matrices, redundant, out;
};

// The tiles of a cluster, one after another, as all warps of both blocks receive them.
struct Receiver {
  Shared& shared;
  unsigned lanes;  // the lanes of the warp that receive
  int count = 0;

  // Called by these lanes together.
  __device__ Tile Next() {
    const int slot = count % kTileSlots;
    WaitForLoad(&shared.tile_full[slot], count / kTileSlots % 2);
    const int4 packed = shared.tiles[slot];
    const bool is_loaded = __all_sync(lanes, IsLoaded(packed.x));
    ArriveInBlock(&shared.tile_empty[slot], 0, is_loaded && threadIdx.x % kWarp == 0);
    ++count;
    // The compiler must know that all lanes have the same numbers.
    const auto common = [&](int number) { return __shfl_sync(lanes, number, 0); };
    return Unpack({common(packed.x), common(packed.y), common(packed.z), common(packed.w)});
  }
};

// Hands out tiles to both blocks. Called by one warp of the cluster.
__device__ void HandOut(const GroupedDotParams& params, const GroupArrays& groups, Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  TileFinder finder(params, groups);
  // The first tile is the cluster's own.
  int index = static_cast<int>(blockIdx.x) / kCluster;
  for (int count = 0;; ++count) {
    const Tile tile = finder.Find(index);
    const int slot = count % kTileSlots;
    WaitForLoad(&shared.tile_empty[slot], count / kTileSlots % 2 ^ 1);
    if (lane < kCluster) SendToBlock(&shared.tiles[slot], Pack(tile), &shared.tile_full[slot], lane);
    if (tile.is_end()) return;
    if (lane == 0) index = atomicAdd(groups.next_tile, 1) + static_cast<int>(gridDim.x) / kCluster;
    index = __shfl_sync(kAllLanes, index, 0);
  }
}

// Loads a tile's operands. Called by one thread of each block.
__device__ void LoadTile(const GroupedDotParams& params, const Maps& maps, Shared& shared, int rank,
                         const Tile& tile, Position& position) {
  const Part part(params, tile, rank);
  const bool is_redundant = tile.group >= params.num_home;
  const CUtensorMap* const matrices = is_redundant ? &maps.redundant : &maps.matrices;
  const int matrix = is_redundant ? tile.group - params.num_home : tile.group;
  const int column = matrix * params.outer + part.first_column;
  const int boxes = part.num_rows > kBoxRows ? 2 : 1;
  const uint32_t bytes = sizeof(Stage::matrix) + boxes * sizeof(Stage::rows) / 2;
  for (int k = 0; k < params.inner; k += kFp8Block) {
    WaitForLoad(&shared.empty[position.stage], position.phase ^ 1);
    uint64_t* const full = &shared.full[position.stage];
    Stage& to = shared.stages[position.stage];
    ArriveAndExpect(full, bytes);
    if (tile.is_wide) {  // both blocks have the same rows
      if (rank < boxes) {
        LoadBox(to.rows[rank * kBoxRows], &maps.rows, k, part.first_row + rank * kBoxRows, full, kBothBlocks);
      }
      for (int i = 0; i < kTileColumns; i += kFp8Block) LoadBox(to.matrix[i], matrices, k, column + i, full);
    } else {  // both blocks have the same columns
      for (int i = 0; i < boxes * kBoxRows; i += kBoxRows) {
        LoadBox(to.rows[i], &maps.rows, k, part.first_row + i, full);
      }
      const int half = rank * kFp8Block;
      LoadBox(to.matrix[half], matrices, k, column + half, full, kBothBlocks);
    }
    position.Advance();
  }
}

// Loads the operands of all tiles. Called by one thread of each block.
__device__ void Load(const GroupedDotParams& params, const Maps& maps, Shared& shared, int rank) {
  Receiver receiver{shared, 1};
  Position position;
  for (Tile tile = receiver.Next(); !tile.is_end(); tile = receiver.Next()) {
    LoadTile(params, maps, shared, rank, tile, position);
  }
}

// Loads the scales of all tiles. Called by one warp of each block.
__device__ void LoadScales(const GroupedDotParams& params, Shared& shared, int rank) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t blocks = params.inner / kFp8Block;
  Receiver receiver{shared, kAllLanes};
  Position position;
  for (Tile tile = receiver.Next(); !tile.is_end(); tile = receiver.Next()) {
    const Part part(params, tile, rank);
    const float* rows[kTileRows / kWarp];
    for (int i = 0; i < kTileRows / kWarp; ++i) {
      rows[i] = params.row_scales + min(part.first_row + i * kWarp + lane, params.num_rows - 1) * blocks;
    }
    const int block_row = min(part.first_column / kFp8Block + lane, params.outer / kFp8Block - 1);
    const float* const matrix = params.OfGroup(params.other_scales, params.redundant_scales, tile.group,
                                               params.outer / kFp8Block * blocks) +
                                block_row * blocks;
    for (int block = 0; block < blocks; ++block) {
      WaitForLoad(&shared.empty[position.stage], position.phase ^ 1);
      Scales& to = shared.scales[position.stage];
      for (int i = 0; i < kTileRows / kWarp; ++i) CopyFloat(&to.rows[i * kWarp + lane], rows[i] + block);
      if (lane < kHalves) CopyFloat(&to.matrix.x + lane, matrix + block);
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
    const Part part(params, tile, rank);
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

// Keeps the compiler from reading the sums of products before they are complete.
__device__ void Keep(float (&sums)[64]) {
  for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
}

// Stores a warp's 16 rows of 128 columns. The stores may still read the warp's staged rows when this returns.
__device__ void Store(const GroupedDotParams& params, const CUtensorMap* map, const Work& work, int half,
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
      StoreBox(map, column, first_row, rows, lane == 0);
    } else {  // the rows behind are another group's
      __syncwarp();
      auto* const out = static_cast<__nv_bfloat16*>(params.out) + column;
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
template <int kCount>
__device__ void MultiplyTile(const GroupedDotParams& params, const Maps& maps, Shared& shared,
                             const Work& work, Position& position) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int row = work.row + static_cast<int>(threadIdx.x) % kWarpgroup / kWarp * 16 + lane / 4;
  const OperandRows rows(shared.stages[0].rows[work.row]), matrix(shared.stages[0].matrix[work.column]);
  float sums[kCount][64] = {}, part[64];
  for (int block = 0; block < params.inner / kFp8Block; ++block, position.Advance()) {
    WaitForLoad(&shared.full[position.stage], position.phase);
    const Scales& scales = shared.scales[position.stage];
    const float of_rows[2] = {scales.rows[row], scales.rows[row + 8]};
    const float2 of_matrix = scales.matrix;
    const uint32_t begin = position.stage * sizeof(Stage);
#pragma unroll
    for (int half = 0; half < kCount; ++half) {
      const uint32_t columns = begin + half * sizeof(Stage::matrix) / kHalves;
      BeginProducts();
#pragma unroll
      for (int k = 0; k < kFp8Block; k += kStep) {
        MultiplyFp8(part, rows.At(begin + k), matrix.At(columns + k), k > 0);
      }
      CommitProducts();
      const float of_columns = work.column / kFp8Block + half == 0 ? of_matrix.x : of_matrix.y;
      const float scale[2] = {of_rows[0] * of_columns, of_rows[1] * of_columns};
      WaitForProducts<0>();
      Keep(part);
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[half][i] += part[i] * scale[i % 4 / 2];
    }
    const bool is_loaded = IsLoaded(__float_as_uint(of_rows[0]) ^ __float_as_uint(of_rows[1]) ^
                                    __float_as_uint(of_matrix.x) ^ __float_as_uint(of_matrix.y));
    ArriveInBlock(&shared.empty[position.stage], lane % kCluster, is_loaded && lane < kCluster);
  }
  Staged(&staged)[2] = shared.staged[threadIdx.x / kWarp - kWarpgroup / kWarp];
#pragma unroll
  for (int half = 0; half < kCount; ++half) Store(params, &maps.out, work, half, sums[half], staged);
}

// Releases the operands of a tile of which this warpgroup has no columns.
__device__ void SkipTile(const GroupedDotParams& params, Shared& shared, Position& position) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int block = 0; block < params.inner / kFp8Block; ++block, position.Advance()) {
    WaitForLoad(&shared.full[position.stage], position.phase);
    ArriveInBlock(&shared.empty[position.stage], lane % kCluster, lane < kCluster);
  }
}

// Multiplies all tiles. Called by one warpgroup.
__device__ void Multiply(const GroupedDotParams& params, const Maps& maps, Shared& shared, int rank,
                         int warpgroup) {
  Receiver receiver{shared, kAllLanes};
  Position position;
  for (Tile tile = receiver.Next(); !tile.is_end(); tile = receiver.Next()) {
    const Work work(params, tile, rank, warpgroup);
    if (work.num_halves == kHalves) {
      MultiplyTile<kHalves>(params, maps, shared, work, position);
    } else if (work.num_halves > 0) {
      MultiplyTile<1>(params, maps, shared, work, position);
    } else {
      SkipTile(params, shared, position);
    }
  }
  WaitForStoresRead();  // the block's shared memory outlives them
}

__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    Fp8RowsKernel(const __grid_constant__ GroupedDotParams params, const __grid_constant__ GroupArrays groups,
                  const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) std::byte memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int rank = RankInCluster();
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : shared.full) InitBarrier(&barrier, 1 + kWarp);
    for (uint64_t& barrier : shared.empty) InitBarrier(&barrier, kCluster * kWarps);
    for (uint64_t& barrier : shared.tile_full) InitBarrier(&barrier, 1);
    for (uint64_t& barrier : shared.tile_empty) InitBarrier(&barrier, kCluster * (kWarps + 2));
    FenceBarriers();
    PrefetchMap(&maps.rows);
    PrefetchMap(&maps.matrices);
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

}  // namespace

template <>
cudaError_t ProductKernel<GroupedDot::kRowsTransposed, Operands::kFp8>::Launch(const GroupedDotParams& params,
                                                                               const GroupArrays& groups,
                                                                               int num_sms,
                                                                               cudaStream_t stream) {
  Maps maps{};
  const int64_t redundant = params.num_groups - params.num_home;
  cudaError_t error = DescribeFp8(params.rows, params.num_rows, params.inner, kBoxRows, maps.rows);
  const auto describe = [&](const void* matrices, int64_t count, CUtensorMap& map) {
    if (error != cudaSuccess || count == 0) return;
    error = DescribeFp8(matrices, count * params.outer, params.inner, kFp8Block, map);
  };
  describe(params.others, params.num_home, maps.matrices);
  describe(params.redundant, redundant, maps.redundant);
  if (error == cudaSuccess) {
    error = DescribeBf16(params.out, params.num_rows, params.outer, kStoredRows, maps.out);
  }
  if (error != cudaSuccess) return error;
  constexpr int kSharedBytes = sizeof(Shared);
  error = cudaFuncSetAttribute(Fp8RowsKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const int blocks = std::max(num_sms / kCluster, 1) * kCluster;
  return jax_ep::cuda::Launch(Fp8RowsKernel, dim3(blocks), kThreads, kSharedBytes, stream, false, params,
                              groups, maps);
}

template <>
cudaError_t ProductKernel<GroupedDot::kRowsTransposed, Operands::kFp8>::Preload() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, Fp8RowsKernel);
}

}  // namespace jax_ep::cuda::sm90
