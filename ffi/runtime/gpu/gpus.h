// The GPUs of this process: their names and links, and how JAX allocated their memory.
#pragma once

#include <cstdint>
#include <string>

namespace jax_ep {

enum class Link { kSelf, kNone, kPcie, kNvlink };

// Returns how one GPU reaches the memory of another.
Link LinkBetween(int64_t device, int64_t peer);
const char* LinkName(Link link);

// The name of a MIG instance contains "MIG".
std::string GpuName(int64_t device);
int ComputeCapability(int64_t device);  // 90 for 9.0
int NumSms(int64_t device);

// Allocation that an address belongs to.
struct Memory {
  const char* kind;
  bool reachable;  // kernels on `from_device` may read and write it
};
Memory DescribeMemory(uint64_t address, int64_t from_device);

}  // namespace jax_ep
