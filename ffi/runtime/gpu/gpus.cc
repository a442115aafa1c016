#include "runtime/gpu/gpus.h"

#include "runtime/gpu/driver.h"

namespace jax_ep {
namespace {

int Attribute(cudaDeviceAttr attribute, int64_t device) {
  int value = 0;
  (void)cudaDeviceGetAttribute(&value, attribute, static_cast<int>(device));
  return value;
}

}  // namespace

Link LinkBetween(int64_t device, int64_t peer) {
  if (device == peer) return Link::kSelf;
  int reachable = 0, atomics = 0;
  (void)cudaDeviceCanAccessPeer(&reachable, static_cast<int>(device), static_cast<int>(peer));
  if (reachable == 0) return Link::kNone;
  // Between GPUs only NVLink carries atomics.
  (void)cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, static_cast<int>(device),
                                  static_cast<int>(peer));
  (void)cudaGetLastError();
  return atomics != 0 ? Link::kNvlink : Link::kPcie;
}

const char* LinkName(Link link) {
  switch (link) {
    case Link::kSelf:
      return "self";
    case Link::kPcie:
      return "pcie";
    case Link::kNvlink:
      return "nvlink";
    default:
      return "none";
  }
}

std::string GpuName(int64_t device) {
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, static_cast<int>(device)) != cudaSuccess) {
    (void)cudaGetLastError();
    return "unknown";
  }
  return properties.name;
}

int ComputeCapability(int64_t device) {
  return 10 * Attribute(cudaDevAttrComputeCapabilityMajor, device) +
         Attribute(cudaDevAttrComputeCapabilityMinor, device);
}

int NumSms(int64_t device) { return Attribute(cudaDevAttrMultiProcessorCount, device); }

Memory DescribeMemory(uint64_t address, int64_t from_device) {
  const auto attribute = DriverFunction<decltype(cuPointerGetAttribute)>("cuPointerGetAttribute", 7000);
  const auto retain =
      DriverFunction<decltype(cuMemRetainAllocationHandle)>("cuMemRetainAllocationHandle", 11000);
  const auto release = DriverFunction<decltype(cuMemRelease)>("cuMemRelease", 10020);
  const auto access = DriverFunction<decltype(cuMemGetAccess)>("cuMemGetAccess", 10020);
  if (attribute == nullptr || retain == nullptr || release == nullptr || access == nullptr) {
    return {"of a driver older than CUDA 11", false};
  }
  unsigned managed = 0;
  if (attribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address) == CUDA_SUCCESS && managed != 0) {
    return {"managed memory", true};
  }
  CUmemoryPool pool = nullptr;
  if (attribute(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address) == CUDA_SUCCESS && pool != nullptr) {
    cudaMemLocation location{};
    location.type = cudaMemLocationTypeDevice;
    location.id = static_cast<int>(from_device);
    cudaMemAccessFlags flags{};
    const cudaError_t error = cudaMemPoolGetAccess(&flags, pool, &location);
    (void)cudaGetLastError();
    return {"cudaMallocAsync", error == cudaSuccess && flags == cudaMemAccessFlagsProtReadWrite};
  }
  CUmemGenericAllocationHandle handle = 0;
  if (retain(&handle, reinterpret_cast<void*>(address)) == CUDA_SUCCESS) {
    (void)release(handle);
    CUmemLocation location{};
    location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = static_cast<int>(from_device);
    unsigned long long flags = 0;
    const CUresult result = access(&flags, &location, address);
    return {"cuMemCreate", result == CUDA_SUCCESS && flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  }
  // Enabling peer access is all that this kind needs.
  return {"cudaMalloc", true};
}

}  // namespace jax_ep
