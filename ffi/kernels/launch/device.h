// The properties of a device that launches depend on.
#pragma once

namespace jax_ep::cuda {

struct Device {
  int num_sms;
  int shared_bytes;      // most that a block may have
  bool copies_in_bulk;   // cp.async.bulk: kernels compiled for sm_90 or newer, and 227 KB per block
  bool has_clusters;     // kernels compiled for sm_90 or newer
  bool force_bulk_path;  // use rings also for few tokens and short rows
  int sm_budget;         // most SMs that a dispatch or combine may use; 0: chosen from the shapes
};

// Describes the current device. `plain_copies` forbids bulk copies.
Device DescribeDevice(bool plain_copies, bool force_bulk_path, int sm_budget);

}  // namespace jax_ep::cuda
