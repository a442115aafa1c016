// Products of groups of few rows, whose time is that of reading each matrix once.
//
// Each block computes tiles of 64 columns of the result, of up to 64 rows of a group. These are narrow, so
// that blocks finish together also if few groups have rows. The tensor cores compute a tile transposed, the
// columns of a matrix times rows, because only their second operand may have fewer than 64 rows. In each
// block one thread loads operands, and one warpgroup multiplies. All warps find the block's tiles on their
// own, so no kernel before this one describes the groups.
#include <algorithm>
#include <type_traits>

#include "kernels/launch/launch.h"
#include "kernels/products/sm90/few_rows.h"
#include "kernels/products/sm90/pipeline.cuh"
#include "kernels/ptx/warpgroup.cuh"

namespace jax_ep::cuda::sm90 {
namespace {

constexpr int kColumns = 64, kMostRows = 64;  // of a tile
constexpr int kRowsAtOnce = 8;                // of a load, and of a step of the tensor cores
constexpr int kRowBytes = 128;                // of a block of the sum
constexpr int kBlocks = 4;                    // of the sum in a stage
constexpr int kStages = 3;
constexpr int kFewThreads = kWarpgroup + kWarp;  // the last warp loads

// Some blocks of the sum, of both operands.
struct Stage {
  uint8_t columns[kBlocks][kColumns][kRowBytes];  // or across: [kBlocks][elements of the sum][kColumns]
  uint8_t rows[kMostRows / kRowsAtOnce][kBlocks][kRowsAtOnce][kRowBytes];
};

struct FewShared {
  Stage stages[kStages];
  uint64_t full[kStages], empty[kStages];
};
static_assert(sizeof(FewShared) <= kMostSharedBytes);

struct FewTile {
  int group;  // -1: there are no more tiles
  int first_row, num_rows, column;
};

// The tiles of a block, every gridDim.x-th one. Those of a group that share columns follow each other,
// because they share that part of the matrix. Called by a whole warp.
class FewTiles {
 public:
  __device__ explicit FewTiles(const GroupedDotParams& params)
      : params_(params), across_((params.outer + kColumns - 1) / kColumns), index_(blockIdx.x) {
    const bool is_padded = params.rows_per_group > 0;
    if (!is_padded && params.first_row != nullptr) row_ = min(max(*params.first_row, 0), params.num_rows);
    next_size_ = SizeOf(0);
    Read(0);
  }

  __device__ FewTile Next() {
    while (index_ >= begin_ + __shfl_sync(kAllLanes, end_, kWarp - 1)) {
      if (base_ + kWarp >= params_.num_groups) return {-1};
      begin_ += __shfl_sync(kAllLanes, end_, kWarp - 1);
      row_ = __shfl_sync(kAllLanes, first_ + size_, kWarp - 1);
      Read(base_ + kWarp);
    }
    const int owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, index_ < begin_ + end_))) - 1;
    const int size = __shfl_sync(kAllLanes, size_, owner), first = __shfl_sync(kAllLanes, first_, owner);
    const int before = owner == 0 ? 0 : __shfl_sync(kAllLanes, end_, owner - 1);
    const int chunks = ChunksOf(size), at = index_ - begin_ - before;
    const int skipped = at % chunks * kMostRows;
    index_ += static_cast<int>(gridDim.x);
    return {base_ + owner, first + skipped, min(size - skipped, kMostRows), at / chunks * kColumns};
  }

 private:
  __device__ static int ChunksOf(int size) { return (size + kMostRows - 1) / kMostRows; }

  // Returns the size of this lane's group, of the 32 groups from `base` on.
  __device__ int SizeOf(int base) const {
    const int group = base + static_cast<int>(threadIdx.x) % kWarp;
    return group < params_.num_groups ? SizeOfGroup(params_.group_sizes, group, params_.rows_per_group) : 0;
  }

  // Locates the 32 groups from `base` on, one for each lane, and loads the sizes of the next ones.
  __device__ void Read(int base) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    base_ = base;
    const int64_t size = next_size_;
    next_size_ = SizeOf(base + kWarp);
    const auto within = [&](int64_t row) { return static_cast<int>(min(row, int64_t{params_.num_rows})); };
    if (params_.rows_per_group > 0) {
      first_ = within(int64_t{base + lane} * params_.rows_per_group);
      size_ = within(first_ + size) - first_;
    } else {
      const int64_t end = row_ + SumUpToLane(size);
      first_ = within(end - size);
      size_ = within(end) - first_;
    }
    end_ = SumUpToLane(ChunksOf(size_) * across_);
  }

  const GroupedDotParams& params_;
  int across_;              // tiles beside each other
  int index_;               // of the next tile
  int base_;                // the first of 32 groups
  int row_ = 0;             // the first row of group base_
  int begin_ = 0;           // the first tile of group base_
  int next_size_;           // of the lane's group among the next 32
  int size_, first_, end_;  // of the lane's group: rows; its last tile, relative to begin_, plus one
};

