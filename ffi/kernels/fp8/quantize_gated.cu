// The activations of gated experts, and their gradients, converted to FP8 in one pass over memory.
#include "kernels/fp8/tile.cuh"
#include "kernels/launch/launch.h"

namespace jax_ep::cuda {
namespace {

using BF16 = __nv_bfloat16;

// An activation's value and its derivatives.
struct Activated {
  float value, d_gate, d_up;
};

__device__ inline float Sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

template <Activation kActivation>
__device__ inline Activated Activate(float gate, float up) {
  if constexpr (kActivation == Activation::kSilu) {
    const float sigmoid = Sigmoid(gate), silu = gate * sigmoid;
    return {silu * up, up * (sigmoid + silu * (1.0f - sigmoid)), silu};
  } else if constexpr (kActivation == Activation::kGelu) {  // the tanh approximation
    constexpr float kRoot = 0.7978845608028654f, kCubic = 0.044715f;
    const float cube = kCubic * gate * gate * gate;
    // (1 + tanh(y)) / 2
    const float half = Sigmoid(2.0f * kRoot * (gate + cube)), gelu = gate * half;
    const float slope = kRoot * (1.0f + 3.0f * kCubic * gate * gate);
    return {gelu * up, up * (half + 2.0f * gelu * (1.0f - half) * slope), gelu};
  } else {
    constexpr float kLimit = 7.0f, kSlope = 1.702f;
    // Written so that a NaN stays one.
    const bool passes_gate = !(gate > kLimit), passes_up = !(fabsf(up) > kLimit);
    gate = passes_gate ? gate : kLimit;
    up = 1.0f + (passes_up ? up : copysignf(kLimit, up));
    const float sigmoid = Sigmoid(kSlope * gate), swish = gate * sigmoid;
    return {swish * up, passes_gate ? up * (sigmoid + kSlope * swish * (1.0f - sigmoid)) : 0.0f,
            passes_up ? swish : 0.0f};
  }
}

constexpr int kFewRows = 1024;  // up to here, half a warp of the forward pass has one row
constexpr int kManyRows = 4;    // of half a warp otherwise

// Converts the activations of a forward pass. Half a warp has kRows rows of a block of 128 columns. Such
// blocks do not depend on other rows, so that few rows in many groups need few blocks of threads.
template <Activation kActivation, int kRows>
__global__ void __launch_bounds__(kTileThreads)
    QuantizeHiddenKernel(const __grid_constant__ QuantizeGatedParams params) {
  using Block = Quantized<BF16>;
  constexpr int kRowsAtOnce = kTileThreads / Block::kLanes;
  const int lane = static_cast<int>(threadIdx.x) % Block::kLanes, rows_per_group = params.rows_per_group;
  const int64_t width = params.width, column = int64_t{blockIdx.y} * kTile + lane * Block::kElements;
  const int64_t first = int64_t{blockIdx.x} * kRowsAtOnce * kRows + threadIdx.x / Block::kLanes;
  const auto* const z = static_cast<const BF16*>(params.z);
  Piece<BF16> gate[kRows], up[kRows];
  const auto load = [&](int i) {
    const BF16* const row = z + (first + i * kRowsAtOnce) * 2 * width + column;
    gate[i] = Piece<BF16>::Load(row, 0), up[i] = Piece<BF16>::Load(row, width);
  };
  // A single row is loaded before the rows are counted, because both take about as long. Several are loaded
  // after that, because loads of unused rows cost memory bandwidth.
  if (kRows == 1 && first < params.num_rows) load(0);
  const int64_t end = rows_per_group > 0 ? params.num_rows
                                         : CountRows(params.group_sizes, params.num_groups, params.num_rows);
  bool is_row[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = first + i * kRowsAtOnce;
    is_row[i] = row < end;
    if (rows_per_group > 0 && is_row[i])
      is_row[i] =
          row % rows_per_group < SizeOfGroup(params.group_sizes, row / rows_per_group, rows_per_group);
    if (kRows > 1 && is_row[i]) load(i);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (!__any_sync(kAllLanes, is_row[i])) continue;
    float hidden[kPiece];
#pragma unroll
    for (int j = 0; j < kPiece; ++j) hidden[j] = Activate<kActivation>(gate[i][j], up[i][j]).value;
    const uint4 rounded[] = {Piece<BF16>::Of(hidden).bits};
    const Block block = QuantizeBlock<BF16>(rounded, params.rounds);
    if (!is_row[i]) continue;
    const int64_t row = first + i * kRowsAtOnce;
    *reinterpret_cast<Block::Values*>(params.hidden.values + row * width + column) = block.values[0];
    if (lane == 0) params.hidden.scales[row * (width / kTile) + blockIdx.y] = block.scale;
  }
}

// The tiles that a block of the backward pass holds at once. Of its three tiles, which are made from one
// read, the third one replaces the first one. Until then it is in registers.
constexpr int kHeldTiles = 2;

// Converts the activations of a backward pass to columns, and the cotangent of z to rows and columns.
template <Activation kActivation>
__global__ void __launch_bounds__(kTileThreads, 2)
    QuantizeCotangentKernel(const __grid_constant__ QuantizeGatedParams params) {
  extern __shared__ uint4 memory[];
  auto* const shared = reinterpret_cast<SharedTile<BF16>*>(memory);
  const TilePart part;
  const int tile = static_cast<int>(blockIdx.x), block = static_cast<int>(blockIdx.y);
  const TileRows rows =
      FindRows(params.group_sizes, params.num_groups, params.rows_per_group, params.num_rows, tile);
  // The tile belongs to no group. (One past all rows of a group goes on: it becomes zero, because a product
  // reads it.)
  if (rows.first < 0) return;
  const int64_t width = params.width, first_column = int64_t{block} * kTile + part.first_column();
  const auto* const z = static_cast<const BF16*>(params.z);
  const auto* const d_hidden = static_cast<const BF16*>(params.d_hidden);

  Piece<BF16> d_up_pieces[kPieceRows];
  constexpr int kLoadedRows = 4;  // at once
#pragma unroll
  for (int begin = 0; begin < kPieceRows; begin += kLoadedRows) {
    Piece<BF16> gate[kLoadedRows]{}, up[kLoadedRows]{}, d_out[kLoadedRows]{};
#pragma unroll
    for (int i = 0; i < kLoadedRows; ++i) {
      const int in_tile = part.first_row() + begin + i;
      if (in_tile >= rows.count) continue;
      const int64_t row = rows.first + in_tile;
      gate[i] = Piece<BF16>::Load(z, row * 2 * width + first_column);
      up[i] = Piece<BF16>::Load(z, row * 2 * width + width + first_column);
      d_out[i] = Piece<BF16>::Load(d_hidden, row * width + first_column);
    }
#pragma unroll
    for (int i = 0; i < kLoadedRows; ++i) {
      float hidden[kPiece], d_gate[kPiece], d_up[kPiece];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        const Activated activated = Activate<kActivation>(gate[i][j], up[i][j]);
        hidden[j] = activated.value;
        d_gate[j] = activated.d_gate * d_out[i][j], d_up[j] = activated.d_up * d_out[i][j];
      }
      shared[0].pieces.Set(begin + i, Piece<BF16>::Of(hidden));
      shared[1].pieces.Set(begin + i, Piece<BF16>::Of(d_gate));
      d_up_pieces[begin + i] = Piece<BF16>::Of(d_up);
    }
  }

