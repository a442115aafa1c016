#include "handlers/cpu/context.h"

#include <utility>

namespace jax_ep {

ffi::TypeId CpuCallSite::id = {};

ffi::Future Meet(const CpuContext& context, GroupMember member, std::unique_ptr<Contribution> contribution,
                 const Attendance& attendance) {
  ffi::Promise promise;
  ffi::Future future(promise);
  context.site->meetings.Arrive({context.run_id, std::move(member.group), member.position, member.list,
                                 std::move(contribution), attendance,
                                 [promise = std::move(promise)](const Failure* failure) mutable {
                                   if (failure == nullptr) return promise.SetAvailable();
                                   const auto code = failure->is_late ? ffi::ErrorCode::kDeadlineExceeded
                                                                      : ffi::ErrorCode::kInvalidArgument;
                                   promise.SetError(ffi::Error(code, failure->text));
                                 }});
  return future;
}

}  // namespace jax_ep
