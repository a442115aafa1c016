// The Python extension: handler registrations, build information and the groups of this process.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "handlers/cpu.h"
#include "handlers/handlers.h"
#include "runtime/groups.h"

namespace nb = nanobind;

namespace jax_ep {
namespace {

template <typename F>
nb::capsule Capsule(F* function) {
  return nb::capsule(reinterpret_cast<void*>(function));
}

template <typename F, typename G>
nb::dict Stages(F* instantiate, G* execute) {
  nb::dict stages;
  stages["instantiate"] = Capsule(instantiate);
  stages["execute"] = Capsule(execute);
  return stages;
}

nb::dict CpuTargets() {
  nb::dict targets;
  targets["jax_ep_layout"] = Capsule(LayoutHandler);
  targets["jax_ep_dispatch"] = Stages(DispatchInstantiate, DispatchHandler);
  targets["jax_ep_cached_dispatch"] = Stages(CachedDispatchInstantiate, CachedDispatchHandler);
  targets["jax_ep_combine"] = Stages(CombineInstantiate, CombineHandler);
  targets["jax_ep_permute"] = Capsule(PermuteHandler);
  targets["jax_ep_cached_permute"] = Capsule(CachedPermuteHandler);
  targets["jax_ep_unpermute"] = Capsule(UnpermuteHandler);
  return targets;
}

nb::dict CpuTypes() {
  static auto call_site_info = ffi::MakeTypeInfo<CallSite>();
  nb::dict call_site;
  call_site["type_id"] = nb::capsule(reinterpret_cast<void*>(&CallSite::id));
  call_site["type_info"] = nb::capsule(reinterpret_cast<void*>(&call_site_info));
  nb::dict types;
  types["jax_ep_call_site"] = call_site;
  return types;
}

nb::dict BuildInfo() {
  nb::dict info;
  info["ffi_api_version"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  info["compiler"] = __VERSION__;
  return info;
}

}  // namespace

NB_MODULE(_C, m) {
  m.def("cpu_targets", &CpuTargets, "FFI handlers for the CPU: target name -> capsule or stages");
  m.def("cpu_types", &CpuTypes, "FFI state types for the CPU");
  m.def("build_info", &BuildInfo, "How this extension was built");
  m.def("open_group", &OpenGroup, nb::arg("key"), nb::arg("name"), nb::arg("devices"), nb::arg("num_ranks"),
        nb::arg("timeout_s"), "Opens a group, or adds a user to it");
  m.def("close_group", &CloseGroup, nb::arg("key"), "Drops one user; the last one frees the group");
  m.def(
      "take_expired",
      [](const std::string& key) -> std::optional<std::string> {
        auto group = FindGroup(key);
        return group == nullptr ? std::nullopt : group->TakeExpired();
      },
      nb::arg("key"), "The text of a wait that expired since the last call, or None");
}

}  // namespace jax_ep
