#include "handlers/cpu.h"

#include <utility>

namespace jax_ep {

ffi::TypeId CallSite::id = {};

ffi::Future Meet(const CpuContext& context, Seat seat, std::unique_ptr<Share> share,
                 const Attendance& attendance) {
  ffi::Promise promise;
  ffi::Future future(promise);
  context.site->meetings.Arrive({context.run_id, std::move(seat.group), seat.place, std::move(share),
                                 attendance,
                                 [promise = std::move(promise)](const std::string* error) mutable {
                                   if (error == nullptr) {
                                     promise.SetAvailable();
                                   } else {
                                     promise.SetError(ffi::Error(ffi::ErrorCode::kDeadlineExceeded, *error));
                                   }
                                 }});
  return future;
}

}  // namespace jax_ep
