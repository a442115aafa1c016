#include <cstring>
#include <limits>
#include <type_traits>

#include "host/ops.h"
#include "host/sum.h"
#include "host/topk.h"

namespace jax_ep::host {

void Permute(const PermuteParams& params) {
  const Shape& shape = params.shape;
  std::vector<int32_t> topk_idx(int64_t{shape.num_tokens} * shape.top_k);
  std::vector<int32_t> expert_counts(shape.num_experts);
  int32_t num_rows, num_tokens;
  PushParams push{};
  push.shape = shape;
  push.topk_idx = params.topk_idx;
  push.topk_weights = params.topk_weights;
  push.payloads.assign(params.payloads, params.payloads + params.num_payloads);
  push.num_payloads = params.num_payloads;
  // With one rank, the row map holds the place of each choice.
  push.handle = {topk_idx.data(), params.row_map, &num_rows, expert_counts.data(), params.row_map};
  push.arrived_weights = params.row_weights;
  push.tokens_per_expert = params.tokens_per_expert;
  push.group_sizes = params.group_sizes;
  push.num_tokens = &num_tokens;
  push.num_dropped = params.num_dropped;
  const SendCounts counts = Count(push, {true});
  Push(push, {&push}, {&counts});
}

void Repermute(const RepermuteParams& params) {
  const int64_t num_choices = int64_t{params.num_rows} * params.top_k;
  const int64_t bytes = params.payload.row_bytes;
  std::vector<char> written(params.num_permuted);
  for (int64_t choice = 0; choice < num_choices; ++choice) {
    const int32_t row = params.row_map[choice];
    if (params.topk_weights != nullptr) params.dots[choice] = 0.0f;
    if (!IsRow(row, params.num_permuted)) continue;
    written[row] = 1;
    const std::byte* const source = params.payload.in + choice / params.top_k * bytes;
    std::byte* const target = params.payload.out + row * bytes;
    if (params.topk_weights == nullptr) {
      std::memcpy(target, source, bytes);
      continue;
    }
    const int64_t width = bytes / BytesOf(params.type);
    WithAccumulator(params.type, [&](auto* null) {
      using Acc = std::remove_pointer_t<decltype(null)>;
      params.dots[choice] = static_cast<float>(ScaleRow<Acc>(params.type, source,
                                                             RowAt(params.factors, row, width, params.type),
                                                             width, params.topk_weights[choice], target));
    });
  }
  for (int64_t row = 0; row < params.num_permuted; ++row) {
    if (!written[row]) std::memset(params.payload.out + row * bytes, 0, bytes);
  }
}

namespace {

template <typename Acc>
void SumRow(const UnpermuteParams& params, int32_t c, const int32_t* experts) {
  const int64_t width = params.y.num_elements;
  const int64_t first_choice = int64_t{c} * params.top_k;
  Acc total[kBlock], term[kBlock];
  bool is_broken = false;
  for (int32_t k = 0; k < params.top_k; ++k) {
    const int32_t row = params.row_map[first_choice + k];
    is_broken |=
        row != -1 && (!IsRow(row, params.num_permuted) || (params.bias != nullptr && experts[k] < 0));
  }
  for (int64_t first = 0; first < width; first += kBlock) {
    const int64_t n = std::min(kBlock, width - first);
    std::fill_n(total, n, is_broken ? std::numeric_limits<Acc>::quiet_NaN() : Acc{0});
    for (int32_t k = 0; k < params.top_k; ++k) {
      const int32_t row = params.row_map[first_choice + k];
      if (!IsRow(row, params.num_permuted)) continue;
      std::fill_n(term, n, Acc{0});
      AddRow<Acc>(params.y.type, RowAt(params.y.rows, row, width, params.y.type), first, n, Acc{1}, term);
      if (params.bias != nullptr && experts[k] >= 0) {
        AddRow<Acc>(params.bias->type, RowAt(params.bias->data, experts[k], width, params.bias->type), first,
                    n, Acc{1}, term);
      }
      const Acc weight =
          params.topk_weights == nullptr ? Acc{1} : static_cast<Acc>(params.topk_weights[first_choice + k]);
      for (int64_t j = 0; j < n; ++j) total[j] += weight * term[j];
    }
    StoreRow<Acc>(params.out_type, total, first, n, RowAt(params.y.out, c, width, params.out_type));
  }
}

}  // namespace

void Unpermute(const UnpermuteParams& params) {
  Shape shape{};
  shape.top_k = params.top_k;
  shape.num_experts = params.num_local_experts;
  std::vector<int32_t> experts(params.top_k, -1);
  for (int32_t c = 0; c < params.num_rows; ++c) {
    if (params.bias != nullptr) RoutedExperts(params.topk_idx, shape, c, experts.data());
    WithAccumulator(params.y.type, [&](auto* null) {
      SumRow<std::remove_pointer_t<decltype(null)>>(params, c, experts.data());
    });
  }
}

}  // namespace jax_ep::host
