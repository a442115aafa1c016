// What the plugin needs to know of NCCL's interface and of the CUDA driver, without the headers of either.
#pragma once

#include <dlfcn.h>

#include <chrono>
#include <cstddef>
#include <cstdint>

enum Result { kSuccess = 0, kSystemError = 2, kInternalError = 3, kInvalidArgument = 4 };
constexpr int kPtrHost = 1, kPtrCuda = 2, kSignalInc = 1;
constexpr unsigned kNonBlocking = 1;  // a stream that does not wait for the default one

struct Properties {
  char* name;
  char* pci_path;
  uint64_t guid;
  int ptr_support, reg_is_global, force_flush, speed, port;
  float latency;
  int max_comms, max_recvs, net_device_type, net_device_version;
  struct {
    int ndevs, devs[8];
  } devices;
  size_t max_p2p_bytes, max_coll_bytes;
  int max_multi_request_size;
  int16_t rail, plane;
};

// Of the driver, which the plugin is not linked to; its headers are not needed either.
using Address = unsigned long long;
struct Driver {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  template <typename... Arguments>
  void Find(int (*&function)(Arguments...), const char* name) {
    if (library != nullptr) function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
  }
  int (*GetCurrent)(void**) = nullptr;
  int (*SetCurrent)(void*) = nullptr;
  int (*StreamCreate)(void**, unsigned) = nullptr;
  int (*Synchronize)(void*) = nullptr;
  int (*Read)(void*, Address, size_t, void*) = nullptr;
  int (*Write)(Address, const void*, size_t, void*) = nullptr;

  Driver() {
    Find(GetCurrent, "cuCtxGetCurrent");
    Find(SetCurrent, "cuCtxSetCurrent");
    Find(StreamCreate, "cuStreamCreate");
    Find(Synchronize, "cuStreamSynchronize");
    Find(Read, "cuMemcpyDtoHAsync_v2");
    Find(Write, "cuMemcpyHtoDAsync_v2");
  }
  bool ok() const { return GetCurrent && SetCurrent && StreamCreate && Synchronize && Read && Write; }
};
inline Driver& GetDriver() {
  static Driver* const driver = new Driver;
  return *driver;
}

inline uint64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}
