// The sender's side of a push: the rows of each token, stored where they belong.
#pragma once

#include "kernels/bulk.cuh"
#include "kernels/receive.cuh"

namespace jax_ep::cuda {

constexpr int kVectors = 4;  // 16-byte loads in flight a thread

// Where a token goes: lane i of a warp holds its i-th row, -1 none, and the rank that takes it.
struct Rows {
  int row;
  int receiver;
  unsigned carried;  // lanes whose rows the token's bytes are sent to
};

__device__ inline Rows FindRows(const PushArgs& args, int t, int lane) {
  const Place place = FindPlace(args.shape, args.handle, t, lane);
  bool carried = place.row >= 0;
  if (args.spreads) {
    const unsigned mates = __match_any_sync(kAllLanes, carried ? place.rank : -1);
    carried = carried && __ffs(mates) - 1 == lane;
  }
  return {place.row, place.rank, __ballot_sync(kAllLanes, carried)};
}

// The rows by rank, from lane to lane so that each rank begins with another receiver.
__device__ inline Rows Turn(const PushArgs& args, const Rows& rows, int lane) {
  const int R = args.shape.num_ranks;
  if (args.shape.has_row_per_choice()) return rows;
  const int from = lane < R ? (lane + args.peers.rank + 1) % R : lane;
  const int row = __shfl_sync(kAllLanes, rows.row, from);
  return {row, from, __ballot_sync(kAllLanes, row >= 0)};
}

__device__ inline uint4 LoadElement(const uint4* address, bool wanted) { return LoadRow(address, wanted); }
__device__ inline char LoadElement(const char* address, bool wanted) { return wanted ? __ldcg(address) : 0; }

// A row of 16-byte vectors (or bytes) to all its places. Called by a warp; `target` is the lane's own row.
template <typename Vector>
__device__ void CopyRow(const Vector* source, int64_t n, unsigned lanes, Vector* target, int lane) {
  for (int64_t first = 0; first < n; first += kWarp * kVectors) {
    Vector values[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = first + v * kWarp + lane;
      values[v] = LoadElement(source + i, i < n);
    }
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      Vector* to = reinterpret_cast<Vector*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(target), __ffs(left) - 1));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int64_t i = first + v * kWarp + lane;
        if (i < n) to[i] = values[v];
      }
    }
  }
}

// A row of any size.
__device__ inline void CopyBytes(const std::byte* source, int64_t bytes, unsigned lanes, std::byte* target,
                                 int lane) {
  if (bytes % 16 == 0) {
    CopyRow(reinterpret_cast<const uint4*>(source), bytes / 16, lanes, reinterpret_cast<uint4*>(target),
            lane);
  } else {
    CopyRow(reinterpret_cast<const char*>(source), bytes, lanes, reinterpret_cast<char*>(target), lane);
  }
}

__device__ inline void SendPayload(const PushArgs& args, int p, int t, const Rows& rows,
                                   const Published* published, int lane) {
  const int64_t bytes = args.payloads[p].row_bytes;
  std::byte* target = static_cast<std::byte*>(published[rows.receiver].buffers[p]) + rows.row * bytes;
  CopyBytes(args.payloads[p].in + t * bytes, bytes, rows.carried, target, lane);
}

// The weights of a token's rows, and what tells the receivers which choices they stand for: by rank their
// local experts, by expert received_rows. Those are known already to a handle.
__device__ inline void SendRouting(const PushArgs& args, int t, const Rows& rows, const Published* published,
                                   int lane) {
  const Shape& shape = args.shape;
  const float* weights =
      args.topk_weights == nullptr ? nullptr : args.topk_weights + int64_t{t} * shape.top_k;
  if (shape.has_row_per_choice()) {
    if (weights != nullptr && rows.row >= 0) {
      static_cast<float*>(published[rows.receiver].weights)[rows.row] = weights[lane];
    }
    if (!args.sends_map || lane >= shape.top_k) return;
    const int64_t slot = (int64_t{args.peers.rank} * shape.num_tokens + t) * shape.top_k + lane;
    for (int r = 0; r < shape.num_ranks; ++r) {
      static_cast<int32_t*>(published[r].routing)[slot] = rows.receiver == r ? rows.row : -1;
    }
    return;
  }
  const int32_t* experts = args.handle.topk_idx + int64_t{t} * shape.top_k;
  for (unsigned left = rows.carried; left != 0; left &= left - 1) {
    const int to = __ffs(left) - 1;
    const int64_t first = int64_t{__shfl_sync(kAllLanes, rows.row, to)} * shape.top_k;
    for (int k = lane; k < shape.top_k; k += kWarp) {
      const bool here = experts[k] >= 0 && shape.rank_of(experts[k]) == to;
      if (weights != nullptr) {
        static_cast<float*>(published[to].weights)[first + k] = here ? weights[k] : 0.0f;
      }
      if (args.arrived_idx != nullptr) {
        static_cast<int32_t*>(published[to].routing)[first + k] =
            here ? experts[k] - to * shape.num_local_experts() : -1;
      }
    }
  }
}

