#include <type_traits>

#include "core/index.h"
#include "host/fp8.h"
#include "host/ops.h"
#include "host/sum.h"

namespace jax_ep::host {
namespace {

// A row of a token at a rank.
struct Source {
  int32_t rank;
  int32_t row;
  int32_t k;
};

// Finds a token's rows in the order of the sum: by rank and, by expert, by k within a rank.
void FindSources(const PullParams& params, const std::vector<const PullParams*>& ranks, int32_t t,
                 std::vector<Source>& sources) {
  const Shape& shape = params.shape;
  const HandleArrays& handle = params.handle;
  sources.clear();
  const int32_t width = shape.rows_per_token();
  for (int32_t i = 0; i < width; ++i) {
    const int32_t row = handle.sent_rows[int64_t{t} * width + i];
    if (!IsRow(row, shape.capacity)) continue;
    int32_t rank = i;
    if (shape.has_row_per_choice()) {
      const int32_t expert = handle.topk_idx[int64_t{t} * shape.top_k + i];
      if (!IsExpert(expert, shape.num_experts)) continue;
      rank = shape.rank_of(expert);
    }
    if (ranks[rank] != nullptr) sources.push_back({rank, row, i});
  }
  std::sort(sources.begin(), sources.end(),
            [](const Source& a, const Source& b) { return a.rank != b.rank ? a.rank < b.rank : a.k < b.k; });
}

template <typename Acc>
void SumToken(const std::vector<const PullParams*>& ranks, const PullParams& params, int32_t index, int32_t t,
              const std::vector<Source>& sources) {
  const Summand& summand = params.summands[index];
  const int64_t width = summand.num_elements;
  const bool quantizes = params.quantize != Quantize::kNone;
  static_assert(kBlock % kFp8Block == 0, "blocks of FP8 are summed as a whole");
  Acc total[kBlock], partial[kBlock];
  for (int64_t first = 0; first < width; first += kBlock) {
    const int64_t n = std::min(kBlock, width - first);
    std::fill_n(total, n, Acc{0});
    for (size_t i = 0; i < sources.size();) {
      // Sums a rank's rows separately, as if that rank had sent one row.
      const int32_t rank = sources[i].rank;
      const bool adds_directly = !quantizes && (i + 1 == sources.size() || sources[i + 1].rank != rank);
      Acc* sum = adds_directly ? total : partial;
      if (!adds_directly) std::fill_n(partial, n, Acc{0});
      for (; i < sources.size() && sources[i].rank == rank; ++i) {
        const float* weights = ranks[rank]->row_weights;
        AddRow<Acc>(summand.type,
                    RowAt(ranks[rank]->summands[index].rows, sources[i].row, width, summand.type), first, n,
                    weights == nullptr ? Acc{1} : static_cast<Acc>(weights[sources[i].row]), sum);
      }
      if constexpr (std::is_same_v<Acc, float>) {
        if (quantizes) RoundTripFp8(partial, n, params.quantize == Quantize::kFp8Rounded);
      }
      if (!adds_directly) {
        for (int64_t j = 0; j < n; ++j) total[j] += partial[j];
      }
    }
    for (int32_t b = 0; b < params.num_biases; ++b) {
      const Bias& bias = params.biases[b];
      AddRow<Acc>(bias.type, RowAt(bias.data, t, width, bias.type), first, n, Acc{1}, total);
    }
    StoreRow<Acc>(summand.type, total, first, n, RowAt(summand.out, t, width, summand.type));
  }
}

// Returns each choice's weight from the row that it was sent with.
void ReturnWeights(const std::vector<const PullParams*>& ranks, const PullParams& params, int32_t t) {
  const Shape& shape = params.shape;
  const int32_t width = shape.rows_per_token();
  for (int32_t k = 0; k < shape.top_k; ++k) {
    const int64_t choice = int64_t{t} * shape.top_k + k;
    float weight = 0.0f;
    if (const int32_t expert = params.handle.topk_idx[choice]; IsExpert(expert, shape.num_experts)) {
      const int32_t rank = shape.rank_of(expert);
      const bool by_rank = !shape.has_row_per_choice();
      const int32_t row = params.handle.sent_rows[int64_t{t} * width + (by_rank ? rank : k)];
      if (IsRow(row, shape.capacity) && ranks[rank] != nullptr) {
        const float* arrived = ranks[rank]->arrived_weights;
        weight = by_rank ? arrived[int64_t{row} * shape.top_k + k] : arrived[row];
      }
    }
    params.topk_weights[choice] = weight;
  }
}

}  // namespace

void Pull(const PullParams& params, const std::vector<const PullParams*>& ranks) {
  std::vector<Source> sources;
  for (int32_t t = 0; t < params.shape.num_tokens; ++t) {
    FindSources(params, ranks, t, sources);
    for (int32_t index = 0; index < params.num_summands; ++index) {
      WithAccumulator(params.summands[index].type, [&](auto* null) {
        SumToken<std::remove_pointer_t<decltype(null)>>(ranks, params, index, t, sources);
      });
    }
    if (params.arrived_weights != nullptr) ReturnWeights(ranks, params, t);
  }
}

}  // namespace jax_ep::host
