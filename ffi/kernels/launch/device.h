// What launches depend on.
#pragma once

namespace jax_ep::cuda {

struct Device {
  int num_sms;
  int shared_bytes;      // of a block, at most
  bool copies_in_bulk;   // cp.async.bulk: kernels for sm_90 and newer, where a block may have 227 KB
  bool has_clusters;     // kernels for sm_90 and newer
  bool force_bulk_path;  // rings are used also for few tokens and short rows
  int sm_budget;         // most SMs that a dispatch or combine may take; 0: chosen from the shapes
};

// Describes the current device. `plain_copies` forbids bulk copies.
Device DescribeDevice(bool plain_copies, bool force_bulk_path, int sm_budget);

}  // namespace jax_ep::cuda
