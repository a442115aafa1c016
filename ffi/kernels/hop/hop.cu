// Hop 1 over NCCL's device API, with one block of threads for each track.
#include "kernels/hop/exchange.cuh"
#include "kernels/hop/hop.h"
#include "kernels/launch/launch.h"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = 512;

// The network of wait.cuh by NCCL's GIN. Each track posts to a context of its own, so that tracks do not
// share a queue. Signals belong to a context: the track that posts them also reads them. A track has fewer
// unanswered posts than a queue holds (runtime/net/rails.cc requests that size), so posting never waits for
// space.
class GinNet {
 public:
  __device__ explicit GinNet(const Gin& gin)
      : gin_(gin.comm, static_cast<int>(blockIdx.x)), team_(ncclTeamWorld(gin.comm)), window_(gin.window) {}

  __device__ void Put(int domain, int64_t to, int64_t from, int64_t bytes, uint32_t signal) const {
    gin_.put(team_, domain, window_, static_cast<size_t>(to), window_, static_cast<size_t>(from),
             static_cast<size_t>(bytes), ncclGin_WeakSignalAdd{signal, 1});
  }
  __device__ void Signal(int domain, uint32_t signal, uint64_t number) const {
    gin_.signal(team_, domain, ncclGin_WeakSignalAdd{signal, number});
  }
  __device__ uint64_t ReadSignal(uint32_t signal) const { return gin_.readSignal(signal); }

 private:
  ncclGin gin_;
  ncclTeam team_;
  ncclWindow_t window_;
};

__global__ void __launch_bounds__(kThreads, 1)
    HopKernel(const __grid_constant__ HopParams hop, const __grid_constant__ Gin gin) {
  Exchange(hop, GinNet(gin));
}

}  // namespace

cudaError_t LaunchHop(const HopParams& hop, const Gin& gin, cudaStream_t stream) {
  return Launch(HopKernel, hop.window.tracks, kThreads, 0, stream, true, hop, gin);
}

cudaError_t PreloadHop() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, HopKernel);
}

}  // namespace jax_ep::cuda