// The operands of a product. T is uint8_t for FP8, whose matrices are stored along the sum. Those of 16-bit
// floats are stored across it.
template <typename T>
struct Elements {
  static constexpr bool kIsFp8 = std::is_same_v<T, uint8_t>;
  static constexpr int kBlock = kRowBytes / sizeof(T), kSteps = 4;  // elements of a block, and products of it
  // Bytes from the operands of one product to those of the next.
  static constexpr uint32_t kRowStep = kRowBytes / kSteps;
  static constexpr uint32_t kColumnStep = kIsFp8 ? kRowStep : kBlock / kSteps * kRowBytes;
};

// Returns the number of stages of a sum. Beyond its end the operands are read as zeros.
template <typename T>
__device__ int NumStages(const GroupedDotParams& params) {
  constexpr int kOfStage = kBlocks * Elements<T>::kBlock;
  return (params.inner + kOfStage - 1) / kOfStage;
}

// Loads a tile's operands. Called by one thread.
template <typename T>
__device__ void LoadTile(const GroupedDotParams& params, const Maps& maps, FewShared& shared,
                         const FewTile& tile, Position<kStages>& position) {
  using Of = Elements<T>;
  const MatrixIndex matrix(params, tile.group);
  const CUtensorMap* const columns = &maps.columns[matrix.is_redundant ? 1 : 0];
  const int boxes = (tile.num_rows + kRowsAtOnce - 1) / kRowsAtOnce;
  const uint32_t bytes = sizeof(Stage::columns) + boxes * sizeof(Stage::rows[0]);
  for (int i = 0; i < NumStages<T>(params); ++i, position.Advance()) {
    WaitForLoad(&shared.empty[position.stage], position.phase ^ 1);
    uint64_t* const full = &shared.full[position.stage];
    Stage& to = shared.stages[position.stage];
    ArriveAndExpect(full, bytes);
    if constexpr (Of::kIsFp8) {
      LoadBox(to.columns, columns, 0, matrix.index * params.matrix_width + tile.column, i * kBlocks, full);
    } else {
      LoadBox(to.columns, columns, tile.column, i * kBlocks * Of::kBlock, matrix.index, full);
    }
    for (int box = 0; box < boxes; ++box) {
      LoadBox(to.rows[box], &maps.rows, 0, tile.first_row + box * kRowsAtOnce, i * kBlocks, full);
    }
  }
}

