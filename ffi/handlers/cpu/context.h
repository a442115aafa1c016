// Context of a handler on the CPU, and the meeting of its ranks.
#pragma once

#include <memory>
#include <optional>

#include "handlers/decode/check.h"
#include "runtime/cpu/deadlines.h"
#include "runtime/cpu/meeting.h"

namespace jax_ep {

// State of a call site whose op communicates.
struct CpuCallSite {
  explicit CpuCallSite(const char* op) : meetings(op) {}
  static ffi::TypeId id;
  MeetingPoint meetings;
};

struct CpuContext {
  using Result = ffi::Future;

  int64_t run_id;
  int32_t device;
  CpuCallSite* site;

  static ffi::Future Fail(ffi::Error error) {
    ffi::Promise promise;
    ffi::Future future(promise);
    promise.SetError(std::move(error));
    return future;
  }

  // Fails this rank and the other ranks of the run, because they would wait for this one.
  ffi::Future FailRun(ffi::Error error) const {
    jax_ep::FailRun(run_id, error.message());
    return Fail(std::move(error));
  }

  static std::shared_ptr<Group> FindGroup(std::string_view key) {
    return jax_ep::FindGroup(std::string(key));
  }
  static MeshPosition ReadPosition(const MeshPosition* position) { return *position; }
};

// Context of ops that do not communicate.
struct CpuLocalContext {
  using Result = ffi::Error;
  static ffi::Error Fail(ffi::Error error) { return error; }
};

// Adds this rank's contribution to the meeting. The future is ready when all ranks have left.
ffi::Future Meet(const CpuContext& context, GroupMember member, std::unique_ptr<Contribution> contribution,
                 const Attendance& attendance);

}  // namespace jax_ep

namespace xla::ffi {

template <>
struct CtxDecoding<jax_ep::CpuContext> {
  using Type = jax_ep::CpuContext;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic) {
    auto run = CtxDecoding<RunId>::Decode(api, ctx, diagnostic);
    auto device = CtxDecoding<DeviceOrdinal>::Decode(api, ctx, diagnostic);
    auto site = CtxDecoding<State<jax_ep::CpuCallSite>>::Decode(api, ctx, diagnostic);
    if (!run || !device || !site) return std::nullopt;
    return Type{run->run_id, *device, *site};
  }
};

template <>
struct CtxDecoding<jax_ep::CpuLocalContext> {
  using Type = jax_ep::CpuLocalContext;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    return Type{};
  }
};

}  // namespace xla::ffi
