// Memory that XLA allocated, shared with other processes of this host.
//
// A region is one allocation: with preallocation, XLA's default, all that it has on a device. Its owner
// exports it as a file descriptor, and others map it whole into their own address space.
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

// The region that an address on this GPU lies in. Throws std::runtime_error, as the others here.
Region FindRegion(uint64_t address, int64_t device);

// A file descriptor of the region that an address on this GPU lies in; the caller closes it.
int ExportRegion(uint64_t address, int64_t device);

// Maps another process's region of that many bytes, for these GPUs, for the life of this process. Returns its
// base here. The descriptor stays the caller's.
uint64_t ImportRegion(int descriptor, uint64_t bytes, const std::vector<int64_t>& devices);

}  // namespace jax_ep
