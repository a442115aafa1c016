// Products of 16-bit floats: rows times their groups' matrices or the transposes of these, and the gradient
// of the matrices.
//
// As in fp8.cu, two blocks share a tile. In each block one thread loads operands, and two warpgroups
// multiply. They store most of a tile while the tensor cores work on the next one. In a gradient of matrices
// the sum goes over rows, and a third warp clears those of the next group. Here a *rank* is a block's number
// in its cluster, and the *blocks* of a sum are of 64 elements.
#include "kernels/products/engines.h"
#include "kernels/products/sm90/pipeline.cuh"
#include "kernels/products/sm90/tile_queue.cuh"
#include "kernels/ptx/warpgroup.cuh"

namespace jax_ep::cuda::sm90 {
namespace {

constexpr int kBlock = 64;  // elements of the sum, in 128 bytes
constexpr int kStep = 16;   // of which one product adds up so many
constexpr int kStages = 4;
constexpr int kRowBytes = kBlock * sizeof(uint16_t);  // of a box
using RingPosition = Position<kStages>;

// 64 elements of the sum, of both operands, in boxes. A box of an operand that is stored along the sum has
// these elements for 64 rows or 128 columns of the tile. Stored across, it has 64 rows or columns of the
// tile, side by side, for each of these elements.
struct Stage {
  uint8_t rows[kTileRows][kRowBytes];
  uint8_t columns[kTileColumns][kRowBytes];
};
constexpr int kAcross = 64;  // rows or columns of the tile in a box that is stored across

struct Shared {
  Stage stages[kStages];
  Staged staged[kWarps][2];  // one is filled while the other is stored
  Ring<kStages> ring;
  uint64_t loaded[kStages];  // of blocks that are cleared before they are full
  TileQueue queue;
};
static_assert(sizeof(Shared) <= kMostSharedBytes);

// Returns whether the last step of so many elements of a sum has rows of the next group.
__device__ bool EndsWithinStep(int size) { return size % kStep != 0; }

__device__ int NumBlocks(const Tile& tile) { return (tile.end - tile.begin + kBlock - 1) / kBlock; }

// Loads operands.
template <GroupedDot kProduct>
struct Loader {
  static constexpr bool kOfWeights = kProduct == GroupedDot::kWeights;
  static constexpr int kColumnsOfBox = kProduct == GroupedDot::kRowsTransposed ? kHalfColumns : kAcross;

  const GroupedDotParams& params;
  const Maps& maps;
  Shared& shared;
  int rank;

  // Loads the i-th 64 rows of the tile, which begins at `row`.
  template <typename... Blocks>
  __device__ void LoadRows(Stage& to, int i, int k, int row, uint64_t* full, Blocks... blocks) const {
    const int first = row + i * kBoxRows;
    LoadBox(to.rows[i * kBoxRows], &maps.rows, kOfWeights ? first : k, kOfWeights ? k : first, 0, full,
            blocks...);
  }

  // Loads a half of the columns of the tile, which begins at `column`.
  template <typename... Blocks>
  __device__ void LoadColumns(Stage& to, const CUtensorMap* map, int matrix, int half, int k, int column,
                              uint64_t* full, Blocks... blocks) const {
#pragma unroll
    for (int i = half * kHalfColumns; i < (half + 1) * kHalfColumns; i += kColumnsOfBox) {
      const bool along_sum = kProduct == GroupedDot::kRowsTransposed;
      LoadBox(to.columns[i], map, along_sum ? k : column + i, along_sum ? column + i : k, matrix, full,
              blocks...);
    }
  }

