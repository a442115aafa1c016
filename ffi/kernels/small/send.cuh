// A token to its slots at the ranks where its experts live.
#pragma once

#include "kernels/rows/quantize.cuh"
#include "kernels/small/route.cuh"

namespace jax_ep::cuda {

// Calls store(slot) for token t's slot at each of the ranks, beginning behind this one, so that the ranks do
// not all write to the same one.
template <typename Store>
__device__ void ForEachSlot(const SmallPushArgs& args, const MailSession& session, int t, uint32_t ranks,
                            Store&& store) {
  const int R = args.shape.num_ranks, me = args.peers.rank;
  const ArenaHalf half = session.half();
#pragma unroll 1
  for (int i = 1; i <= R; ++i) {
    const int r = me + i < R ? me + i : me + i - R;
    if (ranks >> r & 1) store(half.slot(r, me, t));
  }
}

// The last warp of a block that sends tells of what was sent.
constexpr int kSendThreads = kSmallThreads - kWarp;
constexpr int kSendVectors = 2;  // 16-byte loads in flight a thread

// What travels of 16 bytes of a row of T: they themselves, if T is void, or else FP8 values, and the scale of
// their block.
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

// What a sending thread needs of a token, which is made before the op is open: of this lane's choice the
// expert, -1 unused; the weight of choice threadIdx.x; and the first parts of the row, where it has such.
template <typename T>
struct PrefetchedToken {
  int expert;
  float weight;
  WireVector<T> row[kSendVectors];
};

// Vectors of 16 bytes of a token's row as it is read; 0 if it has a part of one.
template <typename T>
__device__ int VectorsOf(const SmallPushArgs& args) {
  const int64_t bytes = args.payloads[0].row_bytes *
                        (std::is_void_v<T> ? 1 : sizeof(std::conditional_t<std::is_void_v<T>, char, T>));
  return args.num_payloads > 0 && bytes % 16 == 0 ? static_cast<int>(bytes / 16) : 0;
}

// Parts `first`, `first` + kSendThreads, ... of token t's row, which has n. Whole warps: lanes find the
// largest number of a block together.
template <typename T>
__device__ void LoadWireVectors(const SmallPushArgs& args, int t, int first, int n,
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
__device__ PrefetchedToken<T> PrefetchToken(const SmallPushArgs& args, int t) {
  PrefetchedToken<T> token{-1, 0.0f, {}};
  if (t >= args.shape.num_tokens) return token;
  const int lane = threadIdx.x % kWarp, K = args.shape.top_k;
  if (lane < K) token.expert = RoutedAt(args.topk_idx, args.shape, t, lane);
  if (args.topk_weights != nullptr && threadIdx.x < K) token.weight = args.topk_weights[t * K + threadIdx.x];
  const int n = VectorsOf<T>(args);
  if (n > 0) LoadWireVectors<T>(args, t, threadIdx.x, n, token.row);
  return token;
}

// A row of vectors, of which this thread has its first parts.
template <typename T>
__device__ void SendRow(const SmallPushArgs& args, const MailSession& session, int t, uint32_t ranks,
                        WireVector<T> (&vectors)[kSendVectors]) {
  const int n = VectorsOf<T>(args), padded_size = static_cast<int>(AlignUp(n, kWarp));
#pragma unroll 1
  for (int first = threadIdx.x; first < padded_size;) {
    ForEachSlot(args, session, t, ranks, [&](std::byte* slot) {
#pragma unroll
      for (int j = 0; j < kSendVectors; ++j) {
        const int i = first + j * kSendThreads;
        if (i >= n) break;
        using Bits = decltype(vectors[j].bits);
        reinterpret_cast<Bits*>(slot + args.offsets[0])[i] = vectors[j].bits;
        if constexpr (!std::is_void_v<T>) {
          constexpr int kLanes = WireVector<T>::kLanes;
          if (i % kLanes == 0) {
            reinterpret_cast<float*>(slot + args.offsets[1])[i / kLanes] = vectors[j].scale;
          }
        }
      }
    });
    first += kSendVectors * kSendThreads;
    if (first < padded_size) LoadWireVectors<T>(args, t, first, n, vectors);
  }
}

// Any row as it is.
__device__ inline void SendBytes(const SmallPushArgs& args, const MailSession& session, int t, uint32_t ranks,
                                 int payload) {
  const int64_t n = args.payloads[payload].row_bytes;
  const std::byte* const row = args.payloads[payload].in + t * n;
  if (n % 16 == 0) {
    for (int i = threadIdx.x; i < n / 16; i += kSendThreads) {
      const uint4 value = __ldg(reinterpret_cast<const uint4*>(row) + i);
      ForEachSlot(args, session, t, ranks, [&](std::byte* slot) {
        reinterpret_cast<uint4*>(slot + args.offsets[payload])[i] = value;
      });
    }
  } else {
    for (int i = threadIdx.x; i < n; i += kSendThreads) {
      const std::byte value = row[i];
      ForEachSlot(args, session, t, ranks, [&](std::byte* slot) { slot[args.offsets[payload] + i] = value; });
    }
  }
}

// Named barriers of a sending block, two of each kind by turns: a token's stores are issued; and the flags of
// the one before the last are.
constexpr int kStored = 1, kFlagged = 3;

__device__ inline void Arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kSmallThreads) : "memory");
}
__device__ inline void Wait(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kSmallThreads) : "memory");
}

// The ranks that a token is sent to, of those that take part, in all lanes; each has the expert of a choice.
__device__ inline uint32_t RanksOf(const Shape& shape, const MailSession& session, int expert) {
  const uint32_t rank = expert < 0 ? 0 : 1u << shape.rank_of(expert);
  return __reduce_or_sync(kAllLanes, rank) & session.writable();
}

// Sends every token of this block, of which the first was loaded early. The sending warps.
template <typename T>
__device__ void SendTokens(const SmallPushArgs& args, const MailSession& session, PrefetchedToken<T> token) {
  for (int t = blockIdx.x, step = 0; t < args.shape.num_tokens; t += args.num_senders, ++step) {
    const uint32_t ranks = RanksOf(args.shape, session, token.expert);
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
    token = PrefetchToken<T>(args, t + args.num_senders);
  }
}

// Tells the ranks of each token that it is there. The last warp: what it waits for, that a token's stores are
// done, does not hold up those of the next one.
__device__ inline void SendArrivalFlags(const SmallPushArgs& args, const MailSession& session) {
  const int lane = threadIdx.x % kWarp, K = args.shape.top_k, T = args.shape.num_tokens;
  for (int t = blockIdx.x, step = 0; t < T; t += args.num_senders, ++step) {
    const int expert = lane < K ? RoutedAt(args.topk_idx, args.shape, t, lane) : -1;
    const uint32_t ranks = RanksOf(args.shape, session, expert);
    Wait(kStored + step % 2);
    if (lane < args.shape.num_ranks && (ranks >> lane & 1) != 0) {
      StoreWordRelease(&session.half().mail(lane, args.peers.rank).arrived[t], 1, session.epoch());
    }
    __syncwarp();
    if (t + 2 * args.num_senders < T) Arrive(kFlagged + step % 2);
  }
}

}  // namespace jax_ep::cuda
