// Preparation of the GPUs of this process for the first op of a group.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jax_ep {

// Chooses the engine for grouped products of the current device, once, which may allocate memory and run
// kernels (products.h). Prints a warning if a slower engine computes some products. Returns an error, empty
// on success.
std::string PrepareProducts();

// Enables access from a device to its peers' memory at `addresses`, and loads all kernels on the device. Also
// prepares its products, because that must not happen once kernels of the group wait for each other.
// Negative peers belong to other processes, whose memory has been mapped. Returns an error, empty on success.
std::string PrepareDevice(int64_t device, const std::vector<int64_t>& peers,
                          const std::vector<uint64_t>& addresses);

// Returns zeroed host memory that every device reads and writes under the same address. It is never freed.
// Allocating it may wait for running kernels, so one large piece serves many groups. Throws
// std::runtime_error.
void* MappedHostMemory(int64_t device, int64_t bytes);

}  // namespace jax_ep