  __device__ void LoadTile(const Tile& tile, RingPosition& position) const {
    const Part part(tile, rank);
    const MatrixIndex matrix(params, tile.group);
    const CUtensorMap* const columns = &maps.columns[!kOfWeights && matrix.is_redundant ? 1 : 0];
    const int index = kOfWeights ? 0 : matrix.index;
    const int boxes = part.num_rows > kBoxRows ? 2 : 1;
    const uint32_t bytes = sizeof(Stage::columns) + boxes * sizeof(Stage::rows) / 2;
    for (int k = tile.begin; k < tile.end; k += kBlock, position.Advance()) {
      WaitForLoad(&shared.ring.empty[position.stage], position.phase ^ 1);
      const bool is_cleared = kOfWeights && tile.end - k < kBlock && EndsWithinStep(tile.end - k);
      uint64_t* const full = &(is_cleared ? shared.loaded : shared.ring.full)[position.stage];
      Stage& to = shared.stages[position.stage];
      ArriveAndExpect(full, bytes);
      if (tile.is_wide) {  // both blocks have the same rows
        if (rank < boxes) LoadRows(to, rank, k, part.first_row, full, kBothBlocks);
        for (int half = 0; half < kHalves; ++half) {
          LoadColumns(to, columns, index, half, k, part.first_column, full);
        }
      } else {  // both blocks have the same columns
        for (int i = 0; i < boxes; ++i) LoadRows(to, i, k, part.first_row, full);
        LoadColumns(to, columns, index, rank, k, part.first_column, full, kBothBlocks);
      }
    }
  }

  // Loads the operands of all tiles. Called by one thread of each block.
  __device__ void Run() const {
    TileReceiver receiver{shared.queue, 1};
    RingPosition position;
    for (Tile tile = receiver.Next(); !tile.is_end(); tile = receiver.Next()) LoadTile(tile, position);
  }
};

// Clears the rows of a tile's last block that belong to the next group, up to the end of a step. In both
// operands, because zero times NaN is NaN. Called by one warp of each block.
__device__ void Clear(Shared& shared) {
  constexpr int kBoxes = (kTileRows + kTileColumns) / kAcross, kVectors = kRowBytes / sizeof(uint4);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  TileReceiver receiver{shared.queue, kAllLanes};
  int stage = 0;        // of the tile's first block
  unsigned phases = 0;  // of `loaded`, one bit for each stage
  for (Tile tile = receiver.Next(); !tile.is_end(); tile = receiver.Next()) {
    const int size = tile.end - tile.begin, last = (stage + NumBlocks(tile) - 1) % kStages;
    stage = (last + 1) % kStages;
    if (!EndsWithinStep(size)) continue;
    WaitForLoad(&shared.loaded[last], phases >> last & 1);
    phases ^= 1u << last;
    auto* const boxes = reinterpret_cast<uint4*>(&shared.stages[last]);
    const int first = size % kBlock, rows = kStep - first % kStep;
    for (int i = lane; i < kBoxes * rows * kVectors; i += kWarp) {
      const int vector = i % kVectors, box = i / kVectors % kBoxes, row = first + i / kVectors / kBoxes;
      boxes[(box * kAcross + row) * kVectors + vector] = uint4{};
    }
    FenceBulkShared();
    __syncwarp();
    if (lane == 0) Arrive(&shared.ring.full[last]);
  }
}

// Multiplies and stores. Called by one warpgroup.
template <GroupedDot kProduct, typename T>
class Multiplier {
 public:
  __device__ Multiplier(const GroupedDotParams& params, const Maps& maps, Shared& shared, int rank,
                        int warpgroup)
      : params_(params), maps_(maps), shared_(shared), rank_(rank), warpgroup_(warpgroup) {}

  // Computes all tiles.
  __device__ void Run() {
    TileReceiver receiver{shared_.queue, kAllLanes};
    for (Tile tile = receiver.Next(); !tile.is_end(); tile = receiver.Next()) {
      const Work work(params_, tile, rank_, warpgroup_);
      if (work.num_halves > 0) {
        MultiplyTile(tile, work);
      } else {
        shared_.ring.Skip(NumBlocks(tile), position_);
      }
    }
    while (num_deferred_ > 0) StoreDeferred();
    WaitForStoresRead();  // the block's shared memory outlives them
  }

 private:
  static constexpr bool kOfWeights = kProduct == GroupedDot::kWeights;
  static constexpr bool kColumnsAcross = kProduct != GroupedDot::kRowsTransposed;
  static constexpr int kParts = kTileColumns / kStoredColumns;
  // The last parts of a tile are stored during the next one, because stores wait behind loads: each part of
  // a warp waits until the second one before it has been read from shared memory. More parts would need more
  // registers than there are.
  static constexpr int kMostDeferred = kParts - 1, kBlocksPerStore = 2;

