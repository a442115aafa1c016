// Conversion of rows and matrices to FP8, as they lie and transposed, in one pass over memory. The bits are
// those of jax_ep/_rows/fp8.py.
#include "kernels/fp8/tile.cuh"
#include "kernels/launch/launch.h"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = kTileThreads;
constexpr int kVectorsPerBlock = 4 * kThreads;  // of 16 bytes, of a block that converts rows
// Blocks that an SM can run at once. A float32 tile needs more registers.
template <typename T>
constexpr int kBlocksPerSm = std::is_same_v<T, float> ? 2 : 4;

// Converts rows as they lie, of which only the order of blocks matters. Each warp loads several vectors
// before it converts the first one. With rows_per_group each group has as many blocks.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    QuantizeRowsKernel(const __grid_constant__ QuantizeParams params) {
  using Block = Quantized<T>;
  constexpr int kVectors = kVectorsPerBlock / kThreads;
  const int64_t row_vectors = params.width / Block::kElements;
  int64_t block = blockIdx.x, begin = 0, end = 0;  // the vectors of the rows
  if (params.rows_per_group > 0) {
    const int64_t blocks = gridDim.x / params.num_groups, group = block / blocks;
    block %= blocks;
    begin = group * params.rows_per_group * row_vectors;
    end = begin + SizeOfGroup(params.group_sizes, group, params.rows_per_group) * row_vectors;
  } else {
    end = CountRows(params.group_sizes, params.num_groups, params.num_rows) * row_vectors;
  }
  const int64_t first = begin + (block * kThreads + (threadIdx.x & ~(kWarp - 1))) * kVectors;
  if (first >= end) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  uint4 vectors[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = first + v * kWarp + lane;
    vectors[v] = at < end ? static_cast<const uint4*>(params.x)[at] : uint4{};
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = first + v * kWarp + lane;
    const uint4 one[1] = {vectors[v]};
    const Block converted = QuantizeBlock<T>(one, params.rounds, params.floor);
    if (at >= end) continue;
    reinterpret_cast<typename Block::Values*>(params.values)[at] = converted.values[0];
    if (lane % Block::kLanes == 0) params.scales[at / Block::kLanes] = converted.scale;
  }
}

// Converts rows transposed, and also as they lie if kBoth.
template <typename T, bool kBoth>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<T>)
    QuantizeTilesKernel(const __grid_constant__ QuantizeParams params) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<SharedTile<T>*>(memory);
  const int tile = static_cast<int>(blockIdx.x);
  const TileRows rows =
      FindRows(params.group_sizes, params.num_groups, params.rows_per_group, params.num_rows, tile);
  if (rows.first < 0) return;  // a group's tile past all rows must be zero, because a product reads it
  const int64_t width = params.width, blocks = width / kTile;
  const TileStrides strides = {width, blocks, params.num_columns};
  const int64_t block = blockIdx.y;
  LoadTile(shared.pieces, params, rows.first, rows.count, block * kTile);
  const TileResults to = {params.values + rows.first * width + block * kTile,
                          params.scales + rows.first * blocks + block,
                          params.transposed + block * kTile * strides.transposed + int64_t{tile} * kTile,
                          params.transposed_scales + tile * width + block * kTile};
  const auto maxima = Maxima<T>::template Of<kBoth>(shared.pieces);
  if constexpr (kBoth) {
    StoreScaledRows(shared.pieces, maxima.of_row, rows.count, to, strides, params.rounds, params.floor);
  }
  StoreScaledColumns(shared, maxima, to, strides, params.rounds, params.floor);
}

