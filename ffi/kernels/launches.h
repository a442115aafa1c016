// Launches of the CUDA kernels. All pointers are device pointers. Nothing here allocates memory or waits.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"
#include "kernels/launch/device.h"
#include "kernels/protocol/control.h"

namespace jax_ep::cuda {

// The layout kernel counts ranks, domains and experts in shared memory, 24 KB at most.
constexpr int kMaxLayoutRanks = 1024;
cudaError_t LaunchLayout(const LayoutParams& params, const Device& device, cudaStream_t stream);
// The state of the placement (core/balance.h) must fit in a block's shared memory.
cudaError_t LaunchBalance(const BalanceParams& params, const Device& device, cudaStream_t stream);
// Writes topk_idx, chunk_counts (see index.h), and each row's index within its chunk to sent_rows.
cudaError_t LaunchCount(const Shape& shape, const TopkIds& ids, int32_t* topk_idx, int32_t* sent_rows,
                        int32_t* chunk_counts, cudaStream_t stream);
// Records `starting`, if it is not null, before the kernel that moves rows, after the one that counts them.
cudaError_t LaunchPush(const PushParams& params, const Peers& peers, const Device& device,
                       cudaStream_t stream, cudaEvent_t starting = nullptr);
cudaError_t LaunchPull(const PullParams& params, const Peers& peers, const Device& device,
                       cudaStream_t stream);
// Launches a pull of one array whose sums travel as FP8. Each rank finds the rows of every source: by expert
// by `received_rows`, otherwise the rows of a source follow each other.
cudaError_t LaunchPullFp8(const PullParams& params, const Peers& peers, const Device& device,
                          cudaStream_t stream);
// Launch the kernels for few tokens, which use the arena (kernels/protocol/arena.h): a push that routes, and
// a pull of one array of 16- or 32-bit elements that returns no weights.
cudaError_t LaunchFewTokensPush(const PushParams& params, const Peers& peers, const Device& device,
                                cudaStream_t stream);
cudaError_t LaunchFewTokensPull(const PullParams& params, const Peers& peers, const Device& device,
                                cudaStream_t stream);
cudaError_t LaunchGather(const GatherParams& params, const Peers& peers, const Device& device,
                         cudaStream_t stream);
cudaError_t LaunchPermute(const PermuteParams& params, const Device& device, cudaStream_t stream);
cudaError_t LaunchRepermute(const RepermuteParams& params, const Device& device, cudaStream_t stream);
cudaError_t LaunchUnpermute(const UnpermuteParams& params, const Device& device, cudaStream_t stream);
// Widths are multiples of 128, and so are numbers of rows of matrices and of columns of a transpose.
cudaError_t LaunchQuantize(const QuantizeParams& params, cudaStream_t stream);
cudaError_t LaunchQuantizeGated(const QuantizeGatedParams& params, cudaStream_t stream);
cudaError_t LaunchGroupedDot(const GroupedDotParams& params, const Device& device, cudaStream_t stream);

// Load every kernel on the current device, so that none has to be loaded while a peer's kernel waits.
// PreloadDevice reads what DescribeDevice returns, for which it loads one, too.
cudaError_t PreloadDevice();
cudaError_t PreloadLayout();
cudaError_t PreloadBalance();
cudaError_t PreloadCount();
cudaError_t PreloadPush();
cudaError_t PreloadPull();
cudaError_t PreloadPullFp8();
cudaError_t PreloadFewTokensPush();
cudaError_t PreloadFewTokensPull();
cudaError_t PreloadGather();
cudaError_t PreloadRepermute();
cudaError_t PreloadUnpermute();
cudaError_t PreloadQuantize();
cudaError_t PreloadQuantizeGated();
cudaError_t PreloadGroupedDot();

}  // namespace jax_ep::cuda
