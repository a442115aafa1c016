// The receiver's side of a combine of few tokens: adds up the sums that arrive of each token.
#pragma once

#include "kernels/few_tokens/ranks.cuh"
#include "kernels/few_tokens/sums.cuh"

namespace jax_ep::cuda {

// Waits for the sums of a token. Called by one warp. Returns true if this lane's rank was missed.
template <int kRankWords>
__device__ bool AwaitSums(const FewTokensPullArgs& args, const ArenaSession<kRankWords>& session,
                          const Sender& sender) {
  if (!sender.sends) return false;
  const ArenaMailbox& mailbox = session.half().mailbox(args.peers.rank, sender.rank);
  return !session.AwaitWord(&mailbox.arrived[sender.index]) && session.Miss(sender.rank);
}

// A slice of a token's result. Slices are dealt to the blocks round-robin; `i` counts those of one block.
struct OutputSlice {
  int t;
  int first;  // column
  Sender sender;
};

template <int N, int kRankWords>
__device__ OutputSlice FindOutputSlice(const FewTokensPullArgs& args, int i, int lane) {
  const int width = static_cast<int>(args.summand.num_elements),
            slices = max((width + kSlice<N> - 1) / kSlice<N>, 1);
  const int index = static_cast<int>(blockIdx.x) + i * static_cast<int>(gridDim.x), t = index / slices;
  if (t >= args.shape.num_tokens) return {t, 0, {false, 0, 0}};
  return {t, index % slices * kSlice<N>,
          FindSender<kRankWords>(args.shape, args.handle, args.peers, t, lane)};
}

// Adds up a chunk of the sums that arrive of a token, in the order of the ranks. Called by one warp, whose
// lanes stand for one rank each. Returns true if a rank was missed.
template <typename T, int N, bool kFp8>
__device__ bool AddArrivedChunks(const FewTokensPullArgs& args, const ArenaSession<1>& session,
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
          if (!__all_sync(kAllLanes, AwaitLines<Chunk::kLines>(session, at(rank)))) return session.Miss(rank);
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
  return false;
}

// Adds up a slice of the sums that have arrived in slots, in the order of the ranks. Called by one warp.
template <typename T, int N, bool kFp8, int kRankWords>
__device__ void AddArrivedSlots(const FewTokensPullArgs& args, const ArenaSession<kRankWords>& session,
                                const Sender& sender, int first, int lane, float (&total)[kSumVectors][N]) {
  const int width = static_cast<int>(args.summand.num_elements);
  const unsigned ranks = __ballot_sync(kAllLanes, sender.sends);
  std::byte* const slot =
      sender.sends ? session.half().slot(args.peers.rank, sender.rank, sender.index) : nullptr;
  if constexpr (kFp8) {
    AddSliceOfParts<kSumRows>(SlotPart(slot, width), ranks, first, width, lane, total);
  } else {
    const float factor = sender.sends ? __ldcg(&SlotFactor(slot)) : 1.0f;
    SumSlice<T, N>({SlotRow<T>(slot), factor, ranks}, first, width, lane, total);
  }
}

// Adds up the sums that arrive: first for `slice`, then for slices that the warp takes tickets for. Returns
// true if this thread has missed a rank.
template <typename T, int N, bool kLines, bool kFp8, int kRankWords>
__device__ bool AddArrivedSums(const FewTokensPullArgs& args, const ArenaSession<kRankWords>& session,
                               const TicketCounter& tickets, OutputSlice slice) {
  const int lane = threadIdx.x % kWarp, width = static_cast<int>(args.summand.num_elements);
#pragma unroll 1
  for (; slice.t < args.shape.num_tokens;
       slice = FindOutputSlice<N, kRankWords>(args, TicketCounter::Broadcast(tickets.Request(lane)), lane)) {
    Sender sender = slice.sender;
    sender.sends &= session.ranks().Has(sender.rank);
    float total[kSumVectors][N] = {};
    if constexpr (kLines) {
      if (AddArrivedChunks<T, N, kFp8>(args, session, sender, slice.first / kSlice<N>, total)) return true;
    } else {
      if (__any_sync(kAllLanes, AwaitSums(args, session, sender))) return true;
      __syncwarp();  // makes what each lane has acquired visible to all
      AddArrivedSlots<T, N, kFp8>(args, session, sender, slice.first, lane, total);
    }
    AddBiases<T, N>(args.biases, args.num_biases, slice.t, slice.first, width, lane, total);
    StoreSlice<T, N>(static_cast<T*>(args.summand.out) + int64_t{slice.t} * width, slice.first, width, lane,
                     total);
  }
  return false;
}

// Waits for all sums from `ranks`. Called by the whole block.
template <int kRankWords>
JAX_EP_RARE void AwaitAllSums(const FewTokensPullArgs& args, const ArenaSession<kRankWords> session,
                              const RankWords<kRankWords> ranks) {
  const int lane = threadIdx.x % kWarp;
  for (int t = threadIdx.x / kWarp; t < args.shape.num_tokens; t += kFewTokensWarps) {
    Sender sender = FindSender<kRankWords>(args.shape, args.handle, args.peers, t, lane);
    sender.sends &= ranks.Has(sender.rank);
    (void)AwaitSums(args, session, sender);
    __syncwarp();
  }
}

}  // namespace jax_ep::cuda
