// The receiver's side of a combine of few tokens: adds up the sums that arrive of each token.
#pragma once

#include "kernels/few_tokens/sums.cuh"
#include "kernels/routing/destination.cuh"

namespace jax_ep::cuda {

// The source of a sum of a token. Lane r holds whether rank r sends one, provided that it takes part, and the
// index of the slot at this rank.
struct Sender {
  bool sends;
  int index;

  __device__ Sender Among(uint32_t ranks, int lane) const {
    return {sends && (ranks >> lane & 1) != 0, index};
  }
};

__device__ inline Sender FindSender(const FewTokensPullArgs& args, int t, int lane) {
  const Shape& shape = args.shape;
  const Destination destination = FindDestination(shape, args.handle, t, lane);
  if (shape.has_row_per_choice()) {
    const unsigned ranks = __reduce_or_sync(kAllLanes, destination.row < 0 ? 0 : 1u << destination.rank);
    return {(ranks >> lane & 1) != 0, t};
  }
  int index = destination.row;
  if (index >= 0 && args.peers.rank > 0) {
    index -= args.handle.rank_prefix_matrix[(args.peers.rank - 1) * shape.num_ranks + lane];
  }
  return {destination.row >= 0 && index >= 0 && index < shape.num_tokens, index};
}

// Waits for the sums of a token. Called by one warp. Returns bit r if rank r was missed.
__device__ inline uint32_t AwaitSums(const FewTokensPullArgs& args, const ArenaSession& session,
                                     const Sender& sender, int lane) {
  if (!sender.sends) return 0;
  const EpochWord* const arrived = &session.half().mailbox(args.peers.rank, lane).arrived[sender.index];
  return session.AwaitWord(arrived) ? 0 : 1u << lane;
}

// A slice of a token's result. Slices are dealt to the blocks round-robin; `i` counts those of one block.
struct OutputSlice {
  int t;
  int first;  // column
  Sender sender;
};

template <int N>
__device__ OutputSlice FindOutputSlice(const FewTokensPullArgs& args, int i, int lane) {
  const int width = static_cast<int>(args.summand.num_elements),
            slices = max((width + kSlice<N> - 1) / kSlice<N>, 1);
  const int index = static_cast<int>(blockIdx.x) + i * static_cast<int>(gridDim.x), t = index / slices;
  if (t >= args.shape.num_tokens) return {t, 0, {false, 0}};
  return {t, index % slices * kSlice<N>, FindSender(args, t, lane)};
}

// Adds up a chunk of the sums that arrive of a token, in the order of the ranks. Called by one warp. Returns
// bit r if rank r was missed.
template <typename T, int N, bool kFp8>
__device__ uint32_t AddArrivedChunks(const FewTokensPullArgs& args, const ArenaSession& session,
                                     const Sender& sender, int chunk, float (&total)[kSumVectors][N]) {
  using Chunk = SumChunk<T, N, kFp8>;
  constexpr int kInFlight = 4;  // chunks
  constexpr int kLooks = 4;     // before it waits as for a peer that is late
  const auto at = [&](int rank) {
    const int index = __shfl_sync(kAllLanes, sender.index, rank);
    return session.half().chunk(args.peers.rank, rank, index, chunk);
  };
  for (unsigned remaining = __ballot_sync(kAllLanes, sender.sends); remaining != 0;) {
    LoadedLines<Chunk::kLines> lines[kInFlight];
    unsigned rest;  // of the ranks after those in flight
#pragma unroll 1
    for (int looks = 0;; ++looks) {
      // No lines are kept while it waits, because a call would have to save them.
      if (looks == kLooks) {
        rest = remaining;
#pragma unroll 1
        for (int i = 0; i < kInFlight && rest != 0; ++i, rest &= rest - 1) {
          const int rank = __ffs(rest) - 1;
          if (!__all_sync(kAllLanes, AwaitLines<Chunk::kLines>(session, at(rank)))) return 1u << rank;
        }
      }
      rest = remaining;
      bool all_there = true;
#pragma unroll
      for (int i = 0; i < kInFlight; ++i, rest &= rest - 1) {
        if (rest != 0) lines[i] = LoadedLines<Chunk::kLines>::Load(at(__ffs(rest) - 1));
      }
      rest = remaining;
#pragma unroll
      for (int i = 0; i < kInFlight; ++i, rest &= rest - 1) {
        all_there &= rest == 0 || lines[i].HaveEpoch(session.epoch());
      }
      if (__all_sync(kAllLanes, all_there)) break;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i, remaining &= remaining - 1) {
      if (remaining == 0) break;
      Chunk::Add(lines[i].words(), total);
    }
  }
  return 0;
}

// Adds up a slice of the sums that have arrived in slots, in the order of the ranks. Called by one warp.
template <typename T, int N, bool kFp8>
__device__ void AddArrivedSlots(const FewTokensPullArgs& args, const ArenaSession& session,
                                const Sender& sender, int first, int lane, float (&total)[kSumVectors][N]) {
  const int width = static_cast<int>(args.summand.num_elements);
  const unsigned ranks = __ballot_sync(kAllLanes, sender.sends);
  std::byte* const slot = sender.sends ? session.half().slot(args.peers.rank, lane, sender.index) : nullptr;
  if constexpr (kFp8) {
    AddSliceOfParts<kSumRows>(SlotPart(slot, width), ranks, first, width, lane, total);
  } else {
    const float factor = sender.sends ? __ldcg(&SlotFactor(slot)) : 1.0f;
    SumSlice<T, N>({SlotRow<T>(slot), factor, ranks}, first, width, lane, total);
  }
}

// Adds up the sums that arrive: first for `slice`, then for slices that the warp takes tickets for. Returns
// the ranks that this thread has missed.
template <typename T, int N, bool kLines, bool kFp8>
__device__ uint32_t AddArrivedSums(const FewTokensPullArgs& args, const ArenaSession& session,
                                   const TicketCounter& tickets, OutputSlice slice) {
  const int lane = threadIdx.x % kWarp, width = static_cast<int>(args.summand.num_elements);
#pragma unroll 1
  for (; slice.t < args.shape.num_tokens;
       slice = FindOutputSlice<N>(args, TicketCounter::Broadcast(tickets.Request(lane)), lane)) {
    const Sender sender = slice.sender.Among(session.ranks(), lane);
    float total[kSumVectors][N] = {};
    if constexpr (kLines) {
      const uint32_t missing =
          AddArrivedChunks<T, N, kFp8>(args, session, sender, slice.first / kSlice<N>, total);
      if (missing != 0) return missing;
    } else {
      const uint32_t missing = AwaitSums(args, session, sender, lane);
      if (__any_sync(kAllLanes, missing != 0)) return missing;
      __syncwarp();  // makes what each lane has acquired visible to all
      AddArrivedSlots<T, N, kFp8>(args, session, sender, slice.first, lane, total);
    }
    AddBiases<T, N>(args.biases, args.num_biases, slice.t, slice.first, width, lane, total);
    StoreSlice<T, N>(static_cast<T*>(args.summand.out) + int64_t{slice.t} * width, slice.first, width, lane,
                     total);
  }
  return 0;
}

// Waits for all sums from `ranks`. Called by the whole block. Returns bit r if rank r was missed.
JAX_EP_RARE uint32_t AwaitAllSums(const FewTokensPullArgs& args, const ArenaSession session, uint32_t ranks) {
  const int lane = threadIdx.x % kWarp;
  uint32_t missing = 0;
  for (int t = threadIdx.x / kWarp; t < args.shape.num_tokens; t += kFewTokensWarps) {
    missing |= AwaitSums(args, session, FindSender(args, t, lane).Among(ranks, lane), lane);
    __syncwarp();
  }
  return missing;
}

}  // namespace jax_ep::cuda
