// The kernels' own loops for long rows (ffi/kernels/push/scale_by_ring.cuh, ffi/kernels/pull/by_ring.cuh),
// with rows of a few float32 numbers: the arrays that they work on, and what must be in them in the end.
#pragma once

#include "kernels/pull/by_ring.cuh"
#include "kernels/push/scale_by_ring.cuh"

namespace jax_ep::cuda {

constexpr int kRingBlocks = 4;    // most of a kernel
constexpr int kRingThreads = 64;  // of a block: one team of a warp that loads and a warp that computes
constexpr int kRingColumns = 4;   // of a row: one vector of 16 bytes
constexpr int kRingChoices = 2;   // of a token at each rank that it goes to
constexpr int kRingRanks = 16;    // most that a pulled token goes to: their choices are one warp's lanes
constexpr RingPartition kRingPartition{1, 1, kMinSlots, 128};

// What the rows of an op are made of, small enough that sums are exact.
struct RingNumbers {
  uint32_t op;
  int num_ranks, tokens;

  float Small(int kind, int a, int b) const {
    uint32_t hash = op * 0x9e3779b1u ^ static_cast<uint32_t>(kind) << 28 ^
                    static_cast<uint32_t>(a) * 0x85ebca77u ^ static_cast<uint32_t>(b) * 0xc2b2ae3du;
    hash = (hash ^ hash >> 15) * 0x27d4eb2fu;
    return static_cast<float>(1 + (hash >> 16) % 7);
  }
  // A token of rank `from`, as rank `to` has it.
  float Token(int from, int to, int token, int column) const {
    return Small(1, from * kMaxRanks + to, token * kRingColumns + column);
  }
  float Weight(int row) const { return Small(2, row, 0); }
  float Factor(int row, int column) const { return Small(3, row, column); }
  // Whether a token has a second row at a rank.
  bool IsTwice(int global_token) const { return Small(4, global_token, 0) > 3; }
  int num_global() const { return num_ranks * tokens; }
  // The ranks that a pulled token goes to are RankOf(global_token, 0 ... ranks_per_token() - 1).
  int ranks_per_token() const { return std::min(num_ranks, kRingRanks); }
  int RankOf(int global_token, int i) const { return (global_token + i) % num_ranks; }
};

// The arrays of one rank. Rows 2 g and 2 g + 1 are those of global token g: where it arrives, and a copy.
struct RingArrays {
  std::vector<float> rows, out, factors, partials, weights, gradients;
  std::vector<int32_t> received_rows, sent_rows, topk_idx;
  PushArgs push{};
  PullArgs pull{};
  struct alignas(128) Shared {
    std::byte slots[kMinSlots * 128];
    RingMemory memory;
  };
  std::unique_ptr<Shared[]> shared;  // of each block

  Ring RingOf(const RingPartition& partition, unsigned block) const {
    return {partition, &shared[block].memory, shared[block].slots};
  }

  // A push that scales: tokens arrive in `out`.
  void InitPush(const RingNumbers& numbers, const Peers& peers, const Waves& waves) {
    const int global = numbers.num_global(), rows_here = kRingChoices * global;
    out.assign(rows_here * kRingColumns, -1.0f);
    gradients.assign(rows_here, -1.0f);
    for (int row = 0; row < rows_here; ++row) {
      const bool is_there = row % 2 == 0 || numbers.IsTwice(row / 2);
      received_rows.push_back(is_there ? row : -1);
      weights.push_back(numbers.Weight(row));
      for (int column = 0; column < kRingColumns; ++column) factors.push_back(numbers.Factor(row, column));
    }
    push.shape = {
        Order::kExpert, numbers.num_ranks, numbers.tokens, kRingChoices, numbers.num_ranks, rows_here, 1};
    push.peers = peers;
    push.handle.received_rows = received_rows.data();
    push.num_payloads = 1;
    push.payloads[0] = {nullptr, reinterpret_cast<std::byte*>(out.data()), kRingColumns * 4, 0};
    push.factors[0] = factors.data();
    push.row_weights = weights.data();
    push.arrived_weights = gradients.data();
    push.spreads = true;
    push.waves = waves;
    push.ring = kRingPartition;
    shared = std::make_unique<Shared[]>(kRingBlocks);
  }

