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

// Returns whether tiles begin with groups. Those of a forward pass need not, unless groups have places of
// their own, because blocks of its rows do not depend on other rows. Then few rows in many groups need few
// tiles.
JAX_EP_HD bool HasTilesOfGroups(const QuantizeGatedParams& params, bool is_backward) {
  return is_backward || params.rows_per_group > 0;
}

// The tiles that a block holds at once. Of the three tiles of the backward pass, which are made from one
// read, the third one replaces the first one. Until then it is in registers.
constexpr int kForwardTiles = 1, kBackwardTiles = 2;

template <Activation kActivation, bool kBackward>
__global__ void __launch_bounds__(kTileThreads, kBackward ? 2 : 4)
    QuantizeGatedKernel(const __grid_constant__ QuantizeGatedParams params) {
  extern __shared__ uint4 memory[];
  auto* const shared = reinterpret_cast<SharedTile<BF16>*>(memory);
  const TilePart part;
  const int tile = static_cast<int>(blockIdx.x), block = static_cast<int>(blockIdx.y);
  const TileRows rows = [&] {
    const int32_t* const sizes = params.group_sizes;
    if (HasTilesOfGroups(params, kBackward)) {
      return FindRows(sizes, params.num_groups, params.rows_per_group, params.num_rows, tile);
    }
    const int64_t num_rows = CountRows(sizes, params.num_groups, params.num_rows);
    return FindRows(nullptr, 0, 0, static_cast<int>(num_rows), tile);
  }();
  // In a backward pass, a group's tile past all rows must be zero, because a product reads it.
  if (rows.first < 0 || (!kBackward && part.warp * kWarpRows >= rows.count)) return;
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
      if constexpr (kBackward) d_out[i] = Piece<BF16>::Load(d_hidden, row * width + first_column);
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
      if constexpr (kBackward) {
        shared[1].pieces.Set(begin + i, Piece<BF16>::Of(d_gate));
        d_up_pieces[begin + i] = Piece<BF16>::Of(d_up);
      }
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
    if (kBackward) StoreScaledColumns(tile_of, maxima, results, strides, params.rounds, floor);
  };
  convert(shared[0], params.hidden, width, block, !kBackward, kFloorOfRows);
  if constexpr (kBackward) {
    convert(shared[1], params.d_z, 2 * width, block, true, params.floor);
    // The barriers of the second tile came after all reads of the first one.
#pragma unroll
    for (int r = 0; r < kPieceRows; ++r) shared[0].pieces.Set(r, d_up_pieces[r]);
    convert(shared[0], params.d_z, 2 * width, static_cast<int>(width / kTile) + block, true, params.floor);
  }
}

// Calls f with the kernel of a call, and the size of its shared memory.
template <bool kBackward, typename F>
cudaError_t WithGatedKernel(Activation activation, F&& f) {
  constexpr int kShared = (kBackward ? kBackwardTiles : kForwardTiles) * sizeof(SharedTile<BF16>);
  switch (activation) {
    case Activation::kSilu:
      return f(QuantizeGatedKernel<Activation::kSilu, kBackward>, kShared);
    case Activation::kGelu:
      return f(QuantizeGatedKernel<Activation::kGelu, kBackward>, kShared);
    default:
      return f(QuantizeGatedKernel<Activation::kClipped, kBackward>, kShared);
  }
}
template <typename F>
cudaError_t WithGatedKernel(Activation activation, bool is_backward, F&& f) {
  return is_backward ? WithGatedKernel<true>(activation, f) : WithGatedKernel<false>(activation, f);
}

}  // namespace

cudaError_t LaunchQuantizeGated(const QuantizeGatedParams& params, cudaStream_t stream) {
  const bool is_backward = params.d_hidden != nullptr;
  const int64_t tiles = HasTilesOfGroups(params, is_backward) ? params.num_rows / kTile + params.num_groups
                                                              : (params.num_rows + kTile - 1) / kTile;
  const dim3 grid(tiles, params.width / kTile);
  return WithGatedKernel(params.activation, is_backward, [&](auto kernel, int shared) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
    return Launch(kernel, grid, kTileThreads, shared, stream, false, params);
  });
}

cudaError_t PreloadQuantizeGated() {
  cudaError_t error = cudaSuccess;
  for (Activation activation : {Activation::kSilu, Activation::kGelu, Activation::kClipped}) {
    for (bool is_backward : {false, true}) {
      if (error != cudaSuccess) return error;
      error = WithGatedKernel(activation, is_backward, [](auto kernel, int) {
        cudaFuncAttributes attributes;
        return cudaFuncGetAttributes(&attributes, kernel);
      });
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
