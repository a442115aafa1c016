// Functions of the CUDA driver, found at run time because the extension does not link to libcuda.
#pragma once

#include <cuda.h>  // types only
#include <cuda_runtime_api.h>

#include <future>
#include <stdexcept>
#include <utility>

namespace jax_ep {

// Returns a function of the driver, null if the driver is older than the function.
template <typename F>
F* DriverFunction(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result);
  (void)cudaGetLastError();
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<F*>(function)
                                                                       : nullptr;
}

// Runs f on a device in a thread of its own. So the caller's device and last error, which CUDA keeps for each
// thread, do not change.
template <typename F>
auto OnDevice(int64_t device, F&& f) {
  return std::async(std::launch::async,
                    [&] {
                      const cudaError_t error = cudaSetDevice(static_cast<int>(device));
                      if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
                      return std::forward<F>(f)();
                    })
      .get();
}

}  // namespace jax_ep
