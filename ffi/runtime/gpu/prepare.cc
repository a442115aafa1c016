#include "runtime/gpu/prepare.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>

#include "core/text.h"
#include "kernels/launches.h"
#include "kernels/products/products.h"
#include "runtime/gpu/driver.h"
#include "runtime/gpu/gpus.h"
#include "runtime/switches.h"

namespace jax_ep {
namespace {

std::string Failed(const char* what, int64_t device, cudaError_t error) {
  return Text(what, " on GPU ", device, ": ", cudaGetErrorString(error));
}

// Enables peer access. Returns an error, empty on success.
std::string EnablePeerAccess(int64_t device, int64_t peer, uint64_t address) {
  if (LinkBetween(device, peer) == Link::kNone) {
    return Text("GPU ", device, " (", GpuName(device), ") cannot access the memory of GPU ", peer, " (",
                GpuName(peer),
                "); the GPUs of a group need peer access (NVLink, or PCIe with peer-to-peer; never between "
                "MIG instances): choose others, or implementation='xla'");
  }
  const cudaError_t error = cudaDeviceEnablePeerAccess(static_cast<int>(peer), 0);
  if (error != cudaSuccess && error != cudaErrorPeerAccessAlreadyEnabled) {
    return Failed("enabling peer access", device, error);
  }
  (void)cudaGetLastError();  // clears 'already enabled'
  const Memory memory = DescribeMemory(address, device);
  if (memory.reachable) return "";
  return Text("JAX's memory on GPU ", peer, " (", memory.kind, ") is not accessible from GPU ", device,
              "; let JAX use its own allocator (unset XLA_PYTHON_CLIENT_ALLOCATOR), or implementation='xla'");
}

// Loads all kernels, once per device. Loading one later would take locks of the driver, and might wait for
// kernels of other groups.
std::string LoadKernels(int64_t device) {
  static std::mutex* const mutex = new std::mutex;
  static std::set<int64_t>* const loaded = new std::set<int64_t>;
  std::lock_guard<std::mutex> lock(*mutex);
  if (loaded->count(device) != 0) return "";
  for (auto preload :
       {cuda::PreloadDevice, cuda::PreloadLayout, cuda::PreloadBalance, cuda::PreloadPush, cuda::PreloadPull,
        cuda::PreloadPullFp8, cuda::PreloadFewTokensPush, cuda::PreloadFewTokensPull, cuda::PreloadRepermute,
        cuda::PreloadUnpermute, cuda::PreloadQuantize, cuda::PreloadQuantizeGated, cuda::PreloadGroupedDot,
        cuda::PreloadGather}) {
    const cudaError_t error = preload();
    if (error != cudaSuccess) return Failed("loading the kernels", device, error);
  }
  loaded->insert(device);
  return "";
}

}  // namespace

std::string PrepareProducts() {
  const cuda::ProductPreparation preparation = cuda::PrepareProducts(ProductEngineName());
  static std::atomic<bool> has_warned{false};
  if (!preparation.warning.empty() && !has_warned.exchange(true)) {
    std::fprintf(stderr, "jax_ep: %s\n", preparation.warning.c_str());
  }
  return preparation.error;
}

std::string PrepareDevice(int64_t device, const std::vector<int64_t>& peers,
                          const std::vector<uint64_t>& addresses) {
  return OnDevice(device, [&]() -> std::string {
    for (size_t i = 0; i < peers.size(); ++i) {
      if (peers[i] == device || peers[i] < 0) continue;
      if (std::string text = EnablePeerAccess(device, peers[i], addresses[i]); !text.empty()) return text;
    }
    const std::string text = LoadKernels(device);
    return text.empty() ? PrepareProducts() : text;
  });
}

void* MappedHostMemory(int64_t device, int64_t bytes) {
  constexpr int64_t kPiece = 1 << 20;
  static std::mutex* const mutex = new std::mutex;
  static char* piece = nullptr;
  static int64_t left = 0;
  std::lock_guard<std::mutex> lock(*mutex);
  bytes = (bytes + 127) / 128 * 128;
  if (bytes > left) {
    left = std::max(bytes, kPiece);
    void* memory = nullptr;
    const cudaError_t error = OnDevice(device, [&] {
      return cudaHostAlloc(&memory, static_cast<size_t>(left), cudaHostAllocPortable | cudaHostAllocMapped);
    });
    if (error != cudaSuccess) {
      left = 0;
      throw std::runtime_error(Failed("allocating host memory", device, error));
    }
    piece = static_cast<char*>(memory);
    std::memset(piece, 0, static_cast<size_t>(left));
  }
  char* const memory = piece;
  piece += bytes;
  left -= bytes;
  return memory;
}

}  // namespace jax_ep
