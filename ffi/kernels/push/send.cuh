// The sender's side of a push: stores the rows of each token at their destinations.
#pragma once

#include "kernels/ptx/bulk.cuh"
#include "kernels/push/receiver.cuh"
#include "kernels/push/send_fp8.cuh"
#include "kernels/routing/destination.cuh"
#include "kernels/rows/copy.cuh"

namespace jax_ep::cuda {

// Returns the destinations of a token, given the lanes' entries of its handle. If the push spreads, only the
// first row at each rank gets the payload.
__device__ inline Destinations FindDestinations(const PushArgs& args, const HandleEntry& entry, int lane,
                                                int first = 0) {
  const Destination destination = FindDestination(args.shape, entry, lane, first);
  bool sends_payload = destination.row >= 0;
  if (args.spreads) {
    const unsigned same_rank = __match_any_sync(kAllLanes, sends_payload ? destination.rank : -1);
    sends_payload = sends_payload && __ffs(same_rank) - 1 == lane;
  }
  return {destination.row, destination.rank, __ballot_sync(kAllLanes, sends_payload)};
}

// Returns the destinations, by rank, rotated over the lanes so that each rank begins with a different
// receiver.
__device__ inline Destinations RotateReceivers(const PushArgs& args, const Destinations& destinations,
                                               int lane) {
  const int R = args.shape.num_ranks;
  if (args.shape.has_row_per_choice()) return destinations;
  const int from = lane < R ? (lane + args.peers.rank + 1) % R : lane;
  const int row = __shfl_sync(kAllLanes, destinations.row, from);
  return {row, from, __ballot_sync(kAllLanes, row >= 0)};
}

// Sends those payloads of a token, by loads and stores, that bulk copies do not take.
__device__ inline void SendPayloads(const PushArgs& args, int t, const Destinations& destinations,
                                    const Published* published, int lane) {
  for (int p = 0; p < args.num_payloads; ++p) {
    const int64_t bytes = args.payloads[p].row_bytes;
    if (args.bulk.num_warps > 0 && IsBulkRow(bytes)) continue;
    std::byte* target =
        static_cast<std::byte*>(published[destinations.rank].buffers[p]) + destinations.row * bytes;
    CopyBytes(args.payloads[p].in + t * bytes, bytes, destinations.payload_lanes, target, lane);
  }
}

// Sends the weights of a token's rows, and the routing from which receivers read the choices of each row: by
// rank their local experts, by expert received_rows. A handle already has received_rows.
__device__ inline void SendRouting(const PushArgs& args, int t, const Destinations& destinations,
                                   const Published* published, int lane) {
  const Shape& shape = args.shape;
  const float* weights =
      args.topk_weights == nullptr ? nullptr : args.topk_weights + int64_t{t} * shape.top_k;
  if (shape.has_row_per_choice()) {
    if (weights != nullptr && destinations.row >= 0) {
      static_cast<float*>(published[destinations.rank].weights)[destinations.row] = weights[lane];
    }
    if (!args.sends_received_rows || lane >= shape.top_k) return;
    const int64_t choice = (int64_t{args.peers.rank} * shape.num_tokens + t) * shape.top_k + lane;
    for (int r = 0; r < shape.num_ranks; ++r) {
      static_cast<int32_t*>(published[r].routing)[choice] = destinations.rank == r ? destinations.row : -1;
    }
    return;
  }
  const int32_t* experts = args.handle.topk_idx + int64_t{t} * shape.top_k;
  for (unsigned remaining = destinations.payload_lanes; remaining != 0; remaining &= remaining - 1) {
    const int from = __ffs(remaining) - 1, to = __shfl_sync(kAllLanes, destinations.rank, from);
    const int64_t first = int64_t{__shfl_sync(kAllLanes, destinations.row, from)} * shape.top_k;
    for (int k = lane; k < shape.top_k; k += kWarp) {
      const bool is_for_receiver = experts[k] >= 0 && shape.rank_of(experts[k]) == to;
      if (weights != nullptr) {
        static_cast<float*>(published[to].weights)[first + k] = is_for_receiver ? weights[k] : 0.0f;
      }
      if (args.arrived_idx != nullptr) {
        static_cast<int32_t*>(published[to].routing)[first + k] =
            is_for_receiver ? experts[k] - to * shape.num_local_experts() : -1;
      }
    }
  }
}

// Sends the routing of tokens [begin, end), and calls send_rows(token, destinations) for the payloads. Each
// token is sent by one warp of the group. It has more than kWarp rows only if kAnyRows.
template <bool kAnyRows, typename SendRows>
__device__ void SendTokens(const PushArgs& args, int begin, int end, const Published* published,
                           const ThreadGroup& group, SendRows&& send_rows) {
  const int lane = threadIdx.x % kWarp;
  for (int t = begin + group.thread / kWarp; t < end; t += group.threads / kWarp) {
    for (int first = 0; first < (kAnyRows ? args.shape.rows_per_token() : 1); first += kWarp) {
      const HandleEntry entry = LoadHandleEntry(args.shape, args.handle, t, lane, first);
      const Destinations destinations = FindDestinations(args, entry, lane, first);
      send_rows(t, destinations);
      SendRouting(args, t, destinations, published, lane);
    }
  }
}

// The bytes that are loaded at a time, and fit in a stage of shared memory: rows of consecutive tokens, or a
// part of a long row.
struct Slice {
  int token;  // the first one
  int payload;
  int64_t offset;
};

// Returns the bytes of a row before any conversion to FP8.
__device__ inline int64_t LoadedBytes(const PushArgs& args, int p) {
  return args.payloads[p].row_bytes * args.element_bytes;
}

// Returns the size of a slice's part of each row, before any conversion to FP8.
__device__ inline uint32_t SliceBytes(const PushArgs& args, const Slice& slice) {
  return static_cast<uint32_t>(
      min(int64_t{args.bulk.stage_bytes}, LoadedBytes(args, slice.payload) - slice.offset));
}

// Returns the number of a slice's tokens, which are before `end`.
__device__ inline int SliceTokens(const PushArgs& args, const Slice& slice, int end) {
  return min(args.bulk.slice_tokens, end - slice.token);
}

// Returns the first payload from p on that bulk copies take.
__device__ inline int NextBulkPayload(const PushArgs& args, int p) {
  while (p < args.bulk.num_payloads && !IsBulkRow(args.payloads[p].row_bytes)) ++p;
  return p;
}

// Moves a slice on to this warp's next token that is sent anywhere, if a program places the rows. Those are
// pieces of weights: most are sent nowhere, and none becomes FP8. Called by a warp.
template <bool kQuantizes>
__device__ Slice SkipUnsent(const PushArgs& args, Slice slice, int end) {
  if (kQuantizes || args.shape.order != Order::kPlaced) return slice;
  const int R = args.shape.num_ranks, lane = threadIdx.x % kWarp;
  const int step = args.bulk.num_sending * args.bulk.slice_tokens;
  for (; slice.token < end; slice.token += kWarp * step) {
    Slice one = slice;
    one.token += lane * step;
    const int32_t* const rows = args.handle.sent_rows + int64_t{one.token} * R;
    bool is_sent = false;
#pragma unroll 1  // inlined several times; unrolled copies make the kernels longer and cost registers
    for (int i = 0; i < SliceTokens(args, one, end) * R; ++i) is_sent |= rows[i] >= 0;
    const unsigned sent = __ballot_sync(kAllLanes, is_sent);
    if (sent == 0) continue;
    slice.token += (__ffs(sent) - 1) * step;
    break;
  }
  return slice;
}

// Returns this warp's slice after `slice`: along the row, then in the next payload, then of the warp's next
// tokens.
template <bool kQuantizes>
__device__ Slice NextSlice(const PushArgs& args, Slice slice, int end) {
  slice.offset += args.bulk.stage_bytes;
  if (slice.offset < LoadedBytes(args, slice.payload)) return slice;
  slice.offset = 0;
  slice.payload = NextBulkPayload(args, slice.payload + 1);
  if (slice.payload < args.bulk.num_payloads) return slice;
  slice.payload = NextBulkPayload(args, 0);
  slice.token += args.bulk.num_sending * args.bulk.slice_tokens;
  return SkipUnsent<kQuantizes>(args, slice, end);
}

// A warp's two stages of shared memory. While the stores of one slice read one stage, the next slice is
// loaded into the other. Between batches, the first slice of the next batch is being loaded into the stage
// that is used next.
struct Stages {
  std::byte* bytes;
  uint64_t* barriers;
  uint32_t used;  // stages used so far; gives the present stage and the phase of its barrier
  float* scales;  // of the slice being sent, if rows become FP8
};

// Starts to load a slice into a stage, unless its tokens are not before `end`. Called by a warp.
__device__ inline void LoadSlice(const PushArgs& args, const Slice& slice, int end, const Stages& stages,
                                 int stage) {
  if (threadIdx.x % kWarp != 0 || slice.token >= end) return;
  BulkLoad(stages.bytes + stage * args.bulk.stage_bytes,
           args.payloads[slice.payload].in + slice.token * LoadedBytes(args, slice.payload) + slice.offset,
           SliceBytes(args, slice) * SliceTokens(args, slice, end), &stages.barriers[stage]);
}

// Returns the warp's first slice of a batch.
template <bool kQuantizes>
__device__ Slice FirstSlice(const PushArgs& args, const Batch& batch) {
  const int warp = static_cast<int>(threadIdx.x / kWarp);
  const int first = batch.begin + warp * args.bulk.slice_tokens;
  return SkipUnsent<kQuantizes>(args, {first, NextBulkPayload(args, 0), 0}, batch.end);
}

// The destinations of up to kTokens tokens of a slice.
template <int kTokens>
struct SliceDestinations {
  Destinations of[kTokens];

