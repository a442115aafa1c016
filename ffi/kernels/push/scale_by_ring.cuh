// Scales rows through rings. One warp of a team loads a token's row, followed by the factors of the token's
// rows at this rank. The other warps scale the row and compute its dot products with the factors.
#pragma once

#include "kernels/push/scale.cuh"
#include "kernels/rows/ring.cuh"

namespace jax_ep::cuda {

constexpr int kTeamBarrier = 2;  // of the first team's processing warps; those of the other teams follow

// The processing of a ring's contents by one warp: a token's row, then the factors.
template <typename T>
class RowScaler {
 public:
  using Acc = typename Sum<T>::Acc;
  // Dot products over each warp's columns, double-buffered: while one token's are added up, the next token's
  // are written.
  using PartialDots = Acc[2][kMaxTeamWarps][kWarp];

  __device__ RowScaler(const PushArgs& args, Ring& ring, PartialDots& partial_dots)
      : args_(args),
        ring_(ring),
        partial_dots_(partial_dots),
        lane_(threadIdx.x % kWarp),
        first_column_((ring.first_vector() + lane_) * N) {}

  // Processes slots until the ring's phase ends.
  __device__ void Run() {
    ConsumeRows<T>(ring_, [&](const SlotData<T>& data, int next) {
      if ((data.flags & SlotHeader::kLast) == 0) {
        KeepToken(data);
      } else {
        Scale(data);
        if ((next & SlotHeader::kLast) == 0) Finish(data.target);  // the token has no more rows in this part
      }
    });
  }

 private:
  static constexpr int N = 16 / sizeof(T);

  __device__ void KeepToken(const SlotData<T>& data) {
#pragma unroll
    for (int v = 0; v < kRingVectors; ++v) {
#pragma unroll
      for (int j = 0; j < N; ++j) token_[v][j] = data.vectors[v][j];
    }
  }

  // Stores the scaled row that the factors belong to, and keeps the warp's partial dot product in a lane.
  __device__ void Scale(const SlotData<T>& data) {
    const Target& target = data.target;
    const Payload& payload = args_.payloads[target.array];
    const int width = static_cast<int>(payload.row_bytes / sizeof(T));
    T* const row = reinterpret_cast<T*>(payload.out) + int64_t{target.number} * width;
    Acc sum = 0;
#pragma unroll
    for (int v = 0; v < kRingVectors; ++v) {
      const int column = target.first + first_column_ + v * kWarp * N;
      if (column >= width) break;
      Acc scaled[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sum = MultiplyAdd(static_cast<Acc>(data.vectors[v][j]), token_[v][j], sum);
        scaled[j] = static_cast<Acc>(data.factor) * token_[v][j];
      }
      Vector<T, N>::Store(row + column, scaled);
    }
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    if (lane_ == num_rows_) {
      dot_ = sum;
      row_ = target.number;
    }
    ++num_rows_;
  }

  // Adds up the team's partial dot products. A lane stands for the same row in all parts of a token, and
  // accumulates its dot product.
  __device__ void Finish(const Target& target) {
    const int first = static_cast<int>(threadIdx.x) / kWarp - ring_.warp_in_team(),
              summers = ring_.partition().summers;
    partial_dots_[buffer_][first + ring_.warp_in_team()][lane_] = dot_;
    ThreadGroup{0, summers * kWarp, kTeamBarrier + ring_.team()}.Sync();
    if (ring_.warp_in_team() == 0 && lane_ < num_rows_) {
      Acc sum = 0;
      for (int i = 0; i < summers; ++i) sum += partial_dots_[buffer_][first + i][lane_];
      const bool begins = target.array == 0 && target.first == 0;
      gradient_ = begins ? sum : gradient_ + sum;
      args_.arrived_weights[row_] = static_cast<float>(gradient_);
    }
    buffer_ ^= 1;
    num_rows_ = 0;
  }