  // Converts a tile of an array of `columns` columns, whose tile in a row is `index`.
  const auto convert = [&](SharedTile<BF16>& tile_of, const QuantizedResults& to, int64_t columns, int index,
                           bool stores_rows, float floor) {
    const int64_t blocks = columns / kTile;
    const TileStrides strides = {columns, blocks, params.num_columns};
    const TileResults results = {
        to.values + rows.first * columns + int64_t{index} * kTile, to.scales + rows.first * blocks + index,
        to.transposed + int64_t{index} * kTile * params.num_columns + int64_t{tile} * kTile,
        to.transposed_scales + int64_t{tile} * columns + int64_t{index} * kTile};
    const auto maxima = Maxima<BF16>::Of<true>(tile_of.pieces);
    if (stores_rows) {
      StoreScaledRows(tile_of.pieces, maxima.of_row, rows.count, results, strides, params.rounds, floor);
    }
    StoreScaledColumns(tile_of, maxima, results, strides, params.rounds, floor);
  };
  convert(shared[0], params.hidden, width, block, false, kFloorOfRows);
  convert(shared[1], params.d_z, 2 * width, block, true, params.floor);
  // The barriers of the second tile came after all reads of the first one.
#pragma unroll
  for (int r = 0; r < kPieceRows; ++r) shared[0].pieces.Set(r, d_up_pieces[r]);
  convert(shared[0], params.d_z, 2 * width, static_cast<int>(width / kTile) + block, true, params.floor);
}

// Calls f(std::integral_constant<Activation, ...>()) with an activation.
template <typename F>
cudaError_t WithActivation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kSilu:
      return f(std::integral_constant<Activation, Activation::kSilu>());
    case Activation::kGelu:
      return f(std::integral_constant<Activation, Activation::kGelu>());
    default:
      return f(std::integral_constant<Activation, Activation::kClipped>());
  }
}

}  // namespace

cudaError_t LaunchQuantizeGated(const QuantizeGatedParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(params.width / kTile);
  return WithActivation(params.activation, [&](auto activation) {
    constexpr Activation kActivation = decltype(activation)::value;
    if (params.d_hidden != nullptr) {
      constexpr int kShared = kHeldTiles * sizeof(SharedTile<BF16>);
      const auto kernel = QuantizeCotangentKernel<kActivation>;
      const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
      if (error != cudaSuccess) return error;
      const dim3 grid(params.num_rows / kTile + params.num_groups, blocks);
      return Launch(kernel, grid, kTileThreads, kShared, stream, false, params);
    }
    const auto launch = [&](auto kernel, int rows) {  // `rows` of half a warp
      const int of_block = rows * kTileThreads / Quantized<BF16>::kLanes;
      const dim3 grid((params.num_rows + of_block - 1) / of_block, blocks);
      return Launch(kernel, grid, kTileThreads, 0, stream, false, params);
    };
    return params.num_rows <= kFewRows ? launch(QuantizeHiddenKernel<kActivation, 1>, 1)
                                       : launch(QuantizeHiddenKernel<kActivation, kManyRows>, kManyRows);
  });
}

cudaError_t PreloadQuantizeGated() {
  const auto load = [](auto... kernels) {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaSuccess;
    ((error = error == cudaSuccess ? cudaFuncGetAttributes(&attributes, kernels) : error), ...);
    return error;
  };
  for (Activation activation : {Activation::kSilu, Activation::kGelu, Activation::kClipped}) {
    const cudaError_t error = WithActivation(activation, [&](auto which) {
      constexpr Activation kActivation = decltype(which)::value;
      return load(QuantizeHiddenKernel<kActivation, 1>, QuantizeHiddenKernel<kActivation, kManyRows>,
                  QuantizeCotangentKernel<kActivation>);
    });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jax_ep::cuda
