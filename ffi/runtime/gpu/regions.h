// Memory that XLA allocated, shared with other processes.
//
// A region is one allocation. With preallocation, XLA's default, it is all memory that XLA has on a device.
// Its owner exports it, and other processes map all of it into their address space. Between processes of one
// host it travels as a file descriptor. Between hosts of one NVLink domain it travels as a fabric handle,
// which is 64 bytes that mean the same on all of them. (XLA allocates memory that can be exported so if the
// driver says that the GPU belongs to such a domain, and each process needs an IMEX channel of it.)
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace jax_ep {

using FabricHandle = std::array<char, 64>;

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

// The same between hosts.
FabricHandle ExportFabricRegion(uint64_t address, int64_t device);
uint64_t ImportFabricRegion(const FabricHandle& handle, uint64_t bytes, const std::vector<int64_t>& devices);

// Throws unless this GPU's host is in the NVLink domain of a fabric handle. Maps nothing.
void TryFabricHandle(const FabricHandle& handle, int64_t device);

}  // namespace jax_ep