// Sends the routing of tokens [begin, end), and by loads and stores those rows that bulk copies do not take.
// A warp of the team for each token.
__device__ inline void SendTokens(const PushArgs& args, int begin, int end, const Published* published,
                                  const Team& team) {
  const int lane = threadIdx.x % kWarp;
  for (int t = begin + team.thread / kWarp; t < end; t += team.threads / kWarp) {
    const Rows rows = FindRows(args, t, lane);
    for (int p = 0; p < args.num_payloads; ++p) {
      if (args.bulk.num_warps > 0 && IsBulkRow(args.payloads[p].row_bytes)) continue;
      SendPayload(args, p, t, rows, published, lane);
    }
    SendRouting(args, t, rows, published, lane);
  }
}

// A part of a row that fits a slot of shared memory.
struct Piece {
  int token;
  int payload;
  int64_t offset;
};

__device__ inline uint32_t SizeOf(const PushArgs& args, const Piece& piece) {
  return static_cast<uint32_t>(
      min(int64_t{args.bulk.slot_bytes}, args.payloads[piece.payload].row_bytes - piece.offset));
}

__device__ inline int NextBulkPayload(const PushArgs& args, int p) {
  while (p < args.num_payloads && !IsBulkRow(args.payloads[p].row_bytes)) ++p;
  return p;
}

// The piece of this warp that follows: along the row, then the next payload, then the warp's next token.
__device__ inline Piece Next(const PushArgs& args, Piece piece) {
  piece.offset += args.bulk.slot_bytes;
  if (piece.offset < args.payloads[piece.payload].row_bytes) return piece;
  piece.offset = 0;
  piece.payload = NextBulkPayload(args, piece.payload + 1);
  if (piece.payload < args.num_payloads) return piece;
  piece.payload = NextBulkPayload(args, 0);
  piece.token += args.bulk.num_sending;
  return piece;
}

// A warp's two slots of shared memory: it loads one piece into one while the stores of the piece before leave
// the other. Between calls the slot whose turn it is has been read.
struct Slots {
  std::byte* bytes;
  uint64_t* barriers;
  uint32_t used;  // so far, which says whose turn it is and the phase of its barrier
};

__device__ inline void LoadPiece(const PushArgs& args, const Piece& piece, int end, const Slots& slots,
                                 int slot) {
  if (threadIdx.x % kWarp != 0 || piece.token >= end) return;
  const Payload& payload = args.payloads[piece.payload];
  BulkLoad(slots.bytes + slot * args.bulk.slot_bytes,
           payload.in + piece.token * payload.row_bytes + piece.offset, SizeOf(args, piece),
           &slots.barriers[slot]);
}

// The warp's first piece of tokens from `begin` on.
__device__ inline Piece FirstPiece(const PushArgs& args, int begin) {
  return {begin + static_cast<int>(threadIdx.x / kWarp), NextBulkPayload(args, 0), 0};
}

// Begins to send tokens [begin, end) by bulk copies; the first piece is being loaded already. Called by the
// block's first bulk.num_sending warps. By expert those that it had sent before have then arrived.
__device__ inline void SendTokensInBulk(const PushArgs& args, int begin, int end, const Published* published,
                                        Slots& slots) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t used = slots.used;
  Piece piece = FirstPiece(args, begin);
  Rows rows{};
  int token = -1;
  for (; piece.token < end; ++slots.used) {
    const Piece following = Next(args, piece);
    const int slot = slots.used % 2;
    WaitForStoresRead();
    __syncwarp();
    LoadPiece(args, following, end, slots, 1 - slot);
    if (piece.token != token) {
      token = piece.token;
      rows = Turn(args, FindRows(args, token, lane), lane);
    }
    WaitForLoad(&slots.barriers[slot], slots.used / 2 % 2);
    if (rows.carried >> lane & 1) {
      std::byte* target = static_cast<std::byte*>(published[rows.receiver].buffers[piece.payload]) +
                          rows.row * args.payloads[piece.payload].row_bytes + piece.offset;
      BulkStore(target, slots.bytes + slot * args.bulk.slot_bytes, SizeOf(args, piece));
    }
    CommitStores();
    if (args.spreads && slots.used == used) WaitForStores<1>();
    piece = following;
  }
  if (args.spreads && slots.used == used) WaitForStores();
}

}  // namespace jax_ep::cuda