  // Looks up `count` tokens from `token` on. All loads are issued before the first is waited for.
  __device__ void Find(const PushArgs& args, int token, int count, int lane) {
    HandleEntry entries[kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (i < count) entries[i] = LoadHandleEntry(args.shape, args.handle, token + i, lane);
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (i < count) of[i] = RotateReceivers(args, FindDestinations(args, entries[i], lane), lane);
    }
  }
};

// Starts to send a batch by bulk copies. Its first slice is already being loaded; at the end, that of the
// next batch is. Called by the block's first bulk.num_sending warps. By expert, the stores of the previous
// batch have completed on return, so that the peers may be notified of it. A slice has at most kTokens
// tokens.
template <bool kQuantizes, int kTokens>
__device__ void SendInBulk(const PushArgs& args, const Batch& batch, const Batch& following,
                           const Published* published, Stages& stages) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t used = stages.used;
  const auto load_following = [&](int stage) {
    LoadSlice(args, FirstSlice<kQuantizes>(args, following), following.end, stages, stage);
  };
  Slice slice = FirstSlice<kQuantizes>(args, batch);
  SliceDestinations<kTokens> destinations;
  int token = -1;
  for (; slice.token < batch.end; ++stages.used) {
    const Slice next = NextSlice<kQuantizes>(args, slice, batch.end);
    const int stage = stages.used % 2, count = SliceTokens(args, slice, batch.end);
    const auto find_destinations = [&] {
      if (slice.token == token) return;
      token = slice.token;
      destinations.Find(args, token, count, lane);
    };
    if constexpr (kQuantizes) find_destinations();
    WaitForStoresRead();
    __syncwarp();
    if (next.token < batch.end) {
      LoadSlice(args, next, batch.end, stages, 1 - stage);
    } else {
      load_following(1 - stage);
    }
    if constexpr (!kQuantizes) find_destinations();
    WaitForLoad(&stages.barriers[stage], stages.used / 2 % 2);
    std::byte* const staged = stages.bytes + stage * args.bulk.stage_bytes;
    uint32_t size = SliceBytes(args, slice);
    int64_t offset = slice.offset;
    if constexpr (kQuantizes) {
      size /= args.element_bytes, offset /= args.element_bytes;
      QuantizeStaged(args, staged, static_cast<int>(size), stages.scales, lane);
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (i >= count) break;
      const Destinations& to = destinations.of[i];
      if ((to.payload_lanes >> lane & 1) == 0) continue;
      std::byte* target = static_cast<std::byte*>(published[to.rank].buffers[slice.payload]) +
                          to.row * args.payloads[slice.payload].row_bytes + offset;
      BulkStore(target, staged + i * size, size);
    }
    CommitStores();
    if constexpr (kQuantizes) {
      static_assert(kTokens == 1);
      SendScales(args, offset, static_cast<int>(size), destinations.of[0], published, stages.scales, lane);
    }
    if (args.spreads && stages.used == used) WaitForStores<1>();
    slice = next;
  }
  if (stages.used != used) return;
  // The warp has no token in this batch.
  WaitForStores();
  __syncwarp();
  load_following(stages.used % 2);
}

}  // namespace jax_ep::cuda
