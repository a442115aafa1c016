// Handler around JAX's collectives between domains on the CPU, which do not report the ranks that wait in
// them. One call before a collective and one after it record the wait in the group, which names late ranks in
// TakeExpired.
#include <cstring>

#include "handlers/cpu/context.h"
#include "handlers/cpu/handlers.h"

namespace jax_ep {

// Copies the array, so that XLA cannot move the collective out of the two calls.
static ffi::Error Hop(ffi::RunId run, int32_t device, ffi::Buffer<ffi::S32> position, ffi::AnyBuffer in,
                      ffi::Result<ffi::AnyBuffer> out, std::string_view group, int64_t num_ranks,
                      int64_t ends, std::string_view /*program*/) {
  if (in.size_bytes() != out->size_bytes() || position.element_count() != 2) {
    return InvalidArgument("hop: expected one position and a result of the operand's ", in.size_bytes(),
                           " bytes, got ", out->size_bytes());
  }
  GroupMember member;
  const MeshPosition own_position{position.typed_data()[0], position.typed_data()[1]};
  auto error = FindMember("hop", group, FindGroup(std::string(group)), device, own_position,
                          static_cast<int32_t>(num_ranks), member);
  if (error.failure()) {
    FailRun(run.run_id, error.message());
    return error;
  }
  std::memcpy(out->untyped_data(), in.untyped_data(), in.size_bytes());
  if (ends != 0) {
    member.group->EndHop(member.position, run.run_id);
  } else {
    member.group->BeginHop(member.position, run.run_id);
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(HopHandler, Hop,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // position [2]
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::string_view>("group")
                                  .Attr<int64_t>("num_ranks")
                                  .Attr<int64_t>("ends")
                                  .Attr<std::string_view>("program"));

}  // namespace jax_ep
