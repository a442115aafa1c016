// A push on one device, without peers.
#pragma once

#include "kernels/launch/device.h"
#include "kernels/push/args.cuh"

namespace jax_ep::cuda {

// Launches the push kernel with `args`, of which the fields of a plan are filled in here.
cudaError_t LaunchLocalPush(PushArgs& args, const Device& device, cudaStream_t stream);

}  // namespace jax_ep::cuda
