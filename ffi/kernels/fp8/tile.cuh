// Conversion of a tile of 128 x 128 elements to FP8, as it lies and transposed. The bits are those of
// jax_ep/_rows/fp8.py.
#pragma once

#include <cuda_pipeline.h>

#include "kernels/fp8/block.cuh"
#include "kernels/fp8/groups.cuh"
#include "kernels/launches.h"
#include "kernels/threads.cuh"

namespace jax_ep::cuda {

// A thread has 8 rows of 8 neighboring columns, and a warp has 16 rows of all columns.
constexpr int kPiece = 8;  // columns of a thread
constexpr int kPieceRows = 8;
constexpr int kTileThreads = kTile * kTile / kPiece / kPieceRows;
constexpr int kTileWarps = kTileThreads / kWarp;
constexpr int kWarpRows = kTile / kTileWarps;
static_assert(kWarpRows == sizeof(uint4), "a warp's rows of a column are one vector of the transpose");

// The type of input that is FP8 already, with a scale for each 128 elements.
struct Scaled {};

// 8 neighboring elements of a row, in as few registers as they need. A word of magnitudes holds two of 16
// bits, or one of float32. Bit patterns of magnitudes are ordered like the magnitudes, with NaN last.
template <typename T>
struct Piece {  // of 16 bits
  static constexpr int kWords = 4;
  uint4 bits;

  __device__ static Piece Load(const void* x, int64_t first) {
    return {*reinterpret_cast<const uint4*>(static_cast<const T*>(x) + first)};
  }
  __device__ static Piece Of(const float (&numbers)[kPiece]) {
    Piece piece;
    Vector<T, kPiece>::Store(reinterpret_cast<T*>(&piece.bits), numbers);
    return piece;
  }
  __device__ float operator[](int i) const { return Vector<T, kPiece>{bits}[i]; }
  __device__ uint32_t Magnitudes(int word) const {
    return reinterpret_cast<const uint32_t*>(&bits)[word] & 0x7fff7fffu;
  }
  __device__ static uint32_t Max(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
  // Returns a magnitude of a word as float32.
  __device__ static uint32_t Widened(uint32_t word, int i) {
    const auto half = static_cast<uint16_t>(i == 0 ? word : word >> 16);
    T value;
    memcpy(&value, &half, sizeof(value));
    return __float_as_uint(Widen(value));
  }
};

template <>
struct Piece<float> {
  static constexpr int kWords = kPiece;
  float4 values[2];

  __device__ float operator[](int i) const { return reinterpret_cast<const float*>(values)[i]; }
  __device__ uint32_t Magnitudes(int word) const { return __float_as_uint((*this)[word]) & 0x7fffffffu; }
  __device__ static uint32_t Max(uint32_t a, uint32_t b) { return max(a, b); }
  __device__ static uint32_t Widened(uint32_t word, int) { return word; }
};

template <>
struct Piece<Scaled> {
  static constexpr int kWords = kPiece;
  uint2 bits;
  float scale;

  __device__ float operator[](int i) const {
    const auto pair = reinterpret_cast<const __nv_fp8x2_storage_t*>(&bits)[i / 2];
    const __half2 halves(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3));
    return __fmul_rn(__half2float(i % 2 == 0 ? halves.x : halves.y), scale);
  }
  __device__ uint32_t Magnitudes(int word) const { return __float_as_uint((*this)[word]) & 0x7fffffffu; }
  __device__ static uint32_t Max(uint32_t a, uint32_t b) { return max(a, b); }
  __device__ static uint32_t Widened(uint32_t word, int) { return word; }
};

// The part of a thread in a tile.
struct TilePart {
  int warp, piece, half;  // the piece's number in its rows; which half of the warp's rows

  // Quarters of a warp load and store 128 neighboring bytes.
  __device__ TilePart()
      : warp(static_cast<int>(threadIdx.x) / kWarp),
        piece(static_cast<int>(threadIdx.x & 7) | static_cast<int>(threadIdx.x & 16) >> 1),
        half(static_cast<int>(threadIdx.x) >> 3 & 1) {}

  __device__ int first_row() const { return warp * kWarpRows + half * kPieceRows; }
  __device__ int first_column() const { return piece * kPiece; }
};

// The pieces of a tile, of which a thread has access to its own. They are kept in shared memory: if registers
// held them, each load would have to complete before the next one is issued.
template <typename T>
struct Pieces {  // of 16 bits
  uint4 bits[kPieceRows][kTileThreads];

