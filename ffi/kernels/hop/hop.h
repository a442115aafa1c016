// Launch of a hop between domains over NCCL's device API.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <nccl_device.h>

#include "kernels/hop/window.h"

namespace jax_ep::cuda {

// A device's view of an NCCL communicator whose ranks are the domains.
struct Gin {
  ncclDevComm comm;
  ncclWindow_t window;
};

cudaError_t LaunchHop(const HopParams& hop, const Gin& gin, cudaStream_t stream);
cudaError_t PreloadHop();

}  // namespace jax_ep::cuda
