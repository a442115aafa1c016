#include "runtime/gpu/regions.h"

#include <stdexcept>

#include "core/text.h"
#include "runtime/gpu/driver.h"

namespace jax_ep {
namespace {

template <typename F, typename... Args>
void Call(const char* name, unsigned version, const char* what, Args... args) {
  const auto function = DriverFunction<F>(name, version);
  if (function == nullptr) throw std::runtime_error(Text(what, ": the CUDA driver lacks ", name));
  const CUresult result = function(args...);
  if (result != CUDA_SUCCESS) {
    const char* text = "unknown error";
    if (const auto describe = DriverFunction<decltype(cuGetErrorString)>("cuGetErrorString", 6000)) {
      (void)describe(result, &text);
    }
    throw std::runtime_error(Text(what, ": ", name, ": ", text));
  }
}

template <typename F>
class ScopeExit {
 public:
  explicit ScopeExit(F f) : f_(std::move(f)) {}
  ~ScopeExit() { f_(); }

 private:
  F f_;
};

// Calls a function that releases something. Ignores its error, which must not hide the error that led here.
template <typename F, typename... Args>
void CallIfFound(const char* name, unsigned version, Args... args) {
  if (const auto function = DriverFunction<F>(name, version)) (void)function(args...);
}

void Release(CUmemGenericAllocationHandle handle) {
  CallIfFound<decltype(cuMemRelease)>("cuMemRelease", 10020, handle);
}

constexpr char kMapping[] = "mapping the memory of another process";

// Exports the region of an address as a handle of this kind, which the driver writes to `handle`.
void Export(const char* what, uint64_t address, int64_t device, CUmemAllocationHandleType kind,
            void* handle) {
  OnDevice(device, [&] {
    CUmemGenericAllocationHandle region = 0;
    Call<decltype(cuMemRetainAllocationHandle)>("cuMemRetainAllocationHandle", 11000, what, &region,
                                                reinterpret_cast<void*>(address));
    const ScopeExit release([&] { Release(region); });
    Call<decltype(cuMemExportToShareableHandle)>("cuMemExportToShareableHandle", 10020, what, handle, region,
                                                 kind, 0ULL);
  });
}

// The caller releases the region.
CUmemGenericAllocationHandle Import(const void* handle, CUmemAllocationHandleType kind) {
  CUmemGenericAllocationHandle region = 0;
  Call<decltype(cuMemImportFromShareableHandle)>("cuMemImportFromShareableHandle", 10020, kMapping, &region,
                                                 const_cast<void*>(handle), kind);
  return region;
}

uint64_t Map(const void* handle, CUmemAllocationHandleType kind, uint64_t bytes,
             const std::vector<int64_t>& devices) {
  const size_t size = bytes;
  return OnDevice(devices.at(0), [&]() -> uint64_t {
    const CUmemGenericAllocationHandle region = Import(handle, kind);
    // The mapping keeps the memory alive even if its owner ends.
    const ScopeExit release([&] { Release(region); });
    bool is_done = false;
    CUdeviceptr base = 0;
    Call<decltype(cuMemAddressReserve)>("cuMemAddressReserve", 10020, kMapping, &base, size, size_t{0},
                                        CUdeviceptr{0}, 0ULL);
    const ScopeExit free_range([&] {
      if (!is_done) CallIfFound<decltype(cuMemAddressFree)>("cuMemAddressFree", 10020, base, size);
    });
    Call<decltype(cuMemMap)>("cuMemMap", 10020, kMapping, base, size, size_t{0}, region, 0ULL);
    const ScopeExit unmap([&] {
      if (!is_done) CallIfFound<decltype(cuMemUnmap)>("cuMemUnmap", 10020, base, size);
    });
    std::vector<CUmemAccessDesc> access(devices.size());
    for (size_t i = 0; i < devices.size(); ++i) {
      access[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
      access[i].location.id = static_cast<int>(devices[i]);
      access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    Call<decltype(cuMemSetAccess)>("cuMemSetAccess", 10020, kMapping, base, size,
                                   static_cast<const CUmemAccessDesc*>(access.data()), access.size());
    is_done = true;
    return base;
  });
}

}  // namespace

Region FindRegion(uint64_t address, int64_t device) {
  return OnDevice(device, [&]() -> Region {
    CUdeviceptr base = 0;
    size_t bytes = 0;
    Call<decltype(cuMemGetAddressRange)>("cuMemGetAddressRange", 3020, "finding JAX's memory", &base, &bytes,
                                         static_cast<CUdeviceptr>(address));
    return {base, bytes};
  });
}

int ExportRegion(uint64_t address, int64_t device) {
  int descriptor = -1;
  Export(
      "sharing JAX's memory with other processes (it needs JAX's own allocator: unset "
      "XLA_PYTHON_CLIENT_ALLOCATOR)",
      address, device, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, &descriptor);
  return descriptor;
}

uint64_t ImportRegion(int descriptor, uint64_t bytes, const std::vector<int64_t>& devices) {
  return Map(reinterpret_cast<void*>(static_cast<uintptr_t>(descriptor)),
             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, bytes, devices);
}

FabricHandle ExportFabricRegion(uint64_t address, int64_t device) {
  static_assert(sizeof(FabricHandle) == sizeof(CUmemFabricHandle));
  FabricHandle handle{};
  Export(
      "sharing JAX's memory with other hosts (NVLink must join their GPUs, and each process needs an IMEX "
      "channel)",
      address, device, CU_MEM_HANDLE_TYPE_FABRIC, handle.data());
  return handle;
}

uint64_t ImportFabricRegion(const FabricHandle& handle, uint64_t bytes, const std::vector<int64_t>& devices) {
  return Map(handle.data(), CU_MEM_HANDLE_TYPE_FABRIC, bytes, devices);
}

void TryFabricHandle(const FabricHandle& handle, int64_t device) {
  OnDevice(device, [&] { Release(Import(handle.data(), CU_MEM_HANDLE_TYPE_FABRIC)); });
}

}  // namespace jax_ep
