// A token to its slots at the ranks where its experts live.
#pragma once

#include "kernels/slots/quantize.cuh"
#include "kernels/slots/route.cuh"

namespace jax_ep::cuda {

// By value in the kernel's parameters.
struct SlotPushArgs : SlotArgs {
  TopkIds topk_idx;
  Payload payloads[kMaxPayloads];
  int32_t offsets[kMaxPayloads];  // of each payload's row in a slot
  int32_t num_payloads;
  Quantize quantize;
  const float* topk_weights;
  float* arrived_weights;
  int32_t* arrived_idx;
  int32_t* tokens_per_expert;
  int32_t* group_sizes;
  int32_t* num_tokens;
  int32_t* num_dropped;
};

// The ranks, of those that take part, that token t goes to, in all lanes. One warp.
__device__ inline uint32_t DestinationsOf(const SlotPushArgs& args, const Visit& visit, int t) {
  const int lane = threadIdx.x % kWarp, K = args.shape.top_k;
  const int expert = lane < K ? MyExpert(args.shape, args.topk_idx, visit.ranks, t * K + lane) : -1;
  return __reduce_or_sync(kAllLanes, expert < 0 ? 0 : 1u << args.shape.rank_of(expert));
}

// Calls store(slot) for token t's slot at each of the ranks, beginning behind this one, so that the ranks do
// not all write to the same one.
template <typename Store>
__device__ void ForSlots(const SlotArgs& args, const Visit& visit, int t, uint32_t ranks, Store&& store) {
  const int R = args.shape.num_ranks, me = args.peers.rank;
  for (int i = 1; i <= R; ++i) {
    const int r = me + i < R ? me + i : me + i - R;
    if (ranks >> r & 1) store(args.slot(r, me, t, visit.epoch));
  }
}

// A row as it is: vectors of 16 bytes, or bytes where it is no multiple of that.
template <typename Element>
__device__ void SendAs(const SlotPushArgs& args, const Visit& visit, int t, uint32_t ranks, int payload) {
  constexpr int kInFlight = 2;
  const int n = static_cast<int>(args.payloads[payload].row_bytes / sizeof(Element));
  const Element* const row =
      reinterpret_cast<const Element*>(args.payloads[payload].in + t * args.payloads[payload].row_bytes);
  for (int first = threadIdx.x; first < n; first += kInFlight * kSlotThreads) {
    Element values[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first + j * kSlotThreads < n) values[j] = __ldg(row + first + j * kSlotThreads);
    }
    ForSlots(args, visit, t, ranks, [&](std::byte* slot) {
      Element* const to = reinterpret_cast<Element*>(slot + args.offsets[payload]);
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (first + j * kSlotThreads < n) to[first + j * kSlotThreads] = values[j];
      }
    });
  }
}

template <typename T>
__device__ void SendQuantized(const SlotPushArgs& args, const Visit& visit, int t, uint32_t ranks) {
  using Q = Quantized<T>;
  const int width = static_cast<int>(args.payloads[0].row_bytes), vectors = width / Q::kElements;
  const T* const row = reinterpret_cast<const T*>(args.payloads[0].in) + int64_t{t} * width;
  // Whole warps go round: they find the largest of a block together.
  for (int i = threadIdx.x; i < AlignUp(vectors, kWarp); i += kSlotThreads) {
    const bool wanted = i < vectors;
    const auto vector = Vector<T, Q::kElements>::Load(row + int64_t{i} * Q::kElements, wanted);
    const Q q = QuantizeVector<T>(vector, args.quantize == Quantize::kFp8Rounded);
    if (!wanted) continue;
    using Bits = std::conditional_t<Q::kElements == 8, uint2, uint32_t>;
    Bits bits;
    memcpy(&bits, q.values, sizeof(bits));
    ForSlots(args, visit, t, ranks, [&](std::byte* slot) {
      reinterpret_cast<Bits*>(slot + args.offsets[0])[i] = bits;
      if (i % Q::kLanes == 0) reinterpret_cast<float*>(slot + args.offsets[1])[i / Q::kLanes] = q.scale;
    });
  }
}

// Sends token t, and tells its ranks that it is there. The whole block.
template <typename T>
__device__ void SendToken(const SlotPushArgs& args, const Visit& visit, int t) {
  const uint32_t ranks = DestinationsOf(args, visit, t);
  if (ranks == 0) return;
  if constexpr (!std::is_void_v<T>) {
    SendQuantized<T>(args, visit, t, ranks);
  } else {
    for (int p = 0; p < args.num_payloads; ++p) {
      if (args.payloads[p].row_bytes % 16 == 0) {
        SendAs<uint4>(args, visit, t, ranks, p);
      } else {
        SendAs<char>(args, visit, t, ranks, p);
      }
    }
  }
  if (args.topk_weights != nullptr && threadIdx.x < args.shape.top_k) {
    const float weight = args.topk_weights[t * args.shape.top_k + threadIdx.x];
    ForSlots(args, visit, t, ranks,
             [&](std::byte* slot) { reinterpret_cast<float*>(slot)[threadIdx.x] = weight; });
  }
  __syncthreads();
  const int r = threadIdx.x;
  if (r >= args.shape.num_ranks || (ranks >> r & 1) == 0) return;
  StoreStampedRelease(&args.mail(r, args.peers.rank, visit.epoch).arrived[t], 1, visit.epoch);
}

}  // namespace jax_ep::cuda
