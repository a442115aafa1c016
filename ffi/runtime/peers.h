// The device side of a group on GPUs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/control.h"
#include "runtime/groups.h"
#include "runtime/regions.h"

namespace jax_ep {

// Where the memory of one rank lies.
struct RankMemory {
  int64_t device;    // its ordinal; -1: the rank belongs to another process
  uint64_t control;  // address of its control block, here
  int64_t shift;     // added to an address that it publishes, gives the same memory here
};

// The control blocks of a group and its records of expired waits. They live as long as the process: a
// captured graph may hold their addresses, and a group of the same devices finds them again.
class DevicePeers {
 public:
  // Checks that every device of this process reaches its peers' memory and loads all kernels on it. `ranks`
  // are those of one group after the other. Empty text on success.
  static std::string Make(const std::vector<RankMemory>& ranks, int num_ranks,
                          std::shared_ptr<DevicePeers>& peers);

  // What the kernels of rank `place` take.
  Peers At(const Group::Place& place, double timeout_s) const;

  // Why peers in other processes cannot reach an address of rank `place`; empty if they can.
  std::string ReasonAgainst(const Group::Place& place, const void* address) const;

  // The text of the first wait that expired, empty if none did.
  std::string DescribeExpired(const std::string& group_name) const;

  // Clears the blocks of this process. Nobody may be running an op of the group.
  std::string Reset();

  static int64_t BytesPerDevice() { return sizeof(Control); }

 private:
  std::vector<RankMemory> ranks_;
  int num_ranks_ = 0;
  std::vector<Region> regions_;  // of each rank of this process, if the group spans several
  Expired* expired_ = nullptr;   // [ranks], host memory mapped to the devices
};

// Makes the peers of a group, or finds them. Empty text on success.
std::string OpenDeviceGroup(const std::string& key, const std::vector<RankMemory>& ranks, int num_ranks);
// Null if none were made.
std::shared_ptr<DevicePeers> FindDevicePeers(const std::string& key);

}  // namespace jax_ep
