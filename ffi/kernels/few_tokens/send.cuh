// The sender's side of a dispatch of few tokens: stores each token in its slots at the ranks of its experts.
#pragma once

#include "kernels/few_tokens/ranks.cuh"
#include "kernels/few_tokens/route.cuh"
#include "kernels/fp8/block.cuh"

namespace jax_ep::cuda {

// Calls store(slot) for token t's slot at each of the ranks.
template <int kRankWords, typename Store>
__device__ void ForEachSlot(const PushArgs& args, const ArenaSession<kRankWords>& session, int t,
                            const RankWords<kRankWords>& ranks, Store&& store) {
  const ArenaHalf half = session.half();
  ForEachRank(args.peers, ranks, [&](int r) { store(half.slot(r, args.peers.rank, t)); });
}

// Threads of a sending block that send rows. The last warp sends the arrival flags.
constexpr int kSendThreads = kFewTokensThreads - kWarp;
constexpr int kSendVectors = 2;  // 16-byte loads in flight per thread

// The form in which 16 bytes of a row of T are sent: unchanged if T is void, otherwise as FP8 values with the
// scale of their block.
template <typename T>
struct WireVector {
  static constexpr int kLanes = Quantized<T>::kLanes;  // that hold a block
  typename Quantized<T>::Values bits;
  float scale;
};
template <>
struct WireVector<void> {
  uint4 bits;
};

// The data of a token that a sending thread loads before the op is open: the expert of this lane's choice, -1
// if unused; the weight of choice threadIdx.x; and the thread's first vectors of the row, if it has any.
template <typename T>
struct PrefetchedToken {
  int expert;
  float weight;
  WireVector<T> row[kSendVectors];
};

// Returns the number of 16-byte vectors of a token's row as it is loaded, or 0 if rows are not a multiple of
// that.
template <typename T>
__device__ int VectorsOf(const PushArgs& args) {
  const int64_t bytes = args.payloads[0].row_bytes *
                        (std::is_void_v<T> ? 1 : sizeof(std::conditional_t<std::is_void_v<T>, char, T>));
  return args.num_payloads > 0 && bytes % 16 == 0 ? static_cast<int>(bytes / 16) : 0;
}

// Loads vectors `first`, `first` + kSendThreads, ... of token t's row, which has n. Called by whole warps,
// whose lanes reduce the largest magnitude of a block together.
template <typename T>
__device__ void LoadWireVectors(const PushArgs& args, int t, int first, int n,
                                WireVector<T> (&vectors)[kSendVectors]) {
  const uint4* const row = reinterpret_cast<const uint4*>(args.payloads[0].in) + int64_t{t} * n;
  uint4 loaded[kSendVectors];
#pragma unroll
  for (int j = 0; j < kSendVectors; ++j) {
    const int i = first + j * kSendThreads;
    loaded[j] = i < n ? __ldg(row + i) : uint4{};
  }
#pragma unroll
  for (int j = 0; j < kSendVectors; ++j) {
    if constexpr (std::is_void_v<T>) {
      vectors[j].bits = loaded[j];
    } else {
      const auto quantized = QuantizeBlock<T>({loaded[j]}, args.quantize == Quantize::kFp8Rounded);
      vectors[j].bits = quantized.values[0];
      vectors[j].scale = quantized.scale;
    }
  }
}

template <typename T>
__device__ PrefetchedToken<T> PrefetchToken(const PushArgs& args, int t) {
  PrefetchedToken<T> token{-1, 0.0f, {}};
  if (t >= args.shape.num_tokens) return token;
  const int lane = threadIdx.x % kWarp, K = args.shape.top_k;
  if (lane < K) token.expert = RoutedAt(args.topk_idx, args.shape, t, lane);
  if (args.topk_weights != nullptr && threadIdx.x < K) token.weight = args.topk_weights[t * K + threadIdx.x];
  const int n = VectorsOf<T>(args);
  if (n > 0) LoadWireVectors<T>(args, t, threadIdx.x, n, token.row);
  return token;
}

// Sends a row of whole vectors, of which this thread has loaded its first ones.
template <typename T, int kRankWords>
__device__ void SendRow(const PushArgs& args, const ArenaSession<kRankWords>& session, int t,
                        const RankWords<kRankWords>& ranks, WireVector<T> (&vectors)[kSendVectors]) {
  const int n = VectorsOf<T>(args), padded_size = static_cast<int>(AlignUp(n, kWarp));
#pragma unroll 1
  for (int first = threadIdx.x; first < padded_size;) {
    ForEachSlot(args, session, t, ranks, [&](std::byte* slot) {
#pragma unroll
      for (int j = 0; j < kSendVectors; ++j) {
        const int i = first + j * kSendThreads;
        if (i >= n) break;
        using Bits = decltype(vectors[j].bits);
        reinterpret_cast<Bits*>(slot + args.slot_offsets[0])[i] = vectors[j].bits;
        if constexpr (!std::is_void_v<T>) {
          constexpr int kLanes = WireVector<T>::kLanes;
          // The scales are the second payload.
          if (i % kLanes == 0) {
            reinterpret_cast<float*>(slot + args.slot_offsets[1])[i / kLanes] = vectors[j].scale;
          }
        }
      }
    });
    first += kSendVectors * kSendThreads;
    if (first < padded_size) LoadWireVectors<T>(args, t, first, n, vectors);
  }
}

// Sends a row of any size unchanged.
template <int kRankWords>
__device__ void SendBytes(const PushArgs& args, const ArenaSession<kRankWords>& session, int t,
                          const RankWords<kRankWords>& ranks, int payload) {
  const int64_t n = args.payloads[payload].row_bytes;
  const std::byte* const row = args.payloads[payload].in + t * n;
  if (n % 16 == 0) {
    for (int i = threadIdx.x; i < n / 16; i += kSendThreads) {
      const uint4 value = __ldg(reinterpret_cast<const uint4*>(row) + i);
      ForEachSlot(args, session, t, ranks, [&](std::byte* slot) {
        reinterpret_cast<uint4*>(slot + args.slot_offsets[payload])[i] = value;
      });
    }
  } else {
    for (int i = threadIdx.x; i < n; i += kSendThreads) {
      const std::byte value = row[i];
      ForEachSlot(args, session, t, ranks,
                  [&](std::byte* slot) { slot[args.slot_offsets[payload] + i] = value; });
    }
  }
}

// Named barriers of a sending block. Two of each kind alternate between tokens. kStored: the stores of a
// token have been issued. kFlagged: the flags of the token two steps before have been sent.
constexpr int kStored = 1, kFlagged = 3;

__device__ inline void Arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kFewTokensThreads) : "memory");
}
__device__ inline void Wait(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kFewTokensThreads) : "memory");
}