  // Multiplies `kCount` halves of a tile's columns. While the tensor cores work on a block of the sum, the
  // stage of the one before is released, and deferred parts are stored.
  template <int kCount>
  __device__ void MultiplyHalves(const Tile& tile, const Work& work,
                                 float (&sums)[kCount * kHalfColumns / 2]) {
    constexpr uint32_t kAlongStep = kStep * sizeof(T), kAcrossStep = kStep * kRowBytes;
    const OperandRows rows(shared_.stages[0].rows[work.row]);
    const OperandRows columns(shared_.stages[0].columns[work.column],
                              kColumnsAcross ? kAcross * kRowBytes : kNoNext);
    const auto multiply = [&](int block, int step) {
      const uint32_t begin = position_.stage * sizeof(Stage);
      MultiplyFloats<T, kOfWeights, kColumnsAcross>(
          sums, rows.At(begin + step * (kOfWeights ? kAcrossStep : kAlongStep)),
          columns.At(begin + step * (kColumnsAcross ? kAcrossStep : kAlongStep)), block > 0 || step > 0);
    };
    // If the sum is over the inner width, the elements behind it are zeros.
    const int rest = kOfWeights ? (tile.end - tile.begin) % kBlock : 0;
    const int num_whole = NumBlocks(tile) - (rest > 0 ? 1 : 0);
    int before = 0;  // the stage of the block before
#pragma unroll 1
    for (int block = 0; block < num_whole; ++block, position_.Advance()) {
      WaitForLoad(&shared_.ring.full[position_.stage], position_.phase);
      BeginProducts();
#pragma unroll
      for (int step = 0; step < kBlock / kStep; ++step) multiply(block, step);
      CommitProducts();
      WaitForProducts<1>();
      if (block > 0) shared_.ring.Release(before);
      before = position_.stage;
      if (num_deferred_ > 0 && block % kBlocksPerStore == kBlocksPerStore - 1) StoreDeferred();
    }
    if (rest > 0) {  // apart, because ptxas waits for each product that is conditional
      WaitForLoad(&shared_.ring.full[position_.stage], position_.phase);
      BeginProducts();
#pragma unroll
      for (int step = 0; step < kBlock / kStep; ++step) {
        if (step * kStep < rest) multiply(num_whole, step);
      }
      CommitProducts();
      WaitForProducts<0>();
      if (num_whole > 0) shared_.ring.Release(before);
      before = position_.stage;
      position_.Advance();
    }
    WaitForProducts<0>();
    shared_.ring.Release(before);
  }

  // Computes a tile, and stores its first parts. One array has the sums of one half and those of both,
  // because ptxas reserves registers for each array of sums.
  __device__ void MultiplyTile(const Tile& tile, const Work& work) {
    float sums[kTileColumns / 2];
    Undefine(sums);
    if (work.num_halves == kHalves) {
      MultiplyHalves<kHalves>(tile, work, sums);
    } else {
      MultiplyHalves<1>(tile, work, reinterpret_cast<float (&)[kHalfColumns / 2]>(sums));
    }
    Keep(sums);
    while (num_deferred_ > 0) StoreDeferred();
    target_ = Target(params_, maps_.out, tile, work, kOfWeights);
    constexpr int kNow = kParts - kMostDeferred;
#pragma unroll
    for (int part = 0; part < kNow; ++part) {
      uint32_t words[kPackedWords];
      PackSums(&sums[part * 2 * kPackedWords], words);
      StoreWords(words, part);
    }
    PackSums(&sums[kNow * 2 * kPackedWords], deferred_);
    num_deferred_ = work.num_halves * kParts / kHalves - kNow;
  }

  template <int kWords>
  __device__ static void PackSums(const float* sums, uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = Pack<T>(sums[2 * i], sums[2 * i + 1]);
      asm volatile("" : "+r"(words[i]));  // now: the sums' registers are needed
    }
  }

  // Stores a part and proceeds to the next one.
  template <int kWords>
  __device__ void StoreWords(const uint32_t (&words)[kWords], int buffer) {
    Staged(&staged)[2] = shared_.staged[threadIdx.x / kWarp - kWarpgroup / kWarp];
    StorePart<kOfWeights>(params_, target_, words, staged[buffer % 2]);
    target_.first_column += kStoredColumns;
  }