  __device__ void LoadAsync(int r, const QuantizeParams& params, int64_t row, int64_t column) {
    const auto* const x = static_cast<const T*>(params.x);
    __pipeline_memcpy_async(&bits[r][threadIdx.x], x + row * params.width + column, sizeof(uint4));
  }
  __device__ void Set(int r, const Piece<T>& piece) { bits[r][threadIdx.x] = piece.bits; }
  __device__ Piece<T> operator[](int r) const { return {bits[r][threadIdx.x]}; }
};
template <>
struct Pieces<float> {
  uint4 bits[kPieceRows][2][kTileThreads];

  __device__ void LoadAsync(int r, const QuantizeParams& params, int64_t row, int64_t column) {
    const auto* const x = static_cast<const float*>(params.x) + row * params.width + column;
    for (int i : {0, 1}) __pipeline_memcpy_async(&bits[r][i][threadIdx.x], x + 4 * i, sizeof(uint4));
  }
  __device__ void Set(int r, const Piece<float>& piece) {
    for (int i : {0, 1}) memcpy(&bits[r][i][threadIdx.x], &piece.values[i], sizeof(uint4));
  }
  __device__ Piece<float> operator[](int r) const {
    Piece<float> piece;
    for (int i : {0, 1}) memcpy(&piece.values[i], &bits[r][i][threadIdx.x], sizeof(uint4));
    return piece;
  }
};
template <>
struct Pieces<Scaled> {
  uint2 bits[kPieceRows][kTileThreads];
  float scales[kTile];  // of rows; each is loaded by one of the threads that have the row

  __device__ void LoadAsync(int r, const QuantizeParams& params, int64_t row, int64_t column) {
    const auto* const x = static_cast<const uint8_t*>(params.x) + row * params.width + column;
    __pipeline_memcpy_async(&bits[r][threadIdx.x], x, sizeof(uint2));
    if (const TilePart part; part.piece == r) {
      const float* const scale = params.x_scales + row * (params.width / kTile) + column / kTile;
      __pipeline_memcpy_async(&scales[part.first_row() + r], scale, sizeof(float));
    }
  }
  __device__ void Set(int r, const Piece<Scaled>& piece) {
    bits[r][threadIdx.x] = piece.bits, scales[TilePart().first_row() + r] = piece.scale;
  }
  __device__ Piece<Scaled> operator[](int r) const {
    return {bits[r][threadIdx.x], scales[TilePart().first_row() + r]};
  }
};

// What a block shares. The vectors in each row of the transpose are permuted.
template <typename T>
struct SharedTile {
  union {
    Pieces<T> pieces;
    uint8_t transposed[kTile][kTile];
  };
  uint32_t maxima[kTileWarps][kTile / kPiece][kPiece];  // of columns, or of the warps
  float factors[kTile];                                 // of columns
};

// The results of a tile, at its first element.
struct TileResults {
  uint8_t* values;
  float* scales;
  uint8_t* transposed;
  float* transposed_scales;
};
struct TileStrides {
  int64_t values, scales, transposed;  // between rows; of `transposed` between columns
};

// Loads a thread's part of a tile. Rows past the count are zero. Called by whole warps.
template <typename T>
__device__ inline void LoadTile(Pieces<T>& pieces, const QuantizeParams& params, int64_t first_row, int count,
                                int64_t first_column) {
  const TilePart part;
#pragma unroll
  for (int r = 0; r < kPieceRows; ++r) {
    const int row = part.first_row() + r;
    if (row < count) {
      pieces.LoadAsync(r, params, first_row + row, first_column + part.first_column());
    } else {
      pieces.Set(r, {});
    }
  }
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncwarp();
}

// Stores the rows as they lie. `factor` gets the number of one of the thread's rows.
template <typename T, typename Factor>
__device__ inline void StoreRows(const Pieces<T>& pieces, int count, uint8_t* values, int64_t stride,
                                 Factor&& factor) {
  const TilePart part;
#pragma unroll
  for (int r = 0; r < kPieceRows; ++r) {
    const Piece<T> x = pieces[r];
    const float by = factor(r);
    const auto pair = [&](int i) { return ConvertPair(x[i], x[i + 1], by); };
    const uint2 converted = {pair(0) | pair(2) << 16, pair(4) | pair(6) << 16};
    if (const int row = part.first_row() + r; row < count) {
      *reinterpret_cast<uint2*>(values + row * stride + part.first_column()) = converted;
    }
  }
}

// Stores the transpose. `factor` gets the number of one of the thread's columns. Called by the whole block.
template <typename T, typename Factor>
__device__ inline void StoreTransposed(SharedTile<T>& shared, uint8_t* transposed, int64_t stride,
                                       Factor&& factor) {
  constexpr int kVector = sizeof(uint4), kVectors = kTile / kVector;
  const TilePart part;
  Piece<T> x[kPieceRows];
#pragma unroll
  for (int r = 0; r < kPieceRows; ++r) x[r] = shared.pieces[r];
  uint2 converted[kPiece];
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    const float by = factor(i);
    const auto pair = [&](int r) { return ConvertPair(x[r][i], x[r + 1][i], by); };
    converted[i] = {pair(0) | pair(2) << 16, pair(4) | pair(6) << 16};
  }
  __syncthreads();  // all pieces have been read
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    const int vector = part.warp ^ part.piece % kVectors;  // without conflicts of banks
    uint8_t* const column = shared.transposed[part.first_column() + i];
    *reinterpret_cast<uint2*>(column + vector * kVector + part.half * kPieceRows) = converted[i];
  }
  __syncthreads();