// Converts matrices: a tile has one scale.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<T>)
    QuantizeMatricesKernel(const __grid_constant__ QuantizeParams params) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<SharedTile<T>*>(memory);
  const int64_t width = params.width, blocks = width / kTile, matrix = blockIdx.z;
  const int64_t first = matrix * params.num_rows + int64_t{blockIdx.x} * kTile;
  const int64_t column = int64_t{blockIdx.y} * kTile;
  LoadTile(shared.pieces, params, first, kTile, column);
  uint32_t largest = WarpMax(Maxima<T>::template Of<false>(shared.pieces).of_all());
  if (threadIdx.x % kWarp == 0) shared.maxima[threadIdx.x / kWarp][0][0] = largest;
  __syncthreads();
  for (const auto& of_warp : shared.maxima) largest = max(largest, of_warp[0][0]);
  const float scale = ScaleOf(largest, params.rounds, params.floor), factor = Reciprocal(scale);
  if (threadIdx.x == 0) params.scales[(matrix * gridDim.x + blockIdx.x) * blocks + blockIdx.y] = scale;
  const auto same = [&](int) { return factor; };
  if (params.values != nullptr)
    StoreRows(shared.pieces, kTile, params.values + first * width + column, width, same);
  if (params.transposed != nullptr) {
    const int64_t stride = params.num_columns;
    uint8_t* const transposed =
        params.transposed + (matrix * width + column) * stride + int64_t{blockIdx.x} * kTile;
    StoreTransposed(shared, transposed, stride, same);
  }
}

// The kernels that convert tiles.
enum class Makes { kColumns, kBoth, kMatrices };

// Calls f with the kernel of a call, and the size of its shared memory.
template <typename F>
cudaError_t WithQuantizeKernel(bool is_scaled, Float type, Makes makes, F&& f) {
  // Only columns are made of rows that are FP8 already.
  if (is_scaled) return f(QuantizeTilesKernel<Scaled, false>, sizeof(SharedTile<Scaled>));
  return WithType(type, [&](auto* name) {
    using T = std::remove_pointer_t<decltype(name)>;
    if constexpr (std::is_same_v<T, double>) {
      return cudaErrorInvalidValue;
    } else {
      switch (makes) {
        case Makes::kColumns:
          return f(QuantizeTilesKernel<T, false>, sizeof(SharedTile<T>));
        case Makes::kBoth:
          return f(QuantizeTilesKernel<T, true>, sizeof(SharedTile<T>));
        default:
          return f(QuantizeMatricesKernel<T>, sizeof(SharedTile<T>));
      }
    }
  });
}

cudaError_t LaunchRows(const QuantizeParams& params, cudaStream_t stream) {
  return WithType(params.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if constexpr (std::is_same_v<T, double>) {
      return cudaErrorInvalidValue;
    } else {
      const bool is_padded = params.rows_per_group > 0;
      const int64_t rows = is_padded ? params.rows_per_group : params.num_rows;
      const int64_t vectors = rows * params.width / Quantized<T>::kElements;
      const int64_t blocks =
          (vectors + kVectorsPerBlock - 1) / kVectorsPerBlock * (is_padded ? params.num_groups : 1);
      if (blocks == 0) return cudaSuccess;
      if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
      return Launch(QuantizeRowsKernel<T>, dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, false,
                    params);
    }
  });
}

}  // namespace

cudaError_t LaunchQuantize(const QuantizeParams& params, cudaStream_t stream) {
  if (params.transposed == nullptr && !params.of_matrices) return LaunchRows(params, stream);
  const Makes makes = params.of_matrices ? Makes::kMatrices : params.values ? Makes::kBoth : Makes::kColumns;
  const int tiles = params.of_matrices ? params.num_rows / kTile : params.num_columns / kTile;
  const dim3 grid(tiles, params.width / kTile, params.num_matrices);
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  return WithQuantizeKernel(params.x_scales != nullptr, params.type, makes, [&](auto kernel, int shared) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
    return Launch(kernel, grid, kThreads, shared, stream, false, params);
  });
}

cudaError_t PreloadQuantize() {
  const auto preload = [](auto kernel, int = 0) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, kernel);
  };
  cudaError_t error = WithQuantizeKernel(true, Float::kF32, Makes::kColumns, preload);
  for (Float type : {Float::kF16, Float::kBF16, Float::kF32}) {
    if (error == cudaSuccess) {
      error = WithType(type, [&](auto* name) {
        using T = std::remove_pointer_t<decltype(name)>;
        if constexpr (std::is_same_v<T, double>) {
          return cudaErrorInvalidValue;
        } else {
          return preload(QuantizeRowsKernel<T>);
        }
      });
    }
    for (Makes makes : {Makes::kColumns, Makes::kBoth, Makes::kMatrices}) {
      if (error == cudaSuccess) error = WithQuantizeKernel(false, type, makes, preload);
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