  __device__ void StoreDeferred() {
    StoreWords(deferred_, num_deferred_);
    --num_deferred_;
    // Registers have no index, so the parts that are left move up.
#pragma unroll
    for (int i = 0; i < (kMostDeferred - 1) * kPackedWords; ++i) deferred_[i] = deferred_[i + kPackedWords];
  }

  const GroupedDotParams& params_;
  const Maps& maps_;
  Shared& shared_;
  int rank_, warpgroup_;
  RingPosition position_;
  // The parts of the tile before that are not stored yet, and where the first of them goes.
  int num_deferred_ = 0;
  Target target_;
  uint32_t deferred_[kMostDeferred * kPackedWords];
};

template <GroupedDot kProduct, typename T>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    FloatsKernel(const __grid_constant__ GroupedDotParams params, const __grid_constant__ GroupArrays groups,
                 const __grid_constant__ Maps maps) {
  constexpr bool kOfWeights = kProduct == GroupedDot::kWeights;
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const int rank = RankInCluster();
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (threadIdx.x == 0) {
    shared.ring.Init(1);
    for (uint64_t& barrier : shared.loaded) InitBarrier(&barrier, 1);
    shared.queue.Init(kWarps + (kOfWeights ? 2 : 1));
    FenceBarriers();
    PrefetchMap(&maps.rows);
    PrefetchMap(&maps.columns[!kOfWeights && params.num_home == 0 ? 1 : 0]);
  }
  SyncCluster();
  if (warp < kWarpgroup / kWarp) {
    ReleaseRegisters<40>();
    if (threadIdx.x == 0) Loader<kProduct>{params, maps, shared, rank}.Run();
    if (kOfWeights && warp == 1) Clear(shared);
    if (warp == 2 && rank == 0) {
      HandOut<kOfWeights>(params, groups, int64_t{params.inner} * sizeof(T), shared.queue);
    }
  } else {
    TakeRegisters<232>();
    Multiplier<kProduct, T>(params, maps, shared, rank, warp / (kWarpgroup / kWarp) - 1).Run();
  }
  __syncwarp();
  SyncCluster();  // the other block may still arrive here
}

template <GroupedDot kProduct, typename T>
cudaError_t LaunchFloats(const GroupedDotParams& params, const GroupArrays& groups, int num_sms,
                         cudaStream_t stream) {
  constexpr Box kOfRows{kBoxRows, kBlock};
  constexpr Box kOfColumns{Loader<kProduct>::kColumnsOfBox, kBlock};
  Maps maps{};
  cudaError_t error = Describe(params, sizeof(T), false, kOfRows, kOfColumns, maps);
  if (error != cudaSuccess) return error;
  return LaunchClusters(FloatsKernel<kProduct, T>, sizeof(Shared), num_sms, stream, params, groups, maps);
}

template <GroupedDot kProduct, typename T>
cudaError_t PreloadFloats() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, FloatsKernel<kProduct, T>);
}

}  // namespace

template <Operands kOperands>
using FloatOf = std::conditional_t<kOperands == Operands::kF16, __half, __nv_bfloat16>;

template <GroupedDot kProduct, Operands kOperands>
cudaError_t ProductKernel<kProduct, kOperands>::Launch(const GroupedDotParams& params,
                                                       const GroupArrays& groups, int num_sms,
                                                       cudaStream_t stream) {
  return LaunchFloats<kProduct, FloatOf<kOperands>>(params, groups, num_sms, stream);
}
template <GroupedDot kProduct, Operands kOperands>
cudaError_t ProductKernel<kProduct, kOperands>::Preload() {
  return PreloadFloats<kProduct, FloatOf<kOperands>>();
}

template struct ProductKernel<GroupedDot::kRows, Operands::kF16>;
template struct ProductKernel<GroupedDot::kRows, Operands::kBF16>;
template struct ProductKernel<GroupedDot::kRowsTransposed, Operands::kF16>;
template struct ProductKernel<GroupedDot::kRowsTransposed, Operands::kBF16>;
template struct ProductKernel<GroupedDot::kWeights, Operands::kF16>;
template struct ProductKernel<GroupedDot::kWeights, Operands::kBF16>;

}  // namespace jax_ep::cuda::sm90