#pragma unroll
  for (int at = static_cast<int>(threadIdx.x); at < kTile * kVectors; at += kTileThreads) {
    const int column = at / kVectors, vector = at % kVectors;
    const int permuted = vector ^ column / kPiece % kVectors;
    *reinterpret_cast<uint4*>(transposed + column * stride + vector * kVector) =
        *reinterpret_cast<const uint4*>(&shared.transposed[column][permuted * kVector]);
  }
}

// The largest magnitudes that a thread finds in its part of a tile.
template <typename T>
struct Maxima {
  uint32_t of_row;                        // of the whole row whose number is that of the thread's piece
  uint32_t of_columns[Piece<T>::kWords];  // of the warp's rows

  // Called by whole warps, with kRows.
  template <bool kRows>
  __device__ static Maxima Of(const Pieces<T>& pieces) {
    using P = Piece<T>;
    const TilePart part;
    Maxima found{};
#pragma unroll
    for (int r = 0; r < kPieceRows; ++r) {
      const Piece<T> x = pieces[r];
      uint32_t row = 0;
#pragma unroll
      for (int word = 0; word < P::kWords; ++word) {
        const uint32_t magnitudes = x.Magnitudes(word);
        row = P::Max(row, magnitudes);
        found.of_columns[word] = P::Max(found.of_columns[word], magnitudes);
      }
      if constexpr (kRows) {
        for (int lane : {1, 2, 4, 16}) row = P::Max(row, __shfl_xor_sync(kAllLanes, row, lane));
        if (part.piece % kPieceRows == r) found.of_row = row;
      }
    }
    for (uint32_t& word : found.of_columns) {  // of both halves
      word = P::Max(word, __shfl_xor_sync(kAllLanes, word, 8));
    }
    return found;
  }

  __device__ uint32_t of_all() const {
    uint32_t largest = 0;
    for (uint32_t word : of_columns) largest = Piece<T>::Max(largest, word);
    return max(Piece<T>::Widened(largest, 0), Piece<T>::Widened(largest, 1));
  }
};

// Stores the rows as they lie, with a scale for each. Called by whole warps.
template <typename T>
__device__ inline void StoreScaledRows(const Pieces<T>& pieces, uint32_t largest, int count,
                                       const TileResults& to, const TileStrides& strides, bool rounds,
                                       float floor) {
  using P = Piece<T>;
  const TilePart part;
  const float scale = ScaleOf(max(P::Widened(largest, 0), P::Widened(largest, 1)), rounds, floor);
  const float factor = Reciprocal(scale);
  if (const int row = part.first_row() + part.piece; part.piece < kPieceRows && row < count) {
    to.scales[row * strides.scales] = scale;
  }
  StoreRows(pieces, count, to.values, strides.values,
            [&](int r) { return __shfl_sync(kAllLanes, factor, part.half * kPieceRows + r); });
}

// Stores the transpose, with a scale for each column. Called by the whole block.
template <typename T>
__device__ inline void StoreScaledColumns(SharedTile<T>& shared, const Maxima<T>& maxima,
                                          const TileResults& to, const TileStrides& strides, bool rounds,
                                          float floor) {
  using P = Piece<T>;
  const TilePart part;
#pragma unroll
  for (int word = 0; word < P::kWords; ++word) {
    if (part.half == 0) shared.maxima[part.warp][part.piece][word] = maxima.of_columns[word];
  }
  __syncthreads();
  if (const int column = static_cast<int>(threadIdx.x); column < kTile) {
    constexpr int kInWord = kPiece / P::kWords;
    uint32_t of_all = 0;
#pragma unroll
    for (int warp = 0; warp < kTileWarps; ++warp) {
      of_all = P::Max(of_all, shared.maxima[warp][column / kPiece][column % kPiece / kInWord]);
    }
    const float scale = ScaleOf(P::Widened(of_all, column % kInWord), rounds, floor);
    shared.factors[column] = Reciprocal(scale);
    to.transposed_scales[column] = scale;
  }
  __syncthreads();
  StoreTransposed(shared, to.transposed, strides.transposed,
                  [&](int i) { return shared.factors[part.first_column() + i]; });
}

}  // namespace jax_ep::cuda
