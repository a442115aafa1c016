// What a handler on a GPU knows of its call.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <optional>

#include "handlers/decode/check.h"
#include "kernels/kernels.h"
#include "runtime/gpu/peers.h"

namespace jax_ep {

// The state of a call site whose op communicates: what its kernels publish of it, from the first call of each
// device on, when the ranks have met on the host.
class CudaCallSite {
 public:
  static ffi::TypeId id;

  std::optional<Call> Find(int32_t device) const;
  void Add(int32_t device, const Call& call, bool through_arena);
  // Returns whether the op goes through the arena. The first call decides for all devices: a Group opened
  // later may have another num_sms, and ranks must not take different paths.
  bool FixPath(bool fits_arena);
  // Drops the decision if no call has succeeded yet, so that a Group made after a failure decides again.
  void ReleasePath();
  // Returns the group of this call site, null if it is closed. Searches by key only if the last one found
  // was closed meanwhile: the search takes a lock that all groups share.
  std::shared_ptr<Group> FindGroup(std::string_view key);
  // Returns the device side of an open group, null if there is none. It never changes, because it lives as
  // long as the process.
  DevicePeers* FindPeers(const std::string& key);
  // Returns the same once a call has succeeded, null before.
  const DevicePeers* peers() const { return has_succeeded_.load() ? peers_.load() : nullptr; }

 private:
  mutable std::mutex mutex_;
  std::map<int32_t, Call> calls_;
  std::optional<bool> through_arena_;
  std::shared_ptr<Group> group_;
  std::atomic<DevicePeers*> peers_{nullptr};
  std::atomic<bool> has_succeeded_{false};
};

struct CudaContext {
  using Result = ffi::Error;

  cudaStream_t stream;
  int32_t device;
  CudaCallSite* site;

  static ffi::Error Fail(ffi::Error error) { return error; }
  static ffi::Error Refuse(ffi::Error error) { return error; }
  std::shared_ptr<Group> FindGroup(std::string_view key) const { return site->FindGroup(key); }
  // It lies on the device; the kernel compares it.
  static MeshPlace ReadPlace(const MeshPlace*) { return kOnDevice; }
};

struct CudaLocalContext {
  using Result = ffi::Error;

  cudaStream_t stream;
  int32_t device;

  static ffi::Error Fail(ffi::Error error) { return error; }
};

// The result of a launch.
ffi::Error Launched(const char* op, cudaError_t error);

// What is told of an op that communicates before it is launched.
struct Announcement {
  const char* op;
  // The op, its shapes and dtypes, in words: the same on all ranks, or none of them moves a row.
  std::function<std::string()> what;
  std::vector<const void*> published{};  // buffers that peers reach
  bool through_arena = false;
  bool may_miss_ranks = false;  // some ranks need not call it
  std::string obstacle{};       // why this rank cannot launch it
  // Launches what moves nothing and tells ranks outside of the group, which wait for this one in the op, that
  // the group has failed. Null: there are none.
  std::function<void(const Peers&)> tell_others{};
};

// Launches an op with its group's control blocks. At the first call of a call site all ranks of the group
// meet before and after the launch: what others load late on one device holds locks of the driver, and could
// hold up a kernel that its peers wait for. An error if an earlier op of the group failed, if the ranks call
// different ops, or if the group's other processes cannot reach a buffer. Where ranks may be missing they do
// not meet: who does not come would hold up the others, and nobody says here who is to come.
ffi::Error LaunchTogether(const CudaContext& context, const Seat& seat, const Announcement& announced,
                          const std::function<cudaError_t(const Peers&)>& launch);

// The shapes of a routing in words.
std::string Describe(const Shape& shape);
std::string DtypeName(ffi::DataType type);

// Least SMs of an op that goes through the arena: some of its blocks send, others receive.
constexpr int kLeastArenaSms = 8;

// Whether an op of a group goes through the arena: the same on all ranks.
bool FitsArena(const Group& group, const Shape& shape, int64_t row_bytes);
bool CombineFitsArena(const Group& group, const Shape& shape, int64_t row_bytes);

// What a launch depends on; `group` is null for local ops.
cuda::Device ThisDevice(const Group* group, bool through_arena = false);

}  // namespace jax_ep

namespace xla::ffi {

template <>
struct CtxDecoding<jax_ep::CudaContext> {
  using Type = jax_ep::CudaContext;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic) {
    auto stream = CtxDecoding<PlatformStream<cudaStream_t>>::Decode(api, ctx, diagnostic);
    auto device = CtxDecoding<DeviceOrdinal>::Decode(api, ctx, diagnostic);
    auto site = CtxDecoding<State<jax_ep::CudaCallSite>>::Decode(api, ctx, diagnostic);
    if (!stream || !device || !site) return std::nullopt;
    return Type{*stream, *device, *site};
  }
};

template <>
struct CtxDecoding<jax_ep::CudaLocalContext> {
  using Type = jax_ep::CudaLocalContext;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic) {
    auto stream = CtxDecoding<PlatformStream<cudaStream_t>>::Decode(api, ctx, diagnostic);
    auto device = CtxDecoding<DeviceOrdinal>::Decode(api, ctx, diagnostic);
    if (!stream || !device) return std::nullopt;
    return Type{*stream, *device};
  }
};

}  // namespace xla::ffi
