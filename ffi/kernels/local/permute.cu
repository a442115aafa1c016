// Permute: a push from rank order to expert order on one device.
#include <algorithm>

#include "kernels/launches.h"
#include "kernels/push/local.h"

namespace jax_ep::cuda {

// Launches a permute. The routed ids belong to the row map and are not needed afterwards, so they lie after
// the counts of the chunks.
cudaError_t LaunchPermute(const PermuteParams& params, const Device& device, cudaStream_t stream) {
  const cudaError_t error = LaunchCount(params.shape, params.topk_idx, params.routed_idx, params.row_map,
                                        params.chunk_counts, stream);
  if (error != cudaSuccess) return error;
  PushArgs args{};
  args.shape = params.shape;
  args.num_payloads = params.num_payloads;
  std::copy_n(params.payloads, args.num_payloads, args.payloads);
  args.topk_idx = params.topk_idx;
  args.topk_weights = params.topk_weights;
  args.handle = {params.routed_idx, params.row_map, nullptr, nullptr, nullptr};
  args.chunk_counts = params.chunk_counts;
  args.arrived_weights = params.row_weights;
  args.tokens_per_expert = params.tokens_per_expert;
  args.group_sizes = params.group_sizes;
  args.num_dropped = params.num_dropped;
  return LaunchLocalPush(args, device, stream);
}

}  // namespace jax_ep::cuda
