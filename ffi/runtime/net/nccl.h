// Functions of NCCL, of the library that JAX has loaded: the extension does not link to it.
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include <string>

namespace jax_ep {

// Kernels that are compiled with the headers of one version run with this and newer libraries.
constexpr int kLeastNccl = NCCL_VERSION_CODE;
static_assert(kLeastNccl >= 23007, "2.30.7 is the first whose signals say which puts they stand for");

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

// Null where it cannot be used; then `reason` says why.
const Nccl* FindNccl(std::string& reason);

// As NCCL writes it, 2.30.7.
std::string NcclVersionText(int version);

}  // namespace jax_ep
