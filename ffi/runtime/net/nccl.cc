#include "runtime/net/nccl.h"

#include <dlfcn.h>

#include <mutex>
#include <type_traits>

#include "core/text.h"
#include "runtime/switches.h"

namespace jax_ep {
namespace {

struct Found {
  Nccl nccl{};
  std::string reason;
};

Found Load() {
  Found found;
  if (NoRails()) {
    found.reason = "JAX_EP_NO_RAILS is set";
    return found;
  }
  // Never a second one beside JAX's.
  void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    found.reason = "JAX has not loaded NCCL (libnccl.so.2)";
    return found;
  }
  Nccl& nccl = found.nccl;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  int version = 0;
  if (!find(nccl.GetVersion, "ncclGetVersion") || nccl.GetVersion(&version) != ncclSuccess) {
    found.reason = "NCCL does not say which version it is";
  } else if (version < kLeastNccl) {
    found.reason = Text("JAX has loaded NCCL ", NcclVersionText(version), ", and at least ",
                        NcclVersionText(kLeastNccl), " is needed (pip install -U nvidia-nccl-cu13)");
  } else if (!find(nccl.GetErrorString, "ncclGetErrorString") || !find(nccl.GetUniqueId, "ncclGetUniqueId") ||
             !find(nccl.CommInitRank, "ncclCommInitRank") || !find(nccl.CommDestroy, "ncclCommDestroy") ||
             !find(nccl.CommAbort, "ncclCommAbort") || !find(nccl.MemFree, "ncclMemFree") ||
             !find(nccl.CommQueryProperties, "ncclCommQueryProperties") ||
             !find(nccl.MemAlloc, "ncclMemAlloc") ||
             !find(nccl.CommWindowRegister, "ncclCommWindowRegister") ||
             !find(nccl.DevCommCreate, "ncclDevCommCreate")) {
    found.reason = Text("NCCL ", NcclVersionText(version), " lacks functions of its device API");
  }
  return found;
}

}  // namespace

std::string NcclVersionText(int version) {
  return Text(version / 10000, '.', version / 100 % 100, '.', version % 100);
}

// What is found stays; what is missing may be loaded later.
const Nccl* FindNccl(std::string& reason) {
  static std::mutex mutex;
  static const Nccl* nccl = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  if (nccl != nullptr) return nccl;
  const Found found = Load();
  reason = found.reason;
  if (reason.empty()) nccl = new Nccl(found.nccl);
  return nccl;
}

}  // namespace jax_ep
