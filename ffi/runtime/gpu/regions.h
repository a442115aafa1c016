// Memory that XLA allocated, shared with other processes of this host.
//
// A region is one allocation. With preallocation, XLA's default, it is all memory that XLA has on a device.
// Its owner exports it as a file descriptor, and other processes map all of it into their address space.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jax_ep {

struct Region {
  uint64_t base = 0;
  uint64_t bytes = 0;

  bool Contains(uint64_t address) const { return address >= base && address - base < bytes; }
};

// Returns the region of an address on this GPU. Throws std::runtime_error, as the other functions here.
Region FindRegion(uint64_t address, int64_t device);

// Returns a file descriptor of the region of an address on this GPU. The caller closes it.
int ExportRegion(uint64_t address, int64_t device);

// Maps a region of another process for these GPUs, for the life of this process. Returns its base in this
// process. The caller keeps the descriptor.
uint64_t ImportRegion(int descriptor, uint64_t bytes, const std::vector<int64_t>& devices);

}  // namespace jax_ep