// Returns the ranks that a token is sent to, among those that take part, in all lanes. Each lane has the
// expert of one choice.
template <int kRankWords>
__device__ RankWords<kRankWords> RanksOf(const Shape& shape, const ArenaSession<kRankWords>& session,
                                         int expert) {
  using Ranks = RankWords<kRankWords>;
  const int rank = expert < 0 ? 0 : shape.rank_of(expert);
  Ranks ranks;
#pragma unroll
  for (int w = 0; w < kRankWords; ++w) {
    ranks.words[w] = __reduce_or_sync(kAllLanes, expert < 0 ? 0 : Ranks::BitIn(w, rank));
  }
  return ranks.And(session.writable());
}

// Sends all tokens of this block. The first one was loaded earlier. Called by the sending warps.
template <typename T, int kRankWords>
__device__ void SendTokens(const PushArgs& args, const ArenaSession<kRankWords>& session,
                           PrefetchedToken<T> token) {
  for (int t = blockIdx.x, step = 0; t < args.shape.num_tokens; t += args.few_tokens.num_senders, ++step) {
    const auto ranks = RanksOf(args.shape, session, token.expert);
    if (step >= 2) Wait(kFlagged + step % 2);
    const bool in_vectors = VectorsOf<T>(args) > 0;
    if (in_vectors) SendRow<T>(args, session, t, ranks, token.row);
    if constexpr (std::is_void_v<T>) {
      for (int p = in_vectors ? 1 : 0; p < args.num_payloads; ++p) SendBytes(args, session, t, ranks, p);
    }
    if (args.topk_weights != nullptr && threadIdx.x < args.shape.top_k) {
      ForEachSlot(args, session, t, ranks,
                  [&](std::byte* slot) { reinterpret_cast<float*>(slot)[threadIdx.x] = token.weight; });
    }
    Arrive(kStored + step % 2);
    token = PrefetchToken<T>(args, t + args.few_tokens.num_senders);
  }
}

// Sends the arrival flags of each token to its ranks. The last warp does this, because it has to wait until a
// token's stores are complete, and must not delay those of the next token.
template <int kRankWords>
__device__ void SendArrivalFlags(const PushArgs& args, const ArenaSession<kRankWords>& session) {
  const int lane = threadIdx.x % kWarp, K = args.shape.top_k, T = args.shape.num_tokens;
  for (int t = blockIdx.x, step = 0; t < T; t += args.few_tokens.num_senders, ++step) {
    const int expert = lane < K ? RoutedAt(args.topk_idx, args.shape, t, lane) : -1;
    const auto ranks = RanksOf(args.shape, session, expert);
    Wait(kStored + step % 2);
#pragma unroll
    for (int w = 0; w < kRankWords; ++w) {
      if ((ranks.words[w] >> lane & 1) == 0) continue;
      ArenaMailbox& there = session.half().mailbox(w * kRankBits + lane, args.peers.rank);
      StoreWordRelease(&there.arrived[t], 1, session.epoch());
    }
    __syncwarp();
    if (t + 2 * args.few_tokens.num_senders < T) Arrive(kFlagged + step % 2);
  }
}

}  // namespace jax_ep::cuda