// Stores a tile of kRows rows. A thread has sums of two columns, 8 apart, of each two rows of 8.
template <typename T, int kRows>
__device__ void StoreTile(const GroupedDotParams& params, const FewTile& tile,
                          const float (&sums)[kRows / 2]) {
  using Out = std::conditional_t<Elements<T>::kIsFp8, __nv_bfloat16, T>;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool is_odd = lane / 4 % 2 != 0;  // column
  auto* const out = static_cast<Out*>(params.out);
  // Neighbors exchange sums, so that each has two columns of one row.
#pragma unroll
  for (int i = 0; i < kRows / 2; i += 2) {
    const float given = is_odd ? sums[i] : sums[i + 1], kept = is_odd ? sums[i + 1] : sums[i];
    const float taken = __shfl_xor_sync(kAllLanes, given, 4);
    const int row = i / 4 * 8 + lane % 4 * 2 + (is_odd ? 1 : 0);
    const int column = tile.column + warp * 16 + i % 4 / 2 * 8 + lane / 8 * 2;
    if (row >= tile.num_rows || column >= params.outer) continue;
    const int64_t at = int64_t{tile.first_row + row} * params.outer + column;
    *reinterpret_cast<uint32_t*>(out + at) = is_odd ? Pack<Out>(taken, kept) : Pack<Out>(kept, taken);
  }
}

// The scales of a tile's blocks of the sum.
template <int kRows>
class FewScales {
 public:
  __device__ FewScales(const GroupedDotParams& params, const FewTile& tile)
      : num_blocks_(params.inner / kFp8Block) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int64_t of_matrix = int64_t{params.matrix_width / kFp8Block} * num_blocks_;
    matrix_ = params.OfGroup(params.other_scales, params.redundant_scales, tile.group, of_matrix) +
              int64_t{tile.column / kFp8Block} * num_blocks_;
    rows_ = params.row_scales;
    first_ = tile.first_row + lane % 4 * 2;
    last_ = params.num_rows - 1;
  }

  // Loads those of a block: of this thread's rows, times that of the matrix. Zeros beyond the end of a sum.
  __device__ void Load(int block, float (&scales)[kRows / 4]) const {
    const int at = min(block, num_blocks_ - 1);
    const float of_matrix = __ldg(matrix_ + at);
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      const int row = min(first_ + i / 2 * 8 + i % 2, last_);
      const float scale = __ldg(rows_ + int64_t{row} * num_blocks_ + at) * of_matrix;
      scales[i] = block < num_blocks_ ? scale : 0.0f;
    }
  }

 private:
  const float *matrix_, *rows_;
  int num_blocks_, first_, last_;
};

// The operands of all stages in shared memory. The columns of a matrix are the rows of the tensor cores'
// products, and the other way round.
template <typename T>
struct FewOperands {
  OperandRows columns, rows;

  __device__ explicit FewOperands(const FewShared& shared)
      : columns(shared.stages[0].columns), rows(shared.stages[0].rows, kNoNext, sizeof(Stage::rows[0])) {}

  // Starts one of a block's products.
  template <int kSums>
  __device__ void Multiply(float (&sums)[kSums], int stage, int block, int step, bool adds) const {
    using Of = Elements<T>;
    const uint32_t begin = stage * sizeof(Stage);
    const uint64_t of_columns =
        columns.At(begin + block * sizeof(Stage::columns[0]) + step * Of::kColumnStep);
    const uint64_t of_rows = rows.At(begin + block * sizeof(Stage::rows[0][0]) + step * Of::kRowStep);
    if constexpr (Of::kIsFp8) {
      MultiplyFp8(sums, of_columns, of_rows, adds);
    } else {
      MultiplyFloats<T, 1, 0>(sums, of_columns, of_rows, adds);
    }
  }
};

// Releases a stage to the loads. Called by each multiplying warp, when its products are complete.
__device__ void Release(FewShared& shared, int stage) {
  if (threadIdx.x % kWarp == 0) Arrive(&shared.empty[stage]);
}

