#include <algorithm>

#include "core/index.h"
#include "host/ops.h"
#include "host/topk.h"

namespace jax_ep::host {

void Layout(const LayoutParams& params) {
  const Shape& shape = params.shape;
  const int32_t num_domains = shape.num_ranks / params.ranks_per_domain;
  std::fill_n(params.num_tokens_per_rank, shape.num_ranks, 0);
  std::fill_n(params.num_tokens_per_domain, num_domains, 0);
  std::fill_n(params.num_tokens_per_expert, shape.num_experts, 0);

  std::vector<int32_t> experts(shape.top_k);
  std::vector<char> in_domain(num_domains);
  for (int32_t t = 0; t < shape.num_tokens; ++t) {
    bool* in_rank = params.is_token_in_rank + int64_t{t} * shape.num_ranks;
    std::fill_n(in_rank, shape.num_ranks, false);
    std::fill(in_domain.begin(), in_domain.end(), 0);
    RoutedExperts(params.topk_idx, shape, t, experts.data());
    for (int32_t k = 0; k < shape.top_k; ++k) {
      if (experts[k] < 0) continue;
      ++params.num_tokens_per_expert[experts[k]];
      in_rank[shape.rank_of(experts[k])] = true;
    }
    for (int32_t rank = 0; rank < shape.num_ranks; ++rank) {
      if (!in_rank[rank]) continue;
      ++params.num_tokens_per_rank[rank];
      in_domain[rank / params.ranks_per_domain] = 1;
    }
    for (int32_t domain = 0; domain < num_domains; ++domain) {
      params.num_tokens_per_domain[domain] += in_domain[domain];
    }
  }
}

}  // namespace jax_ep::host
