#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "kernels/launch/device.h"
#include "kernels/launches.h"
#include "kernels/protocol/control.h"

namespace jax_ep::cuda {
namespace {

// Minimum shared memory per block for bulk copies. sm_90 and sm_100 have 227 KB, sm_120 has 99 KB.
constexpr int kBulkDeviceBytes = 96 * 1024;

__global__ void ProbeKernel() {}

// Properties of a device, which never change.
struct Facts {
  int num_sms = 1;
  int compute_capability = 0;
  int shared_bytes = 0;
  bool is_built_for_sm90 = false;
};

Facts ReadFacts(int device) {
  Facts facts;
  (void)cudaDeviceGetAttribute(&facts.num_sms, cudaDevAttrMultiProcessorCount, device);
  (void)cudaDeviceGetAttribute(&facts.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  int major = 0, minor = 0;
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  facts.compute_capability = 10 * major + minor;
  facts.num_sms = std::min(facts.num_sms, kMaxBlocks);
  // The relevant architecture is the one that the kernels were compiled for, not the device's own.
  cudaFuncAttributes attributes{};
  facts.is_built_for_sm90 =
      cudaFuncGetAttributes(&attributes, ProbeKernel) == cudaSuccess && attributes.ptxVersion >= 90;
  return facts;
}

// Returns the cached properties, because every launch needs them. Cache entries are never freed.
const Facts& FactsOf(int device) {
  constexpr int kMaxDevices = 64;
  static std::array<std::atomic<const Facts*>, kMaxDevices> cache{};
  std::atomic<const Facts*>& entry = cache[device % kMaxDevices];
  const Facts* facts = entry.load(std::memory_order_acquire);
  if (facts == nullptr) {
    const Facts* const read = new Facts(ReadFacts(device));
    if (entry.compare_exchange_strong(facts, read, std::memory_order_acq_rel)) {
      facts = read;
    } else {
      delete read;
    }
  }
  return *facts;
}

}  // namespace

cudaError_t PreloadDevice() {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) (void)FactsOf(device);
  return error;
}

Device DescribeDevice(bool plain_copies, bool force_bulk_path, int sm_budget) {
  int device = 0;
  (void)cudaGetDevice(&device);
  const Facts& facts = FactsOf(device);
  const bool in_bulk = facts.is_built_for_sm90 && !plain_copies && facts.shared_bytes >= kBulkDeviceBytes;
  return {facts.num_sms,           facts.compute_capability, facts.shared_bytes, in_bulk,
          facts.is_built_for_sm90, force_bulk_path,          sm_budget};
}

}  // namespace jax_ep::cuda