// Sums up a tile of FP8.
template <int kRows>
__device__ void SumFp8(const GroupedDotParams& params, FewShared& shared, const FewTile& tile,
                       Position<kStages>& position, float (&sums)[kRows / 2]) {
  // Blocks whose products run together. More would need more registers than there are.
  constexpr int kTogether = kRows <= 16 ? kBlocks : kRows == 32 ? 2 : 1;
  const FewOperands<uint8_t> operands(shared);
  const FewScales<kRows> scales_of(params, tile);
  for (float& sum : sums) sum = 0.0f;
  for (int i = 0; i < NumStages<uint8_t>(params); ++i, position.Advance()) {
#pragma unroll
    for (int first = 0; first < kBlocks; first += kTogether) {
      float scales[kTogether][kRows / 4], parts[kTogether][kRows / 2];
#pragma unroll
      for (int b = 0; b < kTogether; ++b) scales_of.Load(i * kBlocks + first + b, scales[b]);
      if (first == 0) WaitForLoad(&shared.full[position.stage], position.phase);
      BeginProducts();
#pragma unroll
      for (int b = 0; b < kTogether; ++b) {
#pragma unroll
        for (int step = 0; step < Elements<uint8_t>::kSteps; ++step) {
          operands.Multiply(parts[b], position.stage, first + b, step, step > 0);
        }
      }
      CommitProducts();
      WaitForProducts<0>();
#pragma unroll
      for (int b = 0; b < kTogether; ++b) {
        Keep(parts[b]);
#pragma unroll
        for (int s = 0; s < kRows / 2; ++s) sums[s] += parts[b][s] * scales[b][s / 4 * 2 + s % 2];
      }
    }
    Release(shared, position.stage);
  }
}

// Sums up a tile of 16-bit floats. While the tensor cores work on a stage, the one before is released.
template <typename T, int kRows>
__device__ void SumFloats(const GroupedDotParams& params, FewShared& shared, Position<kStages>& position,
                          float (&sums)[kRows / 2]) {
  const FewOperands<T> operands(shared);
  Undefine(sums);
  int before = 0;  // the stage before
  for (int i = 0; i < NumStages<T>(params); ++i, position.Advance()) {
    WaitForLoad(&shared.full[position.stage], position.phase);
    BeginProducts();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int step = 0; step < Elements<T>::kSteps; ++step) {
        operands.Multiply(sums, position.stage, block, step, i > 0 || block > 0 || step > 0);
      }
    }
    CommitProducts();
    WaitForProducts<1>();
    if (i > 0) Release(shared, before);
    before = position.stage;
  }
  WaitForProducts<0>();
  Keep(sums);
  Release(shared, before);
}

// Multiplies and stores a tile, of which the tensor cores compute kRows rows.
template <typename T, int kRows>
__device__ void MultiplyTile(const GroupedDotParams& params, FewShared& shared, const FewTile& tile,
                             Position<kStages>& position) {
  float sums[kRows / 2];
  if constexpr (Elements<T>::kIsFp8) {
    SumFp8<kRows>(params, shared, tile, position, sums);
  } else {
    SumFloats<T, kRows>(params, shared, position, sums);
  }
  StoreTile<T, kRows>(params, tile, sums);
}

template <typename T>
__global__ void __launch_bounds__(kFewThreads, 1)
    FewRowsKernel(const __grid_constant__ GroupedDotParams params, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<FewShared*>(memory);
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : shared.full) InitBarrier(&barrier, 1);
    for (uint64_t& barrier : shared.empty) InitBarrier(&barrier, kWarpgroup / kWarp);
    FenceBarriers();
  }
  FewTiles tiles(params);
  __syncthreads();
  Position<kStages> position;
  if (threadIdx.x >= kWarpgroup) {
    for (FewTile tile = tiles.Next(); tile.group >= 0; tile = tiles.Next()) {
      if (threadIdx.x == kWarpgroup) LoadTile<T>(params, maps, shared, tile, position);
      __syncwarp();
    }
    return;
  }
  for (FewTile tile = tiles.Next(); tile.group >= 0; tile = tiles.Next()) {
    if (tile.num_rows <= 8) {
      MultiplyTile<T, 8>(params, shared, tile, position);
    } else if (tile.num_rows <= 16) {
      MultiplyTile<T, 16>(params, shared, tile, position);
    } else if (tile.num_rows <= 32) {
      MultiplyTile<T, 32>(params, shared, tile, position);
    } else {
      MultiplyTile<T, 64>(params, shared, tile, position);
    }
  }
}