  const PushArgs& args_;
  Ring& ring_;
  PartialDots& partial_dots_;
  int lane_;
  int first_column_;  // of this thread
  Acc token_[kRingVectors][N];
  int num_rows_ = 0;  // of the present token so far; lane k holds the values of the k-th
  int row_ = 0;
  Acc dot_ = 0;
  Acc gradient_ = 0;  // in the team's first warp: the gradient of the row's weight so far
  int buffer_ = 0;
};

// A token whose rows come next.
struct ScaleTask {
  int token;             // index within its rank; T or more: no more tokens
  int64_t global_token;  // source * T + token
  TokenRows rows;
  float weight;  // of the row that the lane holds
};

// Loads the rows and factors of all ranks' tokens in order, ticket by ticket. Called by the warp that loads.
template <typename T>
__device__ void LoadScaled(const PushArgs& args, const Session& session, Ring& ring) {
  constexpr int N = 16 / sizeof(T);
  const Shape& shape = args.shape;
  const int lane = threadIdx.x % kWarp, R = shape.num_ranks, num_tokens = shape.num_tokens;
  const int columns = ring.partition().vectors() * N;
  const TicketCounter tickets{&args.peers.own().spread};
  int awaited_wave = -1;  // the wave waited for last; later tickets are never of an earlier wave
  unsigned requested = tickets.Request(lane);
  int next_token = 0, row = -1;
  int64_t next_global_token = 0;
  const auto look_up = [&] {
    const int ticket = TicketCounter::Broadcast(requested);
    requested = tickets.Request(lane);
    next_token = ticket / R;
    if (next_token >= num_tokens) return;
    next_global_token = int64_t{ticket % R} * num_tokens + next_token;
    row = lane < shape.top_k ? args.handle.received_rows[next_global_token * shape.top_k + lane] : -1;
  };
  const auto find = [&](ScaleTask& task) {
    task.token = next_token;
    if (next_token >= num_tokens) return;
    task.global_token = next_global_token;
    const bool is_row = IsRow(row, shape.capacity);
    task.rows = {row, __ballot_sync(kAllLanes, is_row)};
    task.weight = is_row ? args.row_weights[row] : 0.0f;
  };
  const auto put = [&](const ScaleTask& task, int p) {
    const TokenRows& rows = task.rows;
    const int width = static_cast<int>(args.payloads[p].row_bytes / sizeof(T));
    const T* const token = TokenRow<T>(args, p, rows, task.global_token);
    const T* const factors = static_cast<const T*>(args.factors[p]) + int64_t{rows.row} * width;
    for (int first = 0; first < width; first += columns) {
      const int vectors = min(columns, width - first) / N;
      ring.Put(1, {SlotHeader::kRow, 0, vectors, {}}, token + first, vectors * 16);
      const SlotHeader header{
          SlotHeader::kRow | SlotHeader::kLast, task.weight, vectors, {p, first, rows.row, -1}};
      ring.Put(rows.lanes, header, factors + first, vectors * 16);
    }
  };
  // The rows of the token after the next are looked up while the weights of the next are loaded. Loaded
  // values are not touched before they are needed, not even to move them, because that would wait for the
  // load.
  const auto scale = [&](const ScaleTask& task, ScaleTask& next) {
    if (task.token >= num_tokens) return false;
    find(next);
    look_up();
    if (args.spreads && args.waves.Of(task.token) != awaited_wave) {
      awaited_wave = args.waves.Of(task.token);
      if (!session.AwaitWave(awaited_wave)) return false;
      FenceBulk();
    }
    for (int p = 0; p < args.num_payloads && task.rows.lanes != 0; ++p) put(task, p);
    return true;
  };
  ScaleTask even, odd;
  look_up();
  find(even);
  look_up();
  while (scale(even, odd) && scale(odd, even)) {
  }
  EndPhase(ring);
  TicketCounter::Settle(requested);  // after the loop, because it would wait for each request there
}

// Does the work of SpreadRows through rings, if the rows are scaled and there are rings.
template <typename T>
__device__ void ScaleByRing(const PushArgs& args, const Session& session, Ring ring) {
  __shared__ typename RowScaler<T>::PartialDots partial_dots;
  if (!ring.is_used()) return;
  if (ring.loads()) {
    LoadScaled<T>(args, session, ring);
  } else {
    RowScaler<T>(args, ring, partial_dots).Run();
  }
}

}  // namespace jax_ep::cuda
