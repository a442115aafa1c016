// The Python extension: handler registrations, build information and the groups of this process.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "handlers/cpu/context.h"
#include "handlers/cpu/handlers.h"
#include "runtime/groups.h"
#include "runtime/processes.h"
#include "runtime/switches.h"

#if defined(JAX_EP_WITH_CUDA)
#include "handlers/gpu/handlers.h"
#include "handlers/gpu/launch.h"
#include "kernels/products/products.h"
#include "runtime/gpu/gpus.h"
#include "runtime/gpu/peers.h"
#include "runtime/gpu/regions.h"
#endif
#if defined(JAX_EP_WITH_NCCL)
#include "runtime/net/rails.h"
#endif

namespace nb = nanobind;

namespace jax_ep {

// Adds the functions that only tests and the benchmark call (module_testing.cc).
void DefineTestHooks(nb::module_& m);

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

// Releases the interpreter's lock while a call may wait for locks of the driver.
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

nb::dict CpuTargets() {
  nb::dict targets;
  targets["jax_ep_layout"] = Capsule(LayoutHandler);
  targets["jax_ep_balance"] = Capsule(BalanceHandler);
  targets["jax_ep_route"] = Stages(RouteInstantiate, RouteHandler);
  targets["jax_ep_push"] = Stages(PushInstantiate, PushHandler);
  targets["jax_ep_pull"] = Stages(PullInstantiate, PullHandler);
  targets["jax_ep_hop"] = Capsule(HopHandler);
  targets["jax_ep_permute"] = Capsule(PermuteHandler);
  targets["jax_ep_repermute"] = Capsule(RepermuteHandler);
  targets["jax_ep_unpermute"] = Capsule(UnpermuteHandler);
  return targets;
}

nb::dict CpuTypes() {
  static auto call_site_info = ffi::MakeTypeInfo<CpuCallSite>();
  nb::dict call_site;
  call_site["type_id"] = nb::capsule(reinterpret_cast<void*>(&CpuCallSite::id));
  call_site["type_info"] = nb::capsule(reinterpret_cast<void*>(&call_site_info));
  nb::dict types;
  types["jax_ep_call_site"] = call_site;
  return types;
}

#if defined(JAX_EP_WITH_CUDA)
template <typename F, typename G = XLA_FFI_Handler>
nb::dict GpuStages(F* execute, G* initialize = GpuInitialize) {
  nb::dict stages = Stages(GpuInstantiate, execute);
  stages["initialize"] = Capsule(initialize);
  return stages;
}

template <typename F>
nb::dict ProductStages(F* execute) {
  nb::dict stages;
  stages["initialize"] = Capsule(GpuProductsInitialize);
  stages["execute"] = Capsule(execute);
  return stages;
}

nb::dict GpuTargets() {
  nb::dict targets;
  targets["jax_ep_layout"] = Capsule(GpuLayoutHandler);
  targets["jax_ep_balance"] = Capsule(GpuBalanceHandler);
  targets["jax_ep_route"] = GpuStages(GpuRouteHandler);
  targets["jax_ep_push"] = GpuStages(GpuPushHandler);
  targets["jax_ep_pull"] = GpuStages(GpuPullHandler);
  targets["jax_ep_route_beside"] = GpuStages(GpuRouteBesideHandler, GpuBesideInitialize);
  targets["jax_ep_push_beside"] = GpuStages(GpuPushBesideHandler, GpuBesideInitialize);
  targets["jax_ep_pull_beside"] = GpuStages(GpuPullBesideHandler, GpuBesideInitialize);
  targets["jax_ep_gather"] = GpuStages(GpuGatherHandler);
#if defined(JAX_EP_WITH_NCCL)
  targets["jax_ep_rail_hop"] = GpuStages(GpuRailHopHandler);
#endif
  targets["jax_ep_reserve"] = Capsule(GpuReserveHandler);
  targets["jax_ep_permute"] = Capsule(GpuPermuteHandler);
  targets["jax_ep_repermute"] = Capsule(GpuRepermuteHandler);
  targets["jax_ep_unpermute"] = Capsule(GpuUnpermuteHandler);
  targets["jax_ep_grouped_dot"] = ProductStages(GpuGroupedDotHandler);
  targets["jax_ep_quantize"] = Capsule(GpuQuantizeHandler);
  targets["jax_ep_quantize_gated"] = Capsule(GpuQuantizeGatedHandler);
  return targets;
}

nb::dict GpuTypes() {
  static auto call_site_info = ffi::MakeTypeInfo<GpuCallSite>();
  nb::dict call_site;
  call_site["type_id"] = nb::capsule(reinterpret_cast<void*>(&GpuCallSite::id));
  call_site["type_info"] = nb::capsule(reinterpret_cast<void*>(&call_site_info));
  nb::dict types;
  types["jax_ep_cuda_call_site"] = call_site;
  return types;
}

// `ranks` holds for each rank: ordinal or -1, address of its control block in this process, shift of its
// addresses, process.
std::string OpenDeviceRanks(const std::string& key,
                            const std::vector<std::tuple<int64_t, uint64_t, int64_t, int>>& ranks,
                            int num_ranks) {
  std::vector<RankMemory> memory;
  for (const auto& [device, control, shift, process] : ranks) {
    memory.push_back({device, control, shift, process});
  }
  return OpenDeviceGroup(key, memory, num_ranks);
}

FabricHandle HandleOf(const nb::bytes& bytes) {
  FabricHandle handle{};
  if (bytes.size() != handle.size()) throw std::invalid_argument("a fabric handle has 64 bytes");
  std::memcpy(handle.data(), bytes.data(), handle.size());
  return handle;
}

nb::bytes ExportFabricBytes(uint64_t address, int64_t device) {
  FabricHandle handle;
  {
    nb::gil_scoped_release unlocked;
    handle = ExportFabricRegion(address, device);
  }
  return nb::bytes(handle.data(), handle.size());
}

uint64_t ImportFabricBytes(const nb::bytes& bytes, uint64_t size, const std::vector<int64_t>& devices) {
  const FabricHandle handle = HandleOf(bytes);
  nb::gil_scoped_release unlocked;
  return ImportFabricRegion(handle, size, devices);
}

void TryFabricBytes(const nb::bytes& bytes, int64_t device) {
  const FabricHandle handle = HandleOf(bytes);
  nb::gil_scoped_release unlocked;
  TryFabricHandle(handle, device);
}

bool HasExpired(const std::string& key) {
  const auto peers = FindDevicePeers(key);
  return peers != nullptr && peers->HasFailed();
}

uint32_t LastEpoch(const std::string& key) {
  const auto peers = FindDevicePeers(key);
  return peers == nullptr ? 0 : peers->LastEpoch();
}

uint32_t LastCall(const std::string& key) {
  const auto peers = FindDevicePeers(key);
  return peers == nullptr ? 0 : peers->LastCall();
}

// `sizes` are R, T, K and E.
bool GroupFitsArena(const std::string& key, bool combines, bool by_expert,
                    const std::array<int32_t, 4>& sizes, int64_t row_bytes) {
  const auto group = FindGroup(key);
  const auto [ranks, tokens, top_k, experts] = sizes;
  const Shape shape{by_expert ? Order::kExpert : Order::kRank, ranks, tokens, top_k, experts, 0, 1};
  if (group == nullptr) return false;
  return combines ? CombineFitsArena(*group, shape, row_bytes) : FitsArena(*group, shape, row_bytes);
}

std::string ResetDeviceGroup(const std::string& key, uint32_t epoch, uint32_t calls) {
  if (const auto group = FindGroup(key)) (void)group->TakeExpired();  // drops the error that this reset ends
  const auto peers = FindDevicePeers(key);
  return peers == nullptr ? "" : peers->Reset(epoch, calls);
}

std::pair<uint64_t, uint64_t> RegionAt(uint64_t address, int64_t device) {
  const Region region = FindRegion(address, device);
  return {region.base, region.bytes};
}

// Returns names, links and memory of GPUs. `samples` has an address in JAX's memory on each.
nb::dict DescribeGpus(const std::vector<int64_t>& ordinals, const std::vector<uint64_t>& samples) {
  nb::list gpus, links;
  for (size_t i = 0; i < ordinals.size(); ++i) {
    nb::dict gpu;
    gpu["name"] = GpuName(ordinals[i]);
    gpu["compute_capability"] = ComputeCapability(ordinals[i]);
    gpu["sms"] = NumSms(ordinals[i]);
    gpu["memory"] = DescribeMemory(samples[i], ordinals[i]).kind;
    gpus.append(gpu);
    nb::list row;
    for (int64_t peer : ordinals) row.append(LinkName(LinkBetween(ordinals[i], peer)));
    links.append(row);
  }
  nb::dict report;
  report["gpus"] = gpus;
  report["links"] = links;
  return report;
}
#else
nb::dict GpuTargets() { return nb::dict(); }
nb::dict GpuTypes() { return nb::dict(); }
#endif

#if defined(JAX_EP_WITH_NCCL)
// Returns the version of the NCCL that JAX has loaded. If it cannot be used, returns an empty version and the
// reason.
std::pair<std::string, std::string> FindNcclVersion() {
  std::string reason;
  const Nccl* const nccl = FindNccl(reason);
  int version = 0;
  if (nccl != nullptr) (void)nccl->GetVersion(&version);
  return {nccl == nullptr ? "" : NcclVersionText(version), reason};
}

// `rails` holds ordinal, number of the domain and id of the rail for each device of this process.
std::string ConnectRails(const std::string& key,
                         const std::vector<std::tuple<int64_t, int, std::string>>& rails, int num_domains) {
  std::vector<RailDevice> devices;
  for (const auto& [device, domain, id] : rails) devices.push_back({device, domain, id});
  return BeginRails(key)->Connect(devices, num_domains);
}

std::string AllocateRails(const std::string& key) { return FindPendingRails(key)->Allocate(); }
std::string RegisterRails(const std::string& key) { return FindPendingRails(key)->Register(); }
std::string JoinRails(const std::string& key) { return FindPendingRails(key)->Join(); }
std::string TryRails(const std::string& key, double trial_s) {
  return FindPendingRails(key)->RunTrial(trial_s);
}
void DropRails(const std::string& key) { FindPendingRails(key)->Drop(); }

std::string DescribeRailFailure(const std::string& key) {
  const auto rails = FindRails(key);
  return rails == nullptr ? "" : rails->DescribeFailure();
}
#endif

void OpenMeshGroup(const std::string& key, const std::string& name, std::vector<int64_t> devices,
                   int num_ranks, bool relays_for_other_domains, double timeout_s, int num_sms) {
  OpenGroup(key, name, std::move(devices), num_ranks, relays_for_other_domains, {timeout_s, num_sms});
#if defined(JAX_EP_WITH_CUDA)
  if (const auto peers = FindDevicePeers(key)) peers->Configure(name, timeout_s);
#endif
}

// Returns the text of a wait that expired since the last call, if any, on either platform.
std::optional<std::string> TakeExpired(const std::string& key) {
  auto group = FindGroup(key);
  if (group == nullptr) return std::nullopt;
#if defined(JAX_EP_WITH_CUDA)
  if (auto peers = FindDevicePeers(key)) {
    if (std::string text = peers->DescribeFailure(); !text.empty()) return text;
  }
#endif
  return group->TakeExpired();
}

nb::dict BuildInfo() {
  nb::dict info;
  info["ffi_api_version"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  info["compiler"] = __VERSION__;
  info["tokens_per_chunk"] = kChunkTokens;
#if defined(JAX_EP_WITH_CUDA)
  info["cuda"] = CUDART_VERSION;
  info["cuda_architectures"] = JAX_EP_CUDA_ARCHITECTURES;
  info["product_engines"] = cuda::BuiltProductEngines();
#endif
#if defined(JAX_EP_CUTLASS_VERSION)
  info["cutlass"] = JAX_EP_CUTLASS_VERSION;
#endif
#if defined(JAX_EP_WITH_NCCL)
  info["nccl"] = NcclVersionText(kMinNcclVersion);
#endif
  return info;
}

}  // namespace

NB_MODULE(_C, m) {
  DefineTestHooks(m);
  m.def("cpu_targets", &CpuTargets, "FFI handlers for the CPU: target name -> capsule or stages");
  m.def("cpu_types", &CpuTypes, "FFI state types for the CPU");
  m.def("build_info", &BuildInfo, "Returns how this extension was built");
  m.def("open_group", &OpenMeshGroup, nb::arg("key"), nb::arg("name"), nb::arg("devices"),
        nb::arg("num_ranks"), nb::arg("relays_for_other_domains"), nb::arg("timeout_s"), nb::arg("num_sms"),
        "Opens a group, or adds a user to it");
  m.def("close_group", &CloseGroup, nb::arg("key"), "Drops one user. The last one closes the group");
  m.def("take_expired", &TakeExpired, nb::arg("key"),
        "Returns the text of a wait that expired since the last call, or None");
  m.def("cuda_targets", &GpuTargets, "FFI handlers for GPUs, empty if they were not built");
  m.def("cuda_types", &GpuTypes, "FFI state types for GPUs");
#if defined(JAX_EP_WITH_CUDA)
  m.def("open_device_group", &OpenDeviceRanks, nb::arg("key"), nb::arg("ranks"), nb::arg("num_ranks"),
        Unlocked(), "Prepares the GPUs of a group. Returns an error, empty on success");
  m.def("watch_process", &WatchProcess, nb::arg("process"), nb::arg("descriptor"), Unlocked(),
        "Takes over a connected socket on which another process sends, and whose end of file means its end");
  m.def("add_watcher", &AddWatcher, nb::arg("process"), nb::arg("descriptor"), Unlocked(),
        "Adds a connected socket whose other end watches this process. The caller keeps it");
  m.def("has_expired", &HasExpired, nb::arg("key"),
        "Returns whether an op of the group failed since its last reset");
  m.def("last_epoch", &LastEpoch, nb::arg("key"), Unlocked(),
        "Returns the last epoch of the group's ranks in this process");
  m.def("last_call", &LastCall, nb::arg("key"),
        "Returns the last number of a call site of the group's ranks in this process");
  m.def("reset_device_group", &ResetDeviceGroup, nb::arg("key"), nb::arg("epoch"), nb::arg("calls"),
        Unlocked(), "Makes a group usable after a failure, to continue after these numbers");
  m.def("region_of", &RegionAt, nb::arg("address"), nb::arg("device"), Unlocked(),
        "Returns base and bytes of the allocation of an address");
  m.def("export_region", &ExportRegion, nb::arg("address"), nb::arg("device"), Unlocked(),
        "Returns a file descriptor of that allocation");
  m.def("import_region", &ImportRegion, nb::arg("descriptor"), nb::arg("bytes"), nb::arg("devices"),
        Unlocked(),
        "Maps another process's allocation for GPUs of this one. Returns its base in this process");
  m.def("export_fabric_region", &ExportFabricBytes, nb::arg("address"), nb::arg("device"),
        "Returns a fabric handle of that allocation, which GPUs of other hosts can map");
  m.def("import_fabric_region", &ImportFabricBytes, nb::arg("handle"), nb::arg("bytes"), nb::arg("devices"),
        "Maps another host's allocation, as import_region");
  m.def("try_fabric_handle", &TryFabricBytes, nb::arg("handle"), nb::arg("device"),
        "Raises unless the GPU's host is in the NVLink domain of a fabric handle");
  m.def("describe_gpus", &DescribeGpus, nb::arg("ordinals"), nb::arg("samples"),
        "Returns names, links and memory of GPUs. samples are addresses of arrays, one on each GPU");
  m.def("fits_arena", &GroupFitsArena, nb::arg("key"), nb::arg("combines"), nb::arg("by_expert"),
        nb::arg("sizes"), nb::arg("row_bytes"),
        "Returns whether a dispatch or a combine of these sizes fits the arena");
  m.def("group_bytes", &GroupBytes, nb::arg("num_ranks"),
        "Returns the size of a control block, its arena and its mailboxes, in a group of so many ranks");
#endif
#if defined(JAX_EP_WITH_NCCL)
  m.def("nccl_version", &FindNcclVersion,
        "Returns the version of the NCCL that JAX has loaded, empty with a reason if hops cannot use it");
  m.def("rail_id", &MakeRailId, Unlocked(), "Returns an id by which the ranks of a rail find each other");
  m.def("connect_rails", &ConnectRails, nb::arg("key"), nb::arg("rails"), nb::arg("num_domains"), Unlocked(),
        "Connects this process's devices with those of other domains. Returns an error, empty on success");
  m.def("allocate_rails", &AllocateRails, nb::arg("key"), Unlocked(),
        "Allocates the windows and loads the kernel. Returns an error, empty on success");
  m.def("register_rails", &RegisterRails, nb::arg("key"), Unlocked(),
        "Registers the windows. Returns an error, empty on success");
  m.def("join_rails", &JoinRails, nb::arg("key"), Unlocked(),
        "Creates communicators for kernels. Returns an error, empty on success");
  m.def("try_rails", &TryRails, nb::arg("key"), nb::arg("trial_s"), Unlocked(),
        "Runs a few hops. Returns an error, empty on success");
  m.def("publish_rails", &PublishRails, nb::arg("key"), "Makes complete rails available to programs");
  m.def("drop_rails", &DropRails, nb::arg("key"), Unlocked(),
        "Releases the resources of rails that cannot be used");
  m.def("why_rails_failed", &DescribeRailFailure, nb::arg("key"),
        "Returns why a hop has failed, empty if none has");
#endif
}

}  // namespace jax_ep
