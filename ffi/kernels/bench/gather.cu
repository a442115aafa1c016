// Gather: sends all rows of every rank to every rank by plain copies. The benchmark compares the other ops
// with it, because it uses only the links and does no other work.
#include "kernels/launch/launch.h"
#include "kernels/launches.h"
#include "kernels/protocol/session.cuh"
#include "kernels/ptx/bulk.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = 12;  // warps that copy in bulk, with two stages each
constexpr int64_t kStageBytes = 8 * 1024;
constexpr int kStaticBytes = 1024;  // at most, of the shared memory of a block

__device__ void GatherInBulk(const GatherParams& params, const Published* published, std::byte* stages,
                             uint64_t* barriers) {
  const int num_ranks = params.num_ranks, warp = threadIdx.x / kWarp;
  const int64_t bytes = params.rows * params.row_bytes, step = int64_t{gridDim.x} * kWarps * kStageBytes;
  int64_t offset = (int64_t{blockIdx.x} * kWarps + warp) * kStageBytes;
  const auto size = [&](int64_t from) { return static_cast<uint32_t>(min(kStageBytes, bytes - from)); };
  if (offset < bytes) BulkLoad(stages, params.in + offset, size(offset), &barriers[0]);
  for (uint32_t n = 0; offset < bytes; ++n, offset += step) {
    const int stage = n % 2;
    WaitForStoresRead();
    if (offset + step < bytes) {
      BulkLoad(stages + (1 - stage) * kStageBytes, params.in + offset + step, size(offset + step),
               &barriers[1 - stage]);
    }
    WaitForLoad(&barriers[stage], n / 2 % 2);
    for (int i = 0; i < num_ranks; ++i) {
      const int to = (params.rank + i) % num_ranks;
      std::byte* const out = static_cast<std::byte*>(published[to].buffers[0]) + params.rank * bytes;
      BulkStore(out + offset, stages + stage * kStageBytes, size(offset));
    }
    CommitStores();
  }
  WaitForStores();
}

__device__ void GatherByStores(const GatherParams& params, const Published* published) {
  const int64_t bytes = params.rows * params.row_bytes;
  const uint4* in = reinterpret_cast<const uint4*>(params.in);
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < bytes / 16;
       i += int64_t{gridDim.x} * kThreads) {
    const uint4 value = in[i];
    for (int r = 0; r < params.num_ranks; ++r) {
      const int to = (params.rank + r) % params.num_ranks;
      std::byte* const out = static_cast<std::byte*>(published[to].buffers[0]) + params.rank * bytes;
      reinterpret_cast<uint4*>(out)[i] = value;
    }
  }
}

template <bool kInBulk>
__global__ void __launch_bounds__(kThreads, 1)
    GatherKernel(const __grid_constant__ GatherParams params, const __grid_constant__ Peers peers) {
  extern __shared__ __align__(128) std::byte shared[];  // what the ranks publish, the stages
  __shared__ Published outgoing;
  __shared__ uint64_t barriers[kWarps][2];
  Published* const published = reinterpret_cast<Published*>(shared);
  std::byte* const stages = shared + PublishedBytes(params.num_ranks);
  const int warp = threadIdx.x / kWarp;
  const bool copies = kInBulk && warp < kWarps && threadIdx.x % kWarp == 0;
  if (copies) InitBarriers(barriers[warp]);
  const Opening opening(peers, params.position_operand);
  Session session(peers, Op::kGather, false);
  if (threadIdx.x == 0) outgoing = {0, nullptr, nullptr, {params.out}, {}};
  bool alive = session.Open(opening);
  if (alive && blockIdx.x == 0) session.Publish(outgoing, 1);
  alive = alive && session.Meet(1, published);
  const auto fill = [&] { FillResult(params.out, params.num_ranks * params.rows * params.row_bytes); };
  if (!alive) return session.Abort(fill);
  if (!kInBulk) GatherByStores(params, published);
  if (copies) GatherInBulk(params, published, stages + int64_t{2} * warp * kStageBytes, barriers[warp]);
  session.Leave();
  if (blockIdx.x == gridDim.x - 1) (void)session.AwaitLeft(published);
  session.Close(fill);
}

}  // namespace

cudaError_t LaunchGather(const GatherParams& params, const Peers& peers, const Device& device,
                         cudaStream_t stream) {
  // The more SMs, the faster, but with diminishing returns. The rest is left to other kernels.
  const int blocks = device.num_sms * 3 / 4;
  const int64_t published = PublishedBytes(params.num_ranks), in_bulk = published + 2 * kWarps * kStageBytes;
  // This must be the same for all shapes, because another thread may be about to launch the same kernel.
  const int max_bytes = device.shared_bytes - kStaticBytes;
  if (!device.copies_in_bulk || in_bulk > max_bytes) {
    return Launch(GatherKernel<false>, blocks, kThreads, published, stream, true, params, peers);
  }
  const cudaError_t error =
      cudaFuncSetAttribute(GatherKernel<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, max_bytes);
  if (error != cudaSuccess) return error;
  return Launch(GatherKernel<true>, blocks, kThreads, in_bulk, stream, true, params, peers);
}

cudaError_t PreloadGather() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, GatherKernel<false>);
  return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, GatherKernel<true>) : error;
}

}  // namespace jax_ep::cuda
