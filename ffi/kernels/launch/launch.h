// Launches of kernels.
#pragma once

#include <cuda_runtime.h>

namespace jax_ep::cuda {

// Launches a kernel. An error is told here once: it does not stay behind as the thread's last one, which
// somebody else would take for theirs.
template <typename... Params, typename... Args>
cudaError_t LaunchAs(const cudaLaunchConfig_t& config, void (*kernel)(Params...), const Args&... args) {
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}

// `together`: the kernel's blocks wait for each other and for peers, so that they must all run at the same
// time. The launch then fails if the device could never run so many, and begins once there is room for all of
// them; half of them would wait for the others in vain.
template <typename... Params, typename... Args>
cudaError_t Launch(void (*kernel)(Params...), dim3 blocks, int num_threads, int64_t shared_bytes,
                   cudaStream_t stream, bool cooperative, const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(num_threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cooperative ? 1 : 0;
  return LaunchAs(config, kernel, args...);
}

}  // namespace jax_ep::cuda
