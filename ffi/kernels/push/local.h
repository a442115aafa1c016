// A push on one device, without peers.
#pragma once

#include "kernels/launch/device.h"
#include "kernels/push/args.cuh"

namespace jax_ep::cuda {

// Launches the push kernel with `args`, whose plan this function fills in.
cudaError_t LaunchLocalPush(PushArgs& args, const Device& device, cudaStream_t stream);

}  // namespace jax_ep::cuda
