#include "runtime/net/nccl.h"

#include <dlfcn.h>

#include <mutex>
#include <type_traits>

#include "core/text.h"
#include "runtime/switches.h"

namespace jax_ep {
namespace {

struct LoadResult {
  Nccl nccl{};
  std::string reason;
};

LoadResult Load() {
  LoadResult result;
  if (NoRails()) {
    result.reason = "JAX_EP_NO_RAILS is set";
    return result;
  }
  // RTLD_NOLOAD, because a second NCCL beside JAX's must not be loaded.
  void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    result.reason = "JAX has not loaded NCCL (libnccl.so.2)";
    return result;
  }
  Nccl& nccl = result.nccl;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  int version = 0;
  if (!find(nccl.GetVersion, "ncclGetVersion") || nccl.GetVersion(&version) != ncclSuccess) {
    result.reason = "NCCL does not return its version";
  } else if (version < kMinNcclVersion) {
    result.reason = Text(
        "JAX has loaded NCCL ", NcclVersionText(version), ", and at least ", NcclVersionText(kMinNcclVersion),
        " is needed (pip install -U nvidia-nccl-cu13, or nvidia-nccl-cu12 with jax[cuda12])");
  } else if (!find(nccl.GetErrorString, "ncclGetErrorString") || !find(nccl.GetUniqueId, "ncclGetUniqueId") ||
             !find(nccl.CommInitRank, "ncclCommInitRank") || !find(nccl.CommDestroy, "ncclCommDestroy") ||
             !find(nccl.CommAbort, "ncclCommAbort") || !find(nccl.MemFree, "ncclMemFree") ||
             !find(nccl.CommQueryProperties, "ncclCommQueryProperties") ||
             !find(nccl.MemAlloc, "ncclMemAlloc") ||
             !find(nccl.CommWindowRegister, "ncclCommWindowRegister") ||
             !find(nccl.DevCommCreate, "ncclDevCommCreate")) {
    result.reason = Text("NCCL ", NcclVersionText(version), " lacks functions of its device API");
  }
  return result;
}

}  // namespace

std::string NcclVersionText(int version) {
  return Text(version / 10000, '.', version / 100 % 100, '.', version % 100);
}

// Keeps the library once it is found. Searches again otherwise, because JAX may load it later.
const Nccl* FindNccl(std::string& reason) {
  static std::mutex mutex;
  static const Nccl* nccl = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  if (nccl != nullptr) return nccl;
  const LoadResult result = Load();
  reason = result.reason;
  if (reason.empty()) nccl = new Nccl(result.nccl);
  return nccl;
}

}  // namespace jax_ep
