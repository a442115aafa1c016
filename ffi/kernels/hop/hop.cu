// Hop 1 over NCCL's device API, with one block of threads for each track.

#include "kernels/hop/exchange.cuh"
#include "kernels/hop/gin.cuh"
#include "kernels/launch/launch.h"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = 512;

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
