// By expert: each token came once; from there to its other rows of this rank.
#pragma once

#include "kernels/comm/waves.cuh"
#include "kernels/push/send.cuh"
#include "kernels/rows/vector.cuh"

namespace jax_ep::cuda {

constexpr int kScaledRows = 3;       // rows, and
constexpr int kColumnsInFlight = 4;  // columns of each, whose loads are in flight at a time
constexpr int kSpreadMates = 2;      // warps that share a row

// A token's rows at this rank: lane k holds that of its k-th choice, -1 none.
struct Spread {
  int row;
  unsigned lanes;  // that hold a row; the first one's has come
};

__device__ inline Spread FindSpread(const int32_t* received_rows, const Shape& shape, int64_t global_token,
                                    int lane) {
  const int row = lane < shape.top_k ? __ldcg(&received_rows[global_token * shape.top_k + lane]) : -1;
  return {row, __ballot_sync(kAllLanes, IsRow(row, shape.capacity))};
}

// Each row becomes its weight times the token's, which lies in the first of them; and the weight's gradient
// the dot product of the token's row with the factors. Some rows at a time, the first of all in the end: each
// of its columns is read before it is written.
template <typename T, int N>
__device__ void ScaleRows(const PushArgs& args, int p, const Spread& spread, int lane) {
  using Acc = typename Sum<T>::Acc;
  const int width = static_cast<int>(args.payloads[p].row_bytes / sizeof(T));
  T* const out = reinterpret_cast<T*>(args.payloads[p].out);
  const T* const factors = static_cast<const T*>(args.factors[p]);
  const T* const token = out + int64_t{__shfl_sync(kAllLanes, spread.row, __ffs(spread.lanes) - 1)} * width;
  for (unsigned left = spread.lanes; left != 0;) {
    int rows[kScaledRows];
    Acc weights[kScaledRows], dots[kScaledRows];
#pragma unroll
    for (int r = 0; r < kScaledRows; ++r) {
      const int from = left == 0 ? 0 : 31 - __clz(left);
      rows[r] = __shfl_sync(kAllLanes, left == 0 ? -1 : spread.row, from);
      left &= ~(1u << from);
      weights[r] = rows[r] >= 0 ? args.row_weights[rows[r]] : 0.0f;
      dots[r] = 0;
    }
    for (int begin = lane * N; begin < width; begin += kColumnsInFlight * kWarp * N) {
      Vector<T, N> tokens[kColumnsInFlight], vectors[kScaledRows][kColumnsInFlight];
#pragma unroll
      for (int i = 0; i < kColumnsInFlight; ++i) {
        const int column = begin + i * kWarp * N;
        tokens[i] = Vector<T, N>::Load(token + column, column < width);
      }
#pragma unroll
      for (int r = 0; r < kScaledRows; ++r) {
#pragma unroll
        for (int i = 0; i < kColumnsInFlight; ++i) {
          const int column = begin + i * kWarp * N;
          vectors[r][i] =
              Vector<T, N>::Load(factors + int64_t{rows[r]} * width + column, rows[r] >= 0 && column < width);
        }
      }
#pragma unroll
      for (int r = 0; r < kScaledRows; ++r) {
#pragma unroll
        for (int i = 0; i < kColumnsInFlight; ++i) {
          const int column = begin + i * kWarp * N;
          if (rows[r] < 0 || column >= width) break;
          Acc scaled[N];
#pragma unroll
          for (int j = 0; j < N; ++j) {
            const Acc value = tokens[i][j];
            dots[r] += static_cast<Acc>(vectors[r][i][j]) * value;
            scaled[j] = weights[r] * value;
          }
          Vector<T, N>::Store(out + int64_t{rows[r]} * width + column, scaled);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kScaledRows; ++r) {
      for (int step = kWarp / 2; step > 0; step /= 2) dots[r] += __shfl_xor_sync(kAllLanes, dots[r], step);
      if (lane != 0 || rows[r] < 0) continue;
      float& gradient = args.arrived_weights[rows[r]];
      gradient = static_cast<float>(p == 0 ? dots[r] : static_cast<Acc>(gradient) + dots[r]);
    }
  }
}

template <typename T>
__device__ void ScaleArray(const PushArgs& args, int p, const Spread& spread, int lane) {
  if (args.payloads[p].row_bytes % 16 == 0) {
    ScaleRows<T, 16 / sizeof(T)>(args, p, spread, lane);
  } else {
    ScaleRows<T, 1>(args, p, spread, lane);
  }
}

// Copies a token's row to its others: the bytes of one of the mates.
__device__ inline void CopyShared(const PushArgs& args, int p, const Spread& spread, int mate, int mates,
                                  int lane) {
  const unsigned others = spread.lanes & (spread.lanes - 1);
  if (others == 0) return;
  const int64_t bytes = args.payloads[p].row_bytes;
  // Rows of whole vectors are divided, others not.
  const int64_t size = bytes % 16 == 0 ? AlignUp((bytes + mates - 1) / mates, 16) : bytes;
  const int64_t offset = mate * size;
  if (offset >= bytes) return;
  std::byte* const out = args.payloads[p].out + offset;
  const int64_t first = __shfl_sync(kAllLanes, spread.row, __ffs(spread.lanes) - 1);
  CopyBytes(out + first * bytes, min(size, bytes - offset), others, out + spread.row * bytes, lane);
}

// Copies rows to their others by bulk copies: one is being loaded while the one before it is stored. One
// warp.
class BulkSpreader {
 public:
  __device__ BulkSpreader(const PushArgs& args, Stages& stages, int lane)
      : args_(args), stages_(stages), lane_(lane) {}

  // Begins to copy array p of a token's row.
  __device__ void Begin(int p, const Spread& spread) {
    const unsigned others = spread.lanes & (spread.lanes - 1);
    const int64_t bytes = args_.payloads[p].row_bytes, stage_bytes = args_.bulk.stage_bytes;
    std::byte* const out = args_.payloads[p].out;
    const int64_t first = __shfl_sync(kAllLanes, spread.row, __ffs(spread.lanes) - 1);
    for (int64_t offset = 0; offset < bytes && others != 0; offset += stage_bytes) {
      const uint32_t size = static_cast<uint32_t>(min(stage_bytes, bytes - offset));
      const int stage = stages_.used % 2;
      WaitForStoresRead();  // the last of them was from this stage
      __syncwarp();
      if (lane_ == 0) BulkLoad(Staged(stage), out + first * bytes + offset, size, &stages_.barriers[stage]);
      End();
      ++stages_.used;
      size_ = size;
      to_ = (others >> lane_ & 1) != 0 ? out + spread.row * bytes + offset : nullptr;
    }
  }

  // Stores what has been loaded last.
  __device__ void End() {
    if (size_ == 0) return;
    const int last = stages_.used - 1;
    WaitForLoad(&stages_.barriers[last % 2], last / 2 % 2);
    if (to_ != nullptr) BulkStore(to_, Staged(last % 2), size_);
    CommitStores();
    size_ = 0;
  }

 private:
  __device__ std::byte* Staged(int stage) const { return stages_.bytes + stage * args_.bulk.stage_bytes; }

  const PushArgs& args_;
  Stages& stages_;
  int lane_;
  uint32_t size_ = 0;  // of what has been loaded last and is yet to be stored
  std::byte* to_;      // this lane's place for it
};

// All tokens of all ranks in their order, dealt out to the warps that have nothing to send or to clear any
// more. `Scale` is the type of rows to be scaled, or void. In bulk only the warps spread that have stages.
template <bool kInBulk, typename Scale>
__device__ void SpreadRows(const PushArgs& args, Op op, Stages& stages, uint32_t epoch) {
  constexpr bool kScales = !std::is_void_v<Scale>;
  constexpr int kMates = kInBulk || kScales ? 1 : kSpreadMates;
  const Shape& shape = args.shape;
  const int lane = threadIdx.x % kWarp;
  if (kInBulk && !kScales && threadIdx.x / kWarp >= args.bulk.num_warps) return;
  const Dealer dealer{&args.peers.own().spread[epoch % 2]};
  BulkSpreader spreader(args, stages, lane);
  int come = -1;  // the last wave that was waited for; later tickets never belong to an earlier one
  unsigned asked = dealer.Take(lane);
  while (true) {
    const int ticket = Dealer::Show(asked);
    const int i = ticket / kMates, t = i / shape.num_ranks;
    if (t >= shape.num_tokens) break;
    asked = dealer.Take(lane);  // the next one comes meanwhile
    if (args.waves.Of(t) != come) {
      if (kInBulk) spreader.End();
      come = args.waves.Of(t);
      if (!WaitForWave(args.peers, op, come, epoch)) break;
      if (kInBulk) FenceBulk();
    }
    const int64_t global_token = int64_t{i % shape.num_ranks} * shape.num_tokens + t;
    const Spread spread = FindSpread(args.handle.received_rows, shape, global_token, lane);
    if (spread.lanes == 0) continue;
    for (int p = 0; p < args.num_payloads; ++p) {
      if constexpr (kScales) {
        ScaleArray<Scale>(args, p, spread, lane);
      } else if (kInBulk && IsBulkRow(args.payloads[p].row_bytes)) {
        spreader.Begin(p, spread);
      } else {
        CopyShared(args, p, spread, ticket % kMates, kMates, lane);
      }
    }
  }
  if (kInBulk) {
    spreader.End();
    WaitForStores();
  }
}

}  // namespace jax_ep::cuda
