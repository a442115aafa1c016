// Grouped products on GPUs. (On the CPU XLA's own ragged_dot serves.)
#include "handlers/cuda.h"
#include "handlers/cuda_handlers.h"
#include "kernels/kernels.h"

namespace jax_ep {

static ffi::Error RunGroupedDot(CudaLocalContext context, ffi::AnyBuffer rows, ffi::AnyBuffer others,
                                ffi::BufferR1<ffi::S32> group_sizes, ffi::Result<ffi::AnyBuffer> out,
                                int64_t product) {
  const auto type = FloatOfType(rows.element_type());
  if (!type || *type == Float::kF64 || others.element_type() != rows.element_type() ||
      out->element_type() != rows.element_type()) {
    return InvalidArgument(
        "grouped_dot: rows, others and the result must all be float16, bfloat16 or float32");
  }
  GroupedDotParams params{};
  params.product = static_cast<GroupedDot>(product);
  const bool of_weights = params.product == GroupedDot::kWeights;
  const size_t rank = of_weights ? 2 : 3;
  if (rows.dimensions().size() != 2 || others.dimensions().size() != rank || product < 0 || product > 2) {
    return InvalidArgument("grouped_dot: rows must be [C, M], others [L, M, N] or, for the weights, [C, N]");
  }
  const int64_t num_rows = rows.dimensions()[0], inner = rows.dimensions()[1];
  const int64_t num_groups = group_sizes.element_count();
  const bool transposed = params.product == GroupedDot::kRowsTransposed;
  const int64_t outer = others.dimensions()[transposed ? 1 : rank - 1];
  auto error = of_weights
                   ? FirstError({CheckShape("grouped_dot: others", others, {num_rows, outer}),
                                 CheckShape("grouped_dot: the result", *out, {num_groups, inner, outer})})
                   : FirstError({CheckShape("grouped_dot: weights", others,
                                            transposed ? std::vector<int64_t>{num_groups, outer, inner}
                                                       : std::vector<int64_t>{num_groups, inner, outer}),
                                 CheckShape("grouped_dot: the result", *out, {num_rows, outer})});
  if (error.failure()) return error;
  params.type = *type;
  params.num_rows = static_cast<int32_t>(num_rows);
  params.num_groups = static_cast<int32_t>(num_groups);
  params.inner = static_cast<int32_t>(inner);
  params.outer = static_cast<int32_t>(outer);
  params.group_sizes = group_sizes.typed_data();
  params.rows = rows.untyped_data();
  params.others = others.untyped_data();
  params.out = out->untyped_data();
  return Launched("grouped_dot", cuda::LaunchGroupedDot(params, context.stream));
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaGroupedDotHandler, RunGroupedDot,
                              ffi::Ffi::Bind()
                                  .Ctx<CudaLocalContext>()
                                  .Arg<ffi::AnyBuffer>()           // rows [C, M]
                                  .Arg<ffi::AnyBuffer>()           // others [L, M, N] or [C, N]
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // group_sizes [L]
                                  .Ret<ffi::AnyBuffer>()           // [C, N] or [L, M, N]
                                  .Attr<int64_t>("product"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
