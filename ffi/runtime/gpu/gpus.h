// The GPUs that this process sees: their names and links, and how JAX got their memory.
#pragma once

#include <cstdint>
#include <string>

namespace jax_ep {

enum class Link { kSelf, kNone, kPcie, kNvlink };

// How one GPU reaches the memory of another.
Link LinkBetween(int64_t device, int64_t peer);
const char* NameOf(Link link);

// Name, compute capability and SMs. Of a MIG instance the name says so.
std::string GpuName(int64_t device);
int ComputeCapability(int64_t device);  // 90 for 9.0
int NumSms(int64_t device);

// The allocation that an address belongs to.
struct Memory {
  const char* kind;
  bool reachable;  // kernels on the asking device may read and write it
};
Memory DescribeMemory(uint64_t address, int64_t from_device);

}  // namespace jax_ep
