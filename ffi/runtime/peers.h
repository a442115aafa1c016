// The device side of a group whose ranks are GPUs of this process.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/control.h"
#include "runtime/groups.h"

namespace jax_ep {

// The control blocks of a group's devices. Once made, they live as long as the process: a captured graph
// may hold their addresses, and a group of the same devices finds them again.
class DevicePeers {
 public:
  // Checks that every device reaches its peers' memory, loads all kernels on it and allocates its block.
  // `samples` are addresses of arrays, one of each device. Empty text on success.
  static std::string Make(const std::vector<int64_t>& devices, const std::vector<uint64_t>& samples,
                          int num_ranks, std::shared_ptr<DevicePeers>& peers);

  // What the kernels of rank `place` take.
  Peers At(const Group::Place& place, double timeout_s) const;

  // The text of the first wait that expired, empty if none did.
  std::string DescribeExpired(const std::string& group_name) const;

  // Clears all blocks. The devices must not be running an op of the group.
  std::string Reset();

  static int64_t BytesPerDevice() { return sizeof(Control); }

 private:
  std::vector<int64_t> devices_;
  int num_ranks_ = 0;
  std::vector<Control*> controls_;  // by group, then rank
  Expired* expired_ = nullptr;      // [devices], host memory mapped to the devices
};

// Makes the peers of a group, or finds them. Empty text on success.
std::string OpenDeviceGroup(const std::string& key, const std::vector<int64_t>& devices,
                            const std::vector<uint64_t>& samples, int num_ranks);
std::shared_ptr<DevicePeers> FindDevicePeers(const std::string& key);

}  // namespace jax_ep
