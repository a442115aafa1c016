// Launches of kernels.
#pragma once

#include <cuda_runtime.h>

namespace jax_ep::cuda {

// Launches a kernel. An error is returned only here. It is cleared as the thread's last error, because other
// code would take it for its own.
template <typename... Params, typename... Args>
cudaError_t LaunchAs(const cudaLaunchConfig_t& config, void (*kernel)(Params...), const Args&... args) {
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}

// Launches a kernel. `cooperative`: its blocks wait for each other and for peers, so all of them must run at
// the same time. The launch then fails if the device cannot run so many blocks at once. Otherwise it begins
// when there is room for all of them; if only some could run, they would wait forever.
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

// Records an event, if it is not null, before a launch. Clears an error as a launch does.
inline cudaError_t RecordStart(cudaEvent_t starting, cudaStream_t stream) {
  const cudaError_t error = starting == nullptr ? cudaSuccess : cudaEventRecord(starting, stream);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}

}  // namespace jax_ep::cuda
