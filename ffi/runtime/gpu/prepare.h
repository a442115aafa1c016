// What must be done on the GPUs of this process before the first op of a group.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jax_ep {

// Lets a device reach its peers' memory, which they have at `addresses`, and loads all kernels on it. Devices
// that are negative belong to other processes, whose memory has been mapped. Empty text on success.
std::string PrepareDevice(int64_t device, const std::vector<int64_t>& peers,
                          const std::vector<uint64_t>& addresses);

// Host memory of that many bytes, zero, that every device reads and writes under the same address. It is
// never freed. Making it may wait for kernels that run, so that one large piece serves many groups. Throws
// std::runtime_error.
void* MappedHostMemory(int64_t device, int64_t bytes);

}  // namespace jax_ep
