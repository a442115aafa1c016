// Rows that travel as lines of 16 bytes, in chunks of a warp.
//
// Each line has 12 bytes of data and the op's epoch, and is stored and loaded at once. So a receiver that
// finds the epoch has the data, and no sender waits for its stores before it can tell that a row is there.
// NCCL's protocol LL does the same with lines of 8 bytes.
#pragma once

#include "kernels/protocol/arena_session.cuh"

namespace jax_ep::cuda {

constexpr int kChunkVectors = 2;  // 16-byte vectors of a lane
constexpr int kChunkLines = 3;    // that they take, with the word beside them
static_assert(kWarp * kChunkVectors * 16 == kChunkRowBytes && kWarp * kChunkLines * 16 == kChunkLineBytes);

// A lane's words of a chunk: three for each of its lines.
template <int kLines>
struct ChunkWords {
  uint32_t words[3 * kLines];
};

// Stores a chunk. Called by a warp.
template <int kLines>
__device__ void StoreWords(uint4* chunk, const ChunkWords<kLines>& part, uint32_t epoch) {
  uint4* const lines = chunk + threadIdx.x % kWarp;
  const uint32_t (&words)[3 * kLines] = part.words;
#pragma unroll
  for (int i = 0; i < kLines; ++i) {
    StoreLine(lines + i * kWarp, {words[3 * i], words[3 * i + 1], words[3 * i + 2], epoch});
  }
}

// A lane's part of a chunk of a row. Vector v of lane l is vector v * kWarp + l of the chunk.
struct ChunkPart {
  uint4 row[kChunkVectors];
  uint32_t beside;  // a weight, a factor or a scale
};

__device__ inline void StoreChunk(uint4* chunk, const ChunkPart& part, uint32_t epoch) {
  const uint4 &a = part.row[0], &b = part.row[1];
  StoreWords<kChunkLines>(chunk, {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, part.beside}}, epoch);
}

// A lane's lines of a chunk, as they were loaded.
template <int kLines>
struct LoadedLines {
  uint4 lines[kLines];

  // Loads the lines. Nothing waits for them before they are used.
  __device__ static LoadedLines Load(const uint4* chunk) {
    LoadedLines loaded;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      loaded.lines[i] = LoadLine(chunk + i * kWarp + static_cast<int>(threadIdx.x) % kWarp);
    }
    return loaded;
  }
  __device__ bool HaveEpoch(uint32_t epoch) const {
    bool have = true;
#pragma unroll
    for (int i = 0; i < kLines; ++i) have &= lines[i].w == epoch;
    return have;
  }
  __device__ ChunkWords<kLines> words() const {
    ChunkWords<kLines> words;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      words.words[3 * i] = lines[i].x;
      words.words[3 * i + 1] = lines[i].y;
      words.words[3 * i + 2] = lines[i].z;
    }
    return words;
  }
};

// A lane's lines of a chunk of a row.
using ChunkLines = LoadedLines<kChunkLines>;

__device__ inline ChunkPart PartOf(const ChunkLines& lines) {
  const ChunkWords<kChunkLines> all = lines.words();
  const auto& words = all.words;
  return {{{words[0], words[1], words[2], words[3]}, {words[4], words[5], words[6], words[7]}}, words[8]};
}

// Waits for this lane's lines of a chunk. Returns false if it misses them.
template <int kLines, int kRankWords>
JAX_EP_RARE bool AwaitLines(const ArenaSession<kRankWords> session, const uint4* chunk) {
  const uint32_t now = session.epoch();
  return session.AwaitArrival([&] { return LoadedLines<kLines>::Load(chunk).HaveEpoch(now); });
}

// Waits for a chunk that was loaded, perhaps before it came. Called by a warp. Returns false, to all lanes,
// if a part of it is missed.
template <int kRankWords>
__device__ bool AwaitChunk(const ArenaSession<kRankWords>& session, const uint4* chunk, ChunkLines& loaded) {
  constexpr int kLooks = 4;  // before it waits as for a peer that is late
#pragma unroll 1
  for (int looks = 0; !__all_sync(kAllLanes, loaded.HaveEpoch(session.epoch())); ++looks) {
    if (looks >= kLooks && !__all_sync(kAllLanes, AwaitLines<kChunkLines>(session, chunk))) return false;
    loaded = ChunkLines::Load(chunk);
  }
  return true;
}

}  // namespace jax_ep::cuda
