// Context of a handler on GPUs, and the launch of ops that communicate.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <optional>

#include "handlers/decode/check.h"
#include "kernels/launches.h"
#include "runtime/gpu/peers.h"
#include "runtime/gpu/side_stream.h"

namespace jax_ep {

// State of a call site whose op communicates: its group, its path, and the call that its kernels publish.
class GpuCallSite {
 public:
  static ffi::TypeId id;

  explicit GpuCallSite(std::string_view program) : program_(program) {}

  // Returns the name of the call site's program. It is the same in all processes, because they run the same
  // programs.
  const std::string& program() const { return program_; }
  // Returns the call of a device whose first call has succeeded.
  std::optional<Call> Find(int32_t device) const;
  // Stores the call of a device after the ranks have met on the host.
  void Add(int32_t device, const Call& call, bool through_arena);
  // Returns whether the op goes through the arena. The first call decides for all devices: a Group opened
  // later may have another num_sms, and ranks must not take different paths.
  bool FixPath(bool fits_arena);
  // Drops the decision if no call has succeeded yet, so that a Group made after a failure decides again.
  void ReleasePath();
  // Returns the group of this call site, null if it is closed. Searches by key only if the cached group was
  // closed, because the search takes a lock that all groups share.
  std::shared_ptr<Group> FindGroup(std::string_view key);
  // Returns the device side of an open group, null if there is none. It never changes, because it lives as
  // long as the process.
  DevicePeers* FindPeers(const std::string& key);
  // Returns an error if the group has failed after a call has succeeded.
  ffi::Error CheckPeers() const;
  // Returns the stream of a device on which the op runs, if it runs beside another.
  SideStream& SideStreamOf(int32_t device);

 private:
  const std::string program_;
  mutable std::mutex mutex_;
  std::map<int32_t, Call> calls_;
  std::map<int32_t, SideStream> side_streams_;
  std::optional<bool> through_arena_;
  std::shared_ptr<Group> group_;
  std::atomic<DevicePeers*> peers_{nullptr};
  std::atomic<bool> has_succeeded_{false};
};

struct GpuContext {
  using Result = ffi::Error;

  cudaStream_t stream;
  int32_t device;
  GpuCallSite* site;
  cudaEvent_t starting = nullptr;  // recorded before the kernel that communicates, if not null

  static ffi::Error Fail(ffi::Error error) { return error; }
  static ffi::Error FailRun(ffi::Error error) { return error; }
  std::shared_ptr<Group> FindGroup(std::string_view key) const { return site->FindGroup(key); }
  // Returns no position: the operand lies on the device, where the kernel compares it.
  static MeshPosition ReadPosition(const MeshPosition*) { return kPositionOnDevice; }
};

struct GpuLocalContext {
  using Result = ffi::Error;

  cudaStream_t stream;
  int32_t device;

  static ffi::Error Fail(ffi::Error error) { return error; }
};

// Returns the error of a launch, if any.
ffi::Error LaunchResult(const char* op, cudaError_t error);

// Description of an op that communicates, before it is launched.
struct OpDescription {
  const char* op;
  // Returns a text with the op, its shapes and dtypes. No rank moves a row unless this text and the name of
  // the program are the same on all ranks.
  std::function<std::string()> describe;
  std::vector<const void*> published{};  // buffers that peers reach
  bool through_arena = false;
  bool may_miss_ranks = false;       // some ranks may not call the op
  std::string precondition_error{};  // reason why this rank cannot launch the op; empty: none
  // Launches a kernel that moves no rows and reports to ranks outside the group, which wait for this rank in
  // the op, that the group has failed. Null: there are no such ranks.
  std::function<void(const Peers&)> notify_other_domains{};
};

// Launches an op with its group's control blocks. At the first call of a call site all ranks of the group
// meet before and after the launch, because loading a kernel late on one device holds locks of the driver and
// could block a kernel on which peers wait. Returns an error if an earlier op of the group failed, if the
// ranks call different ops, or if the group's other processes cannot reach a buffer. If ranks may be missing,
// the ranks do not meet, because a missing rank would block the others, and the host does not know which
// ranks are active.
ffi::Error LaunchCollective(const GpuContext& context, const GroupMember& member,
                            const OpDescription& description,
                            const std::function<cudaError_t(const Peers&)>& launch);

// Run a push or a pull that was decoded. If the first call fails, the next one may take another path.
ffi::Error RunPush(const GpuContext& context, const char* op, GroupMember member, PushParams params);
ffi::Error RunPull(const GpuContext& context, const char* op, GroupMember member, PullParams params);

// Returns the shapes of a routing as a text.
std::string Describe(const Shape& shape);
std::string DtypeName(ffi::DataType type);

// Smallest number of SMs of an op that goes through the arena, some of whose blocks send while others
// receive.
constexpr int kMinArenaSms = 8;

// Returns whether an op of a group fits the arena. The result is the same on all ranks.
bool FitsArena(const Group& group, const Shape& shape, int64_t row_bytes);
bool CombineFitsArena(const Group& group, const Shape& shape, int64_t row_bytes);

// Describes the current device for a launch. `group` is null for local ops.
cuda::Device ThisDevice(const Group* group, bool through_arena = false);

}  // namespace jax_ep

namespace xla::ffi {

template <>
struct CtxDecoding<jax_ep::GpuContext> {
  using Type = jax_ep::GpuContext;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic) {
    auto stream = CtxDecoding<PlatformStream<cudaStream_t>>::Decode(api, ctx, diagnostic);
    auto device = CtxDecoding<DeviceOrdinal>::Decode(api, ctx, diagnostic);
    auto site = CtxDecoding<State<jax_ep::GpuCallSite>>::Decode(api, ctx, diagnostic);
    if (!stream || !device || !site) return std::nullopt;
    return Type{*stream, *device, *site};
  }
};

template <>
struct CtxDecoding<jax_ep::GpuLocalContext> {
  using Type = jax_ep::GpuLocalContext;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic) {
    auto stream = CtxDecoding<PlatformStream<cudaStream_t>>::Decode(api, ctx, diagnostic);
    auto device = CtxDecoding<DeviceOrdinal>::Decode(api, ctx, diagnostic);
    if (!stream || !device) return std::nullopt;
    return Type{*stream, *device};
  }
};

}  // namespace xla::ffi
