// What a handler on the CPU knows of its call, and how its ranks meet.
#pragma once

#include <memory>
#include <optional>

#include "handlers/decode/check.h"
#include "runtime/cpu/deadlines.h"
#include "runtime/cpu/meeting.h"

namespace jax_ep {

// The state of a call site whose op communicates.
struct CallSite {
  explicit CallSite(const char* op) : meetings(op) {}
  static ffi::TypeId id;
  MeetingPoint meetings;
};

struct CpuContext {
  using Result = ffi::Future;

  int64_t run_id;
  int32_t device;
  CallSite* site;

  static ffi::Future Fail(ffi::Error error) {
    ffi::Promise promise;
    ffi::Future future(promise);
    promise.SetError(std::move(error));
    return future;
  }

  // Fails, and so do the other ranks in this run, which would wait for this one.
  ffi::Future Refuse(ffi::Error error) const {
    jax_ep::Refuse(run_id, error.message());
    return Fail(std::move(error));
  }

  static std::shared_ptr<Group> FindGroup(std::string_view key) {
    return jax_ep::FindGroup(std::string(key));
  }
  static MeshPlace ReadPlace(const MeshPlace* place) { return *place; }
};

// Ops that do not communicate.
struct CpuLocalContext {
  using Result = ffi::Error;
  static ffi::Error Fail(ffi::Error error) { return error; }
};

// Brings this rank's share to the meeting. The future is ready when all ranks have left.
ffi::Future Meet(const CpuContext& context, Seat seat, std::unique_ptr<Share> share,
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
    auto site = CtxDecoding<State<jax_ep::CallSite>>::Decode(api, ctx, diagnostic);
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
