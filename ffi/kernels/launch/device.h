// The properties of a device that launches depend on.
#pragma once

#include "kernels/launch/plan.h"

namespace jax_ep::cuda {

struct Device {
  int num_sms;
  int compute_capability;  // such as 90
  int shared_bytes;        // most that a block may have
  bool copies_in_bulk;     // cp.async.bulk: kernels compiled for sm_90 or newer, and enough shared memory
  bool has_clusters;       // kernels compiled for sm_90 or newer
  bool force_bulk_path;    // use rings also for few tokens and short rows
  int sm_budget;           // most SMs that a dispatch or combine may use; 0: chosen from the shapes
};

// Returns the properties of a device that plans depend on.
inline Card CardOf(const Device& device) {
  return {device.num_sms, device.sm_budget, RatesOf(device.compute_capability)};
}

// Describes the current device. `plain_copies` forbids bulk copies.
Device DescribeDevice(bool plain_copies, bool force_bulk_path, int sm_budget);

}  // namespace jax_ep::cuda