// Describes the operands. A load takes all blocks of a stage. They are further apart than rows, where an
// operand is stored along the sum, and so are described as matrices of their own.
template <typename T>
cudaError_t DescribeOperands(const GroupedDotParams& params, Maps& maps) {
  constexpr int kBlock = Elements<T>::kBlock, kBytes = sizeof(T);
  const int64_t inner = params.inner, width = params.matrix_width;
  const auto blocks_of = [&](const void* data, int64_t rows) {
    return Matrices(kBytes, data, inner / kBlock, rows, kBlock, inner, kBlock);
  };
  cudaError_t error =
      DescribeMatrices(blocks_of(params.rows, params.num_rows), {kRowsAtOnce, kBlock, kBlocks}, maps.rows);
  const auto describe = [&](const void* data, int64_t count, CUtensorMap& map) {
    if (error != cudaSuccess || count == 0) return;
    if constexpr (Elements<T>::kIsFp8) {
      error = DescribeMatrices(blocks_of(data, (count - 1) * width + params.outer),
                               {kColumns, kBlock, kBlocks}, map);
    } else {
      error = DescribeMatrices({kBytes, data, count, inner, params.outer, width, inner * width},
                               {kBlocks * kBlock, kColumns}, map);
    }
  };
  describe(params.others, params.num_home, maps.columns[0]);
  describe(params.redundant, params.num_groups - params.num_home, maps.columns[1]);
  return error;
}

template <typename T>
cudaError_t LaunchFew(const GroupedDotParams& params, int num_sms, cudaStream_t stream) {
  Maps maps{};
  cudaError_t error = DescribeOperands<T>(params, maps);
  if (error != cudaSuccess) return error;
  error =
      cudaFuncSetAttribute(FewRowsKernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(FewShared));
  if (error != cudaSuccess) return error;
  const int64_t across = (params.outer + kColumns - 1) / kColumns;
  const int64_t most_tiles =
      across * (params.num_rows / kMostRows + std::min(params.num_rows, params.num_groups));
  const dim3 blocks(static_cast<unsigned>(std::min<int64_t>(num_sms, most_tiles)));
  return Launch(FewRowsKernel<T>, blocks, kFewThreads, sizeof(FewShared), stream, false, params, maps);
}

}  // namespace

bool SuitsFewRows(const GroupedDotParams& params) {
  const bool is_fp8 = params.row_scales != nullptr;
  if (params.product != (is_fp8 ? GroupedDot::kRowsTransposed : GroupedDot::kRows)) return false;
  if (params.inner % (is_fp8 ? kFp8Block : Elements<__half>::kBlock) != 0) return false;
  // A group may have all rows, and then reads its matrix again for each 64. So few suffice to be few in
  // total.
  constexpr int64_t kRowsOfGroup = 16;
  if (params.num_rows > std::max<int64_t>(kMostRows, kRowsOfGroup * params.num_groups)) return false;
  // Matrices of 16-bit floats are read 2 to 5 % faster by the other kernel if many groups have rows. With
  // 4096 columns of 64 groups, its last tiles keep so few blocks at work that it takes longer.
  constexpr int64_t kFewColumns = 64 * 4096;
  return is_fp8 || int64_t{std::min(params.num_rows, params.num_groups)} * params.outer <= kFewColumns;
}

cudaError_t LaunchFewRows(const GroupedDotParams& params, int num_sms, cudaStream_t stream) {
  switch (OperandsOf(params)) {
    case Operands::kFp8:
      return LaunchFew<uint8_t>(params, num_sms, stream);
    case Operands::kF16:
      return LaunchFew<__half>(params, num_sms, stream);
    default:
      return LaunchFew<__nv_bfloat16>(params, num_sms, stream);
  }
}

cudaError_t PreloadFewRows() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, FewRowsKernel<uint8_t>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, FewRowsKernel<__half>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, FewRowsKernel<__nv_bfloat16>);
  return error;
}

}  // namespace jax_ep::cuda::sm90
