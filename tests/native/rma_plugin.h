// What the plugin needs to know of NCCL's interface and of the CUDA driver, without the headers of either.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>

enum Result { kSuccess = 0, kSystemError = 2, kInternalError = 3, kInvalidArgument = 4 };
constexpr int kPtrHost = 1, kPtrCuda = 2, kSignalInc = 1;
constexpr int kGinProxy = 2, kGinProxyVersion = 100;  // how kernels reach the network: by NCCL's proxy
constexpr unsigned kNonBlocking = 1;                  // a stream that does not wait for the default one

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
  int (*HostAlloc)(void**, size_t, unsigned) = nullptr;
  int (*Read)(void*, Address, size_t, void*) = nullptr;
  int (*Write)(Address, const void*, size_t, void*) = nullptr;

  Driver() {
    Find(GetCurrent, "cuCtxGetCurrent");
    Find(SetCurrent, "cuCtxSetCurrent");
    Find(StreamCreate, "cuStreamCreate");
    Find(Synchronize, "cuStreamSynchronize");
    Find(HostAlloc, "cuMemHostAlloc");
    Find(Read, "cuMemcpyDtoHAsync_v2");
    Find(Write, "cuMemcpyHtoDAsync_v2");
  }
  bool ok() const {
    return GetCurrent && SetCurrent && StreamCreate && Synchronize && HostAlloc && Read && Write;
  }
};
inline Driver& GetDriver() {
  static Driver* const driver = new Driver;
  return *driver;
}

// Copies to and from memory of the device, which are over when they return.
class Device {
 public:
  // As a thread whose CUDA context is the device's.
  bool Open() {
    const Driver& driver = GetDriver();
    return driver.GetCurrent(&context_) == kSuccess && context_ != nullptr &&
           driver.StreamCreate(&stream_, kNonBlocking) == kSuccess &&
           driver.HostAlloc(&staging_, kStagingBytes, 0) == kSuccess;
  }
  bool Read(char* to, const char* from, size_t size) {
    return InPieces(size, [&](size_t at, size_t piece) {
      const bool good =
          GetDriver().Read(staging_, reinterpret_cast<Address>(from + at), piece, stream_) == kSuccess &&
          GetDriver().Synchronize(stream_) == kSuccess;
      if (good) std::memcpy(to + at, staging_, piece);
      return good;
    });
  }
  bool Write(char* to, const void* from, size_t size) {
    return InPieces(size, [&](size_t at, size_t piece) {
      std::memcpy(staging_, static_cast<const char*>(from) + at, piece);
      return GetDriver().Write(reinterpret_cast<Address>(to + at), staging_, piece, stream_) == kSuccess &&
             GetDriver().Synchronize(stream_) == kSuccess;
    });
  }

 private:
  static constexpr size_t kStagingBytes = size_t{256} << 10;

  template <typename Copy>
  bool InPieces(size_t size, Copy&& copy) {
    bool good = size == 0 || GetDriver().SetCurrent(context_) == kSuccess;
    for (size_t at = 0; at < size && good; at += kStagingBytes) {
      good = copy(at, std::min(size - at, kStagingBytes));
    }
    return good;
  }

  void* context_ = nullptr;
  void* stream_ = nullptr;
  // Pinned: copies from and to other memory of the host wait until the device's kernels have ended, and those
  // wait for what is copied.
  void* staging_ = nullptr;
};

inline uint64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}
