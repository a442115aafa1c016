// Functions of the NCCL library that JAX has loaded. The extension does not link to NCCL.
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include <string>

namespace jax_ep {

// Version of the headers that the kernels are compiled with. They run with this and newer libraries.
constexpr int kMinNcclVersion = NCCL_VERSION_CODE;
static_assert(kMinNcclVersion >= 23007,
              "2.30.7 is the first version whose signals say which puts they stand for");

struct Nccl {
  decltype(&ncclGetVersion) GetVersion;
  decltype(&ncclGetErrorString) GetErrorString;
  decltype(&ncclGetUniqueId) GetUniqueId;
  decltype(&ncclCommInitRank) CommInitRank;
  decltype(&ncclCommDestroy) CommDestroy;
  decltype(&ncclCommAbort) CommAbort;
  decltype(&ncclCommQueryProperties) CommQueryProperties;
  decltype(&ncclMemAlloc) MemAlloc;
  decltype(&ncclMemFree) MemFree;
  decltype(&ncclCommWindowRegister) CommWindowRegister;
  decltype(&ncclDevCommCreate) DevCommCreate;
};

// Returns NCCL, null if it cannot be used. Then `reason` says why.
const Nccl* FindNccl(std::string& reason);

// Returns a version as NCCL writes it, for example 2.30.7.
std::string NcclVersionText(int version);

}  // namespace jax_ep
