// A dispatch of few tokens whose rows travel as lines: what a warp sends of a token, and where it arrives.
#pragma once

#include "kernels/few_tokens/chunk.cuh"
#include "kernels/few_tokens/send.cuh"

namespace jax_ep::cuda {

// Weights of a token that its first chunk can carry beside FP8 values. The scales need the other words.
constexpr int kWeightsBesideFp8 = 24;

// The words beside the vectors of a chunk of type T: FP8 values with scales, or void. An FP8 chunk has the
// scales of eight blocks. Of eight neighboring lanes, which hold one block in each vector, lane v has the
// scale of vector v, and the others have weights.
template <typename T>
struct Beside {
  static constexpr int kGroup = std::is_void_v<T> ? 1 : kFp8Block / 16;  // lanes
  static constexpr int kScales = std::is_void_v<T> ? 0 : kChunkVectors;  // of a group
  static constexpr int kWeights = kGroup - kScales;                      // of a group
  // Returns the choice whose weight a lane has, negative if it has a scale.
  __device__ static int ChoiceOf(int lane) {
    return lane % kGroup < kScales ? -1 : lane / kGroup * kWeights + lane % kGroup - kScales;
  }
  // Returns the lane that has the weight of a choice.
  __device__ static int LaneOf(int choice) {
    return (choice / kWeights * kGroup + kScales + choice % kWeights) % kWarp;
  }
};

// A chunk of a token, as one lane loads it before it is sent.
struct TokenChunk {
  int expert;  // of this lane's choice, -1 if unused
  ChunkPart part;
};

// Loads this lane's part of a chunk of token t, of T or to be sent unchanged if T is void. Called by a warp.
template <typename T>
__device__ TokenChunk LoadTokenChunk(const PushArgs& args, int t, int chunk) {
  const int lane = threadIdx.x % kWarp, K = args.shape.top_k;
  TokenChunk token{-1, {}};
  if (lane < K) token.expert = RoutedAt(args.topk_idx, args.shape, t, lane);
  const int n = static_cast<int>(args.payloads[0].row_bytes / 16);
  float scales[kChunkVectors] = {};
  if constexpr (std::is_void_v<T>) {
    const uint4* const row = reinterpret_cast<const uint4*>(args.payloads[0].in) + int64_t{t} * n;
#pragma unroll
    for (int v = 0; v < kChunkVectors; ++v) {
      const int i = (chunk * kChunkVectors + v) * kWarp + lane;
      token.part.row[v] = i < n ? __ldg(row + i) : uint4{};
    }
  } else {
    constexpr int kPieces = sizeof(T);  // 16-byte vectors of T that become one of FP8
    const uint4* const row = reinterpret_cast<const uint4*>(args.payloads[0].in) + int64_t{t} * n * kPieces;
    uint4 loaded[kChunkVectors][kPieces];
#pragma unroll
    for (int v = 0; v < kChunkVectors; ++v) {
      const int i = (chunk * kChunkVectors + v) * kWarp + lane;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) loaded[v][j] = i < n ? __ldg(row + i * kPieces + j) : uint4{};
    }
#pragma unroll
    for (int v = 0; v < kChunkVectors; ++v) {
      const auto quantized = QuantizeBlock<T>(loaded[v], args.quantize == Quantize::kFp8Rounded);
      memcpy(&token.part.row[v], quantized.values, sizeof(uint4));
      scales[v] = quantized.scale;
    }
  }
  float beside = 0.0f;
  const int choice = Beside<T>::ChoiceOf(lane);
  if (choice < 0) {
    beside = scales[lane % Beside<T>::kGroup % kChunkVectors];
  } else if (chunk == 0 && args.topk_weights != nullptr && choice < K) {
    beside = args.topk_weights[t * K + choice];
  }
  token.part.beside = __float_as_uint(beside);
  return token;
}

// Loads the i-th chunk of all tokens, if there is one.
template <typename T>
__device__ TokenChunk PrefetchTokenChunk(const PushArgs& args, int i) {
  const int chunks = args.few_tokens.chunks, t = i / chunks;
  return t < args.shape.num_tokens ? LoadTokenChunk<T>(args, t, i - t * chunks) : TokenChunk{};
}

// Sends all chunks of this block. The first ones were loaded earlier. Called by the whole block.
template <typename T, int kRankWords>
__device__ void SendChunks(const PushArgs& args, const ArenaSession<kRankWords>& session, TokenChunk token) {
  const WarpShare warps = WarpsOf(0, args.few_tokens.num_senders);
  const int chunks = args.few_tokens.chunks, me = args.peers.rank;
  const ArenaHalf half = session.half();
#pragma unroll 1
  for (int i = warps.index; i < args.shape.num_tokens * chunks; i += warps.count) {
    const int t = i / chunks;
    ForEachRank(args.peers, RanksOf(args.shape, session, token.expert), [&](int r) {
      StoreChunk(half.chunk(r, me, t, i - t * chunks), token.part, session.epoch());
    });
    token = PrefetchTokenChunk<T>(args, i + warps.count);
  }
}

// Stores a chunk that arrived in the `row` of each lane in `rows`.
template <typename T>
__device__ void StoreArrivedChunk(const PushArgs& args, const ChunkPart& part, int chunk, int row,
                                  unsigned rows) {
  const int lane = threadIdx.x % kWarp, n = static_cast<int>(args.payloads[0].row_bytes / 16);
  uint4* const out = reinterpret_cast<uint4*>(args.payloads[0].out);
#pragma unroll 1
  for (; rows != 0; rows &= rows - 1) {
    const int64_t to = __shfl_sync(kAllLanes, row, __ffs(rows) - 1);
#pragma unroll
    for (int v = 0; v < kChunkVectors; ++v) {
      const int i = (chunk * kChunkVectors + v) * kWarp + lane;
      if (i < n) out[to * n + i] = part.row[v];
    }
    if constexpr (!std::is_void_v<T>) {
      constexpr int kGroup = Beside<T>::kGroup;
      const int blocks = n * 16 / kFp8Block, v = lane % kGroup;
      const int block = (chunk * kChunkVectors + v) * (kWarp / kGroup) + lane / kGroup;
      if (v < kChunkVectors && block < blocks) {
        reinterpret_cast<float*>(args.payloads[1].out)[to * blocks + block] = __uint_as_float(part.beside);
      }
    }
  }
}

}  // namespace jax_ep::cuda