  // A pull of this rank's tokens from all ranks. If it folds, a rank has up to two rows of each token.
  void InitPull(const RingNumbers& numbers, const Peers& peers, const Waves& waves, bool folds, int pullers,
                int sums_per_ticket) {
    const int R = numbers.num_ranks, global = numbers.num_global();
    const int K = kRingChoices * numbers.ranks_per_token();
    const auto is_there = [&](int g, int k) { return k % 2 == 0 || (folds && numbers.IsTwice(g)); };
    out.assign(numbers.tokens * kRingColumns, -1.0f);
    partials.assign(global * kRingColumns, -1.0f);
    for (int row = 0; row < kRingChoices * global; ++row) {
      const int g = row / 2;
      for (int column = 0; column < kRingColumns; ++column) {
        rows.push_back(
            numbers.Token(peers.rank, g / numbers.tokens, g % numbers.tokens * 2 + row % 2, column));
      }
    }
    for (int g = 0; g < global; ++g) {
      for (int k = 0; k < K; ++k)
        received_rows.push_back(numbers.RankOf(g, k / 2) == peers.rank && is_there(g, k) ? 2 * g + k % 2
                                                                                         : -1);
    }
    for (int t = 0; t < numbers.tokens; ++t) {
      const int g = peers.rank * numbers.tokens + t;
      for (int k = 0; k < K && folds; ++k) {
        topk_idx.push_back(kRingChoices * numbers.RankOf(g, k / 2) + k % 2);
        sent_rows.push_back(is_there(g, k) ? 2 * g + k % 2 : -1);
      }
      for (int r = 0; r < R && !folds; ++r) sent_rows.push_back(2 * g);
    }
    pull.shape = {folds ? Order::kExpert : Order::kRank,
                  R,
                  numbers.tokens,
                  folds ? K : 1,
                  kRingChoices * R,
                  kRingChoices * global,
                  1};
    pull.peers = peers;
    pull.handle.topk_idx = topk_idx.data();
    pull.handle.sent_rows = sent_rows.data();
    pull.handle.received_rows = received_rows.data();
    pull.num_summands = 1;
    pull.summands[0] = {rows.data(), out.data(), kRingColumns, Float::kF32, partials.data()};
    pull.folds = folds;
    pull.num_pullers = pullers;
    pull.sums_per_ticket = std::min(sums_per_ticket, kWarp / pull.shape.top_k);
    pull.waves = waves;
    pull.ring = kRingPartition;
    shared = std::make_unique<Shared[]>(kRingBlocks);
  }

  bool Owns(const void* at) const {
    const auto is_in = [&](const std::vector<float>& array) {
      return at >= array.data() && at < array.data() + array.size();
    };
    return is_in(rows) || is_in(out) || is_in(partials) || is_in(factors) || is_in(weights);
  }

  // Returns what is wrong with the results, or null.
  const char* FindWrongInPush(const RingNumbers& numbers, int me) const {
    for (int row = 0; row < kRingChoices * numbers.num_global(); ++row) {
      const int g = row / 2;
      if (row % 2 != 0 && !numbers.IsTwice(g)) continue;
      float dot = 0;
      for (int column = 0; column < kRingColumns; ++column) {
        const float token = numbers.Token(g / numbers.tokens, me, g % numbers.tokens, column);
        if (out[row * kRingColumns + column] != numbers.Weight(row) * token) return "a row is not scaled";
        dot += numbers.Factor(row, column) * token;
      }
      if (gradients[row] != dot) return "a weight's gradient is wrong";
    }
    return nullptr;
  }
  const char* FindWrongInPull(const RingNumbers& numbers, int me) const {
    for (int t = 0; t < numbers.tokens; ++t) {
      const int g = me * numbers.tokens + t, count = pull.folds && numbers.IsTwice(g) ? 2 : 1;
      for (int column = 0; column < kRingColumns; ++column) {
        float sum = 0;
        for (int j = 0; j < (pull.folds ? numbers.ranks_per_token() : numbers.num_ranks); ++j) {
          for (int i = 0; i < count; ++i) sum += numbers.Token(numbers.RankOf(g, j), me, t * 2 + i, column);
        }
        if (out[t * kRingColumns + column] != sum) return "a sum is wrong";
      }
    }
    return nullptr;
  }
};

}  // namespace jax_ep::cuda
