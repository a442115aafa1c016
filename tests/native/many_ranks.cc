// The ranks of tokens and of their sums in ops of few tokens, as the kernels find them
// (ffi/kernels/few_tokens/ranks.cuh and route.cuh), in groups whose ranks need one word of bits or several.
// Compares them with plain loops.
#include "kernels/few_tokens/ranks.cuh"
#include "kernels/few_tokens/route.cuh"
#include "warp.h"

namespace jax_ep::cuda {
namespace {

// Runs f, in which no threads wait for each other, in a warp that stands for all warps of a block.
template <typename F>
void InBlock(F&& f) {
  InWarp([&] {
    for (int first = 0; first < kFewTokensThreads; first += kWarp) {
      emulation::Machine::Get().ActAs(first);
      f();
    }
    emulation::Machine::Get().ActAs(0);
  });
}

void Check(bool is_right, const char* of, int a, int b) {
  if (!is_right) Die("%s %d, %d is wrong", of, a, b);
}

// A group's tokens and their choices: experts [R, T, K], -1 unused.
struct Tokens {
  Shape shape;
  std::vector<int> experts;

  int R() const { return shape.num_ranks; }
  int T() const { return shape.num_tokens; }
  bool by_choice() const { return shape.has_row_per_choice(); }
  int Expert(int source, int t, int k) const { return experts[(source * T() + t) * shape.top_k + k]; }
  // Returns how many choices of a token are at rank d.
  int Choices(int source, int t, int d) const {
    int choices = 0;
    for (int k = 0; k < shape.top_k; ++k) {
      const int expert = Expert(source, t, k);
      choices += expert >= 0 && shape.rank_of(expert) == d;
    }
    return choices;
  }
  // Returns how many rows of a token go to rank d.
  int Rows(int source, int t, int d) const {
    return by_choice() ? Choices(source, t, d) : Choices(source, t, d) > 0;
  }
};

Tokens MakeTokens(std::mt19937& random, Order order, int num_ranks, int num_tokens, int top_k) {
  const int experts_of_rank = 1 + static_cast<int>(random() % 3);
  Tokens tokens{{order, num_ranks, num_tokens, top_k, num_ranks * experts_of_rank, 1 << 20, 1}, {}};
  for (int i = 0; i < num_ranks * num_tokens * top_k; ++i) {
    const int expert = static_cast<int>(random() % static_cast<unsigned>(tokens.shape.num_experts));
    tokens.experts.push_back(random() % 8 == 0 ? -1 : expert);
  }
  return tokens;
}

// Checks the row of each choice among those of its rank for the same expert.
void CheckRowsOfChoices(const Tokens& tokens, const RoutingTable& table, int source) {
  std::vector<int> rows(tokens.shape.num_experts, 0);
  for (int t = 0; t < tokens.T(); ++t) {
    int found[kWarp];
    InWarp([&] {
      const int lane = threadIdx.x, K = tokens.shape.top_k;
      const int expert = lane < K ? tokens.Expert(source, t, lane) : -1;
      const unsigned lanes = __ballot_sync(kAllLanes, expert >= 0);
      found[lane] = RowOfChoice(table, source, t * K + lane, expert, 0, 1 << 20, lanes);
    });
    for (int k = 0; k < tokens.shape.top_k; ++k) {
      const int expert = tokens.Expert(source, t, k);
      Check(found[k] == (expert < 0 ? -1 : rows[expert]++), "the row of a choice of token", t, k);
    }
  }
}

// Checks the routing table, which all ranks build alike.
template <int kRankWords>
void CheckTable(const Tokens& tokens) {
  const Shape& shape = tokens.shape;
  const int R = tokens.R(), T = tokens.T();
  std::vector<uint4> memory(static_cast<size_t>(RoutingTableBytes(shape)) / sizeof(uint4) + 1);
  const RoutingTable table(shape, reinterpret_cast<std::byte*>(memory.data()));
  for (int i = 0; i < R * T; ++i) {
    for (int k = 0; k < shape.top_k; ++k) {
      table.expert(shape, i / T, i % T, k) = static_cast<int16_t>(tokens.Expert(i / T, i % T, k));
    }
  }
  if (!tokens.by_choice()) InBlock([&] { FindRanksOfTokens<kRankWords>(shape, table); });
  std::vector<int32_t> pairs(R * R, 0);
  InBlock([&] { AddPairs<kRankWords>(shape, table, pairs.data()); });
  for (int source = 0; source < R; ++source) {
    for (int d = 0; d < R; ++d) {
      int rows = 0;
      for (int t = 0; t < T; ++t) rows += tokens.Rows(source, t, d);
      Check(pairs[source * R + d] == rows, "the number of rows between ranks", source, d);
      if (source % 16 != 0) continue;  // it takes long here
      InWarp([&] {
        Check(RowsBetween(shape, table, source, d) == rows, "the number of rows of a pair", source, d);
      });
    }
  }
  if (tokens.by_choice()) return CheckRowsOfChoices(tokens, table, R / 2);
  for (const int d : {0, R / 2, R - 1}) {
    int before = 0;
    for (int i = 0; i < R * T; ++i) {
      if (tokens.Rows(i / T, i % T, d) == 0) continue;
      InWarp([&] { Check(RowOfToken(shape, table, i, d) == before, "the row of token", i, d); });
      ++before;
    }
  }
}

// Checks where the sums of rank `me`'s tokens come from.
template <int kRankWords>
void CheckSenders(const Tokens& tokens, int me) {
  const Shape& shape = tokens.shape;
  const int R = tokens.R(), T = tokens.T(), width = shape.rows_per_token();
  std::vector<int32_t> prefix(R * R), sent(T * width, -1), ids(T * shape.top_k), index(T * R, -1);
  for (int d = 0; d < R; ++d) {
    int rows = 0, own = 0;
    for (int source = 0; source < R; ++source) {
      for (int t = 0; t < T; ++t) {
        const int more = tokens.Rows(source, t, d);
        if (source == me && more > 0) {
          index[t * R + d] = tokens.by_choice() ? t : own++;
          if (!tokens.by_choice()) sent[t * width + d] = rows;
        }
        rows += more;
      }
      prefix[source * R + d] = rows;
    }
  }
  for (int t = 0; t < T; ++t) {
    for (int k = 0; k < shape.top_k; ++k) {
      ids[t * shape.top_k + k] = tokens.Expert(me, t, k);
      if (tokens.by_choice() && tokens.Expert(me, t, k) >= 0) sent[t * width + k] = 7;  // any row
    }
  }
  HandleArrays handle{};
  handle.topk_idx = ids.data(), handle.sent_rows = sent.data(), handle.rank_prefix_matrix = prefix.data();
  Peers peers{};
  peers.rank = me;
  for (int t = 0; t < T; ++t) {
    Sender senders[kWarp];
    InWarp([&] {
      const int lane = threadIdx.x;
      senders[lane] = FindSender<kRankWords>(shape, handle, peers, t, lane);
    });
    int last = -1, found = 0, expected = 0;
    for (const Sender& sender : senders) {
      if (!sender.sends) continue;
      Check(sender.rank > last && index[t * R + sender.rank] == sender.index, "a sum's source", t,
            sender.rank);
      last = sender.rank, ++found;
    }
    for (int d = 0; d < R; ++d) expected += index[t * R + d] >= 0;
    Check(found == expected, "the number of sums", t, found);
  }
}

// Checks that all of some ranks are visited, those after `me` first.
template <int kRankWords>
void CheckVisits(std::mt19937& random, int num_ranks, int me) {
  Peers peers{};
  peers.num_ranks = num_ranks, peers.rank = me;
  RankWords<kRankWords> ranks = RankWords<kRankWords>::Below(num_ranks);
  for (uint32_t& word : ranks.words) word &= random();
  std::vector<int> expected, visited;
  for (int i = 1; i <= num_ranks; ++i) {
    if (ranks.Has((me + i) % num_ranks)) expected.push_back((me + i) % num_ranks);
  }
  ForEachRank(peers, ranks, [&](int rank) { visited.push_back(rank); });
  Check(visited == expected, "the order of ranks", num_ranks, me);
}

template <int kRankWords>
void CheckAll(std::mt19937& random, std::initializer_list<int> counts) {
  for (const int num_ranks : counts) {
    for (const int me : {0, num_ranks / 2, num_ranks - 1}) CheckVisits<kRankWords>(random, num_ranks, me);
    for (const Order order : {Order::kRank, Order::kExpert}) {
      const int num_tokens = num_ranks == 17 ? 40 : 1 + static_cast<int>(random() % 6);
      const int top_k = num_ranks == 17 ? 7 : 1 + static_cast<int>(random() % 9);
      const Tokens tokens = MakeTokens(random, order, num_ranks, num_tokens, top_k);
      CheckTable<kRankWords>(tokens);
      for (const int me : {0, num_ranks / 2, num_ranks - 1}) CheckSenders<kRankWords>(tokens, me);
    }
  }
}

}  // namespace
}  // namespace jax_ep::cuda

int main() {
  using namespace jax_ep::cuda;
  std::mt19937 random(5);
  what = "one word";
  CheckAll<1>(random, {1, 2, 3, 16, 17, 31, 32});
  what = "several words";
  CheckAll<jax_ep::kMaxRanks / jax_ep::kRankBits>(random, {2, 17, 32, 33, 63, 64, 65, 96, 100, 127, 128});
  return 0;
}
