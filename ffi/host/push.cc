#include <algorithm>
#include <cstring>

#include "core/index.h"
#include "host/ops.h"
#include "host/sum.h"
#include "host/topk.h"

namespace jax_ep::host {
namespace {

// Rows [begin, end) of a receive buffer that hold no token: padding or tail.
struct Gap {
  int64_t begin;
  int64_t end;
};

// Returns, by expert, the starts of the blocks of a rank's experts, and last the start of the tail [L + 1].
std::vector<int64_t> FindStarts(const Shape& shape, const int32_t* rows) {
  std::vector<int64_t> starts(shape.num_local_experts() + 1);
  for (int32_t local = 0; local < shape.num_local_experts(); ++local) {
    starts[local + 1] = starts[local] + shape.BlockOf(rows[local]);
  }
  return starts;
}

// Returns the padding and the tail of a rank's receive buffer, or the empty rows of its places.
std::vector<Gap> FindGaps(const Shape& shape, const HandleArrays& handle, int rank) {
  const int64_t capacity = shape.capacity;
  std::vector<Gap> gaps;
  const auto add = [&](int64_t begin, int64_t end) {
    begin = std::clamp<int64_t>(begin, 0, capacity);
    end = std::clamp<int64_t>(end, 0, capacity);
    if (begin < end) gaps.push_back({begin, end});
  };
  if (shape.order == Order::kPlaced) {
    for (int32_t place = 0; place < shape.num_counts(); ++place) {
      const int64_t begin = int64_t{place} * shape.alignment;
      add(begin + std::max(handle.expert_counts[place], 0), begin + shape.alignment);
    }
    return gaps;
  }
  if (!shape.has_expert_blocks()) {
    add(handle.rank_prefix_matrix[(shape.num_ranks - 1) * shape.num_ranks + rank], capacity);
    return gaps;
  }
  const std::vector<int64_t> starts = FindStarts(shape, handle.expert_counts);
  for (int32_t local = 0; local < shape.num_local_experts(); ++local) {
    add(starts[local] + handle.expert_counts[local], starts[local + 1]);
  }
  add(starts.back(), capacity);
  return gaps;
}

// Zeros the rows that hold no token in a rank's own receive buffers.
void ClearGaps(const PushParams& params, int rank) {
  const int64_t weights_per_row = params.shape.weights_per_row();
  for (const Gap& gap : FindGaps(params.shape, params.handle, rank)) {
    for (int32_t p = 0; p < params.num_payloads; ++p) {
      const int64_t bytes = params.payloads[p].row_bytes;
      std::memset(params.payloads[p].out + gap.begin * bytes, 0, (gap.end - gap.begin) * bytes);
    }
    if (params.arrived_weights != nullptr) {
      std::fill(params.arrived_weights + gap.begin * weights_per_row,
                params.arrived_weights + gap.end * weights_per_row, 0.0f);
    }
  }
}

// Sends token t's row times the weight of its place, and the row's dot product with the factors.
void SendScaled(const PushParams& params, int32_t t, const PushParams& receiver, int64_t row) {
  const float weight = receiver.row_weights[row];
  double dot = 0;
  for (int32_t p = 0; p < params.num_payloads; ++p) {
    const int64_t bytes = params.payloads[p].row_bytes;
    WithAccumulator(params.factor_type, [&](auto* null) {
      using Acc = std::remove_pointer_t<decltype(null)>;
      dot +=
          ScaleRow<Acc>(params.factor_type, params.payloads[p].in + t * bytes,
                        static_cast<const std::byte*>(receiver.factors[p]) + row * bytes,
                        bytes / BytesOf(params.factor_type), weight, receiver.payloads[p].out + row * bytes);
    });
  }
  receiver.arrived_weights[row] = static_cast<float>(dot);
}

// Sends token t to row `row` of a receiver; `k` is the choice that the row stands for by expert.
void Send(const PushParams& params, int32_t t, int32_t k, const PushParams& receiver, int32_t receiver_rank,
          int64_t row) {
  if (params.scales()) return SendScaled(params, t, receiver, row);
  const Shape& shape = params.shape;
  for (int32_t p = 0; p < params.num_payloads; ++p) {
    const int64_t bytes = params.payloads[p].row_bytes;
    std::memcpy(receiver.payloads[p].out + row * bytes, params.payloads[p].in + t * bytes, bytes);
  }
  if (params.topk_weights == nullptr) return;
  const int64_t first = int64_t{t} * shape.top_k;
  if (shape.has_row_per_choice()) {
    receiver.arrived_weights[row] = params.topk_weights[first + k];
    return;
  }
  for (int32_t j = 0; j < shape.top_k; ++j) {
    const int32_t expert = params.handle.topk_idx[first + j];
    const bool is_local = expert >= 0 && shape.rank_of(expert) == receiver_rank;
    receiver.arrived_weights[row * shape.top_k + j] = is_local ? params.topk_weights[first + j] : 0.0f;
  }
}

// Returns the first row of a rank's block in each receiver's buffer: [R] by rank, [E] by expert.
std::vector<int64_t> FirstRows(const Shape& shape, const std::vector<const SendCounts*>& counts, int rank) {
  const bool by_rank = !shape.has_expert_blocks();
  std::vector<int64_t> first(by_rank ? shape.num_ranks : shape.num_experts);
  std::vector<int32_t> totals(first.size());
  for (size_t i = 0; i < first.size(); ++i) {
    for (int32_t source = 0; source < shape.num_ranks; ++source) {
      const int32_t rows = by_rank ? counts[source]->to_rank[i] : counts[source]->to_expert[i];
      if (source < rank) first[i] += rows;
      totals[i] += rows;
    }
  }
  const int32_t num_local = shape.num_local_experts();
  for (int32_t receiver = 0; receiver < shape.num_ranks && !by_rank; ++receiver) {
    const std::vector<int64_t> starts = FindStarts(shape, &totals[receiver * num_local]);
    for (int32_t local = 0; local < num_local; ++local) first[receiver * num_local + local] += starts[local];
  }
  return first;
}

// Counts, by rank, the kept (row, k) pairs of each local expert. Visits single tokens only of the source
// whose block the capacity cuts.
void CountKeptPairs(const PushParams& params, const std::vector<const PushParams*>& ranks,
                    const std::vector<const SendCounts*>& counts) {
  const int rank = params.rank;
  const Shape& shape = params.shape;
  const int32_t num_local = shape.num_local_experts();
  const int32_t first_expert = rank * num_local;
  std::fill_n(params.tokens_per_expert, num_local, 0);
  int64_t row = 0;
  for (int32_t source = 0; source < shape.num_ranks; ++source) {
    const int64_t end = row + counts[source]->to_rank[rank];
    if (end <= shape.capacity) {
      for (int32_t local = 0; local < num_local; ++local) {
        params.tokens_per_expert[local] += counts[source]->to_expert[first_expert + local];
      }
    } else {
      const int32_t* ids = ranks[source]->handle.topk_idx;
      for (int32_t t = 0; t < shape.num_tokens && row < shape.capacity; ++t) {
        bool sent = false;
        for (int32_t k = 0; k < shape.top_k; ++k) {
          const int32_t expert = ids[int64_t{t} * shape.top_k + k];
          if (expert < 0 || shape.rank_of(expert) != rank) continue;
          ++params.tokens_per_expert[expert - first_expert];
          sent = true;
        }
        row += sent;
      }
    }
    row = end;
    if (row >= shape.capacity) break;
  }
}

// Fills the results that the counts alone determine, for this rank as a receiver.
void FillReceiver(const PushParams& params, const std::vector<const PushParams*>& ranks,
                  const std::vector<const SendCounts*>& counts) {
  const int rank = params.rank;
  const Shape& shape = params.shape;
  const int32_t R = shape.num_ranks, L = shape.num_local_experts();
  for (int32_t receiver = 0; receiver < R; ++receiver) {
    int32_t rows = 0;
    for (int32_t source = 0; source < R; ++source) {
      rows += counts[source]->to_rank[receiver];
      params.handle.rank_prefix_matrix[source * R + receiver] = rows;
    }
  }
  for (int32_t local = 0; local < L; ++local) {
    int32_t pairs = 0;
    for (int32_t source = 0; source < R; ++source) {
      pairs += counts[source]->to_expert[rank * L + local];
    }
    params.handle.expert_counts[local] = pairs;
  }

  const int64_t num_rows = params.handle.rank_prefix_matrix[(R - 1) * R + rank];
  int64_t kept = 0;
  if (!shape.has_expert_blocks()) {
    kept = RowsKept(0, num_rows, shape.capacity);
    CountKeptPairs(params, ranks, counts);
    std::fill(params.arrived_idx + kept * shape.top_k,
              params.arrived_idx + int64_t{shape.capacity} * shape.top_k, -1);
  } else {
    const std::vector<int64_t> starts = FindStarts(shape, params.handle.expert_counts);
    for (int32_t local = 0; local < L; ++local) {
      const int64_t begin = starts[local], end = begin + params.handle.expert_counts[local];
      params.tokens_per_expert[local] = RowsKept(begin, end, shape.EndOf(local));
      params.group_sizes[local] = shape.has_fixed_blocks()
                                      ? params.tokens_per_expert[local]
                                      : RowsKept(begin, starts[local + 1], shape.capacity);
      kept += params.tokens_per_expert[local];
    }
  }
  *params.num_tokens = static_cast<int32_t>(kept);
  *params.num_dropped = static_cast<int32_t>(num_rows - kept);
}

// Finds the places of this rank's rows and sends the rows.
void RouteRows(const PushParams& params, const std::vector<const PushParams*>& ranks,
               const std::vector<const SendCounts*>& counts) {
  const int rank = params.rank;
  const Shape& shape = params.shape;
  const bool by_rank = !shape.has_row_per_choice();
  const int32_t num_local = shape.num_local_experts();
  std::vector<int64_t> next = FirstRows(shape, counts, rank);
  const int32_t width = shape.rows_per_token();
  std::fill_n(params.handle.sent_rows, int64_t{shape.num_tokens} * width, -1);
  const int64_t choices = int64_t{shape.num_tokens} * shape.top_k;  // of one rank
  for (int32_t peer = 0; peer < shape.num_ranks && !by_rank; ++peer) {
    // The receivers fill the entries of a rank that does not take part.
    int32_t* const received = ranks[peer] == nullptr ? params.handle.received_rows + peer * choices
                                                     : ranks[peer]->handle.received_rows + rank * choices;
    std::fill_n(received, choices, -1);
  }
  for (int32_t t = 0; t < shape.num_tokens; ++t) {
    const int32_t* experts = params.handle.topk_idx + int64_t{t} * shape.top_k;
    for (int32_t k = 0; k < shape.top_k; ++k) {
      if (experts[k] < 0 || (by_rank && !IsFirstOnRank(experts, k, num_local))) continue;
      const int32_t receiver = shape.rank_of(experts[k]);
      const int64_t row = next[by_rank ? receiver : experts[k]]++;
      if (row >= (by_rank ? shape.capacity : shape.EndOf(experts[k] % num_local))) continue;
      params.handle.sent_rows[int64_t{t} * width + (by_rank ? receiver : k)] = static_cast<int32_t>(row);
      Send(params, t, k, *ranks[receiver], receiver, row);
      if (!by_rank) {
        const int64_t choice = rank * choices + int64_t{t} * shape.top_k + k;
        ranks[receiver]->handle.received_rows[choice] = static_cast<int32_t>(row);
        continue;
      }
      int32_t* arrived_idx = ranks[receiver]->arrived_idx + row * shape.top_k;
      for (int32_t j = 0; j < shape.top_k; ++j) {
        const bool is_local = experts[j] >= 0 && shape.rank_of(experts[j]) == receiver;
        arrived_idx[j] = is_local ? experts[j] - receiver * num_local : -1;
      }
    }
  }
}

// Sends this rank's rows to the places in the handle.
void SendRows(const PushParams& params, const std::vector<const PushParams*>& ranks) {
  const Shape& shape = params.shape;
  const int32_t width = shape.rows_per_token();
  for (int32_t t = 0; t < shape.num_tokens; ++t) {
    for (int32_t i = 0; i < width; ++i) {
      const int32_t row = params.handle.sent_rows[int64_t{t} * width + i];
      if (!IsRow(row, shape.capacity)) continue;
      int32_t receiver = i;
      if (shape.has_row_per_choice()) {
        const int32_t expert = params.handle.topk_idx[int64_t{t} * shape.top_k + i];
        if (!IsExpert(expert, shape.num_experts)) continue;
        receiver = shape.rank_of(expert);
      }
      Send(params, t, i, *ranks[receiver], receiver, row);
    }
  }
}

}  // namespace

SendCounts Count(const PushParams& params, const std::vector<bool>& active) {
  const Shape& shape = params.shape;
  const int32_t num_local = shape.num_local_experts();
  SendCounts counts(shape);
  for (int32_t t = 0; t < shape.num_tokens; ++t) {
    int32_t* experts = params.handle.topk_idx + int64_t{t} * shape.top_k;
    RoutedExperts(params.topk_idx, shape, t, experts);
    for (int32_t k = 0; k < shape.top_k; ++k) {
      if (experts[k] < 0) continue;
      if (!active[params.rank] || !active[shape.rank_of(experts[k])]) {
        experts[k] = -1;
        continue;
      }
      ++counts.to_expert[experts[k]];
      if (shape.has_row_per_choice() || IsFirstOnRank(experts, k, num_local)) {
        ++counts.to_rank[shape.rank_of(experts[k])];
      }
    }
  }
  return counts;
}

void Push(const PushParams& params, const std::vector<const PushParams*>& ranks,
          const std::vector<const SendCounts*>& counts) {
  if (params.routes()) FillReceiver(params, ranks, counts);
  ClearGaps(params, params.rank);
  if (params.routes()) {
    RouteRows(params, ranks, counts);
  } else {
    SendRows(params, ranks);
  }
}

}  // namespace jax_ep::host
