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
  unsigned lanes;  // those that hold a row
};

__device__ inline Rows FindRows(const MoveArgs& args, int t, int lane) {
  const Shape& shape = args.shape;
  const int width = shape.rows_per_token();
  int row = -1, receiver = 0;
  if (lane < width) {
    row = args.handle.token_rows[int64_t{t} * width + lane];
    receiver = lane;
    if (shape.order == Order::kExpert) {
      const int expert = args.handle.topk_idx[int64_t{t} * shape.top_k + lane];
      const bool routed = IsExpert(expert, shape.num_experts);
      receiver = routed ? shape.rank_of(expert) : 0;
      if (!routed) row = -1;
    }
    if (!IsRow(row, shape.capacity)) row = -1;
  }
  return {row, receiver, __ballot_sync(kAllLanes, row >= 0)};
}

// A row of 16-byte vectors (or bytes) to all its places. Called by a warp; `target` is the lane's own row.
template <typename Vector>
__device__ void CopyRow(const Vector* source, int64_t n, unsigned lanes, Vector* target, int lane) {
  for (int64_t first = 0; first < n; first += kWarp * kVectors) {
    Vector values[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = first + v * kWarp + lane;
      if (i < n) values[v] = source[i];
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

__device__ inline void SendPayload(const MoveArgs& args, int p, int t, const Rows& rows,
                                   const Published* published, int lane) {
  const int64_t bytes = args.payloads[p].row_bytes;
  const std::byte* source = args.payloads[p].in + t * bytes;
  std::byte* target = static_cast<std::byte*>(published[rows.receiver].buffers[p]) + rows.row * bytes;
  if (bytes % 16 == 0) {
    CopyRow(reinterpret_cast<const uint4*>(source), bytes / 16, rows.lanes, reinterpret_cast<uint4*>(target),
            lane);
  } else {
    CopyRow(source, bytes, rows.lanes, target, lane);
  }
}

// The weights of a token's rows, and by rank its local experts, which are known already to a handle.
__device__ inline void SendRouting(const MoveArgs& args, int t, const Rows& rows, const Published* published,
                                   int lane) {
  const Shape& shape = args.shape;
  const float* weights =
      args.topk_weights == nullptr ? nullptr : args.topk_weights + int64_t{t} * shape.top_k;
  if (shape.order == Order::kExpert) {
    if (weights != nullptr && rows.row >= 0) {
      static_cast<float*>(published[rows.receiver].weights)[rows.row] = weights[lane];
    }
    return;
  }
  const int32_t* experts = args.handle.topk_idx + int64_t{t} * shape.top_k;
  for (unsigned left = rows.lanes; left != 0; left &= left - 1) {
    const int to = __ffs(left) - 1;
    const int64_t first = int64_t{__shfl_sync(kAllLanes, rows.row, to)} * shape.top_k;
    for (int k = lane; k < shape.top_k; k += kWarp) {
      const bool here = experts[k] >= 0 && shape.rank_of(experts[k]) == to;
      if (weights != nullptr) {
        static_cast<float*>(published[to].weights)[first + k] = here ? weights[k] : 0.0f;
      }
      if (args.recv_topk_idx != nullptr) {
        static_cast<int32_t*>(published[to].topk_idx)[first + k] =
            here ? experts[k] - to * shape.num_local_experts() : -1;
      }
    }
  }
}

// Sends tokens [begin, end), a warp for each, by loads and stores.
__device__ inline void SendTokens(const MoveArgs& args, int begin, int end, const Published* published) {
  const int lane = threadIdx.x % kWarp;
  for (int t = begin + threadIdx.x / kWarp; t < end; t += blockDim.x / kWarp) {
    const Rows rows = FindRows(args, t, lane);
    for (int p = 0; p < args.num_payloads; ++p) SendPayload(args, p, t, rows, published, lane);
    SendRouting(args, t, rows, published, lane);
  }
}

// A part of a row that fits a slot of shared memory.
struct Piece {
  int token;
  int payload;
  int64_t offset;
};

__device__ inline uint32_t SizeOf(const MoveArgs& args, const Piece& piece) {
  return static_cast<uint32_t>(
      min(int64_t{args.bulk.slot_bytes}, args.payloads[piece.payload].row_bytes - piece.offset));
}

__device__ inline int NextBulkPayload(const MoveArgs& args, int p) {
  while (p < args.num_payloads && !IsBulkRow(args.payloads[p].row_bytes)) ++p;
  return p;
}

// The piece of this warp that follows: along the row, then the next payload, then the warp's next token.
__device__ inline Piece Next(const MoveArgs& args, Piece piece) {
  piece.offset += args.bulk.slot_bytes;
  if (piece.offset < args.payloads[piece.payload].row_bytes) return piece;
  piece.offset = 0;
  piece.payload = NextBulkPayload(args, piece.payload + 1);
  if (piece.payload < args.num_payloads) return piece;
  piece.payload = NextBulkPayload(args, 0);
  piece.token += args.bulk.num_warps;
  return piece;
}

// Sends tokens [begin, end) by bulk copies: each warp loads one piece into one of its two slots while the
// stores of the piece before leave the other. Called by the block's first bulk.num_warps warps.
__device__ inline void SendTokensInBulk(const MoveArgs& args, int begin, int end, const Published* published,
                                        std::byte* slots, uint64_t* barriers) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto load = [&](const Piece& piece, int slot) {
    if (lane != 0 || piece.token >= end) return;
    const Payload& payload = args.payloads[piece.payload];
    BulkLoad(slots + slot * args.bulk.slot_bytes, payload.in + piece.token * payload.row_bytes + piece.offset,
             SizeOf(args, piece), &barriers[slot]);
  };
  Piece piece{begin + warp, NextBulkPayload(args, 0), 0};
  load(piece, 0);
  Rows rows{};
  int token = -1;
  for (uint32_t n = 0; piece.token < end; ++n) {
    const Piece following = Next(args, piece);
    const int slot = n % 2;
    WaitForStoresRead();
    __syncwarp();
    load(following, 1 - slot);
    if (piece.token != token) {
      token = piece.token;
      rows = FindRows(args, token, lane);
      for (int p = 0; p < args.num_payloads; ++p) {
        if (!IsBulkRow(args.payloads[p].row_bytes)) SendPayload(args, p, token, rows, published, lane);
      }
      SendRouting(args, token, rows, published, lane);
    }
    WaitForLoad(&barriers[slot], n / 2 % 2);
    if (rows.row >= 0) {
      std::byte* target = static_cast<std::byte*>(published[rows.receiver].buffers[piece.payload]) +
                          rows.row * args.payloads[piece.payload].row_bytes + piece.offset;
      BulkStore(target, slots + slot * args.bulk.slot_bytes, SizeOf(args, piece));
    }
    CommitStores();
    piece = following;
  }
  WaitForStores();
  FenceBulk();
}

}  // namespace jax_ep::cuda
