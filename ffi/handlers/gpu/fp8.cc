// Conversion to FP8 on GPUs. The CPU uses XLA's ops.
#include "handlers/decode/arrays.h"
#include "handlers/gpu/handlers.h"
#include "handlers/gpu/launch.h"
#include "kernels/launches.h"

namespace jax_ep {

// Converts rows [C, M], or matrices [L, C, M] if `of_matrices`. Results that are not asked for have no
// elements.
static ffi::Error ComputeQuantize(GpuLocalContext context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                  int64_t of_matrices, int64_t round_scale, int64_t rows_per_group,
                                  float floor) {
  const char* op = "quantize";
  Arrays in(op, BuffersOf(args)), out(op, BuffersOf(rets));
  const ffi::AnyBuffer* const x = in.TakeAny("x");
  const size_t rank = of_matrices ? 3 : 2;
  if (x == nullptr || x->dimensions().size() != rank) {
    return InvalidArgument("quantize: x must be [C, M], or matrices [L, C, M]");
  }
  const auto dims = x->dimensions();
  const int64_t L = of_matrices ? dims[0] : 1, C = dims[rank - 2], M = dims[rank - 1];
  if (auto error = FirstError({CheckProduct(op, "rows", {L, C}), CheckProduct(op, "columns", {M})});
      error.failure()) {
    return error;
  }
  if (M % kFp8Block != 0 || (of_matrices && C % kFp8Block != 0)) {
    return InvalidArgument("quantize: sizes of blocks must be multiples of 128, got ", C, " x ", M);
  }
  const int64_t blocks = M / kFp8Block;
  QuantizeParams params{};
  params.x = x->untyped_data();
  params.of_matrices = of_matrices != 0;
  params.rounds = round_scale != 0;
  params.floor = floor;
  params.num_matrices = static_cast<int32_t>(L);
  params.num_rows = static_cast<int32_t>(C);
  params.width = static_cast<int32_t>(M);
  const bool is_scaled = x->element_type() == ffi::F8E4M3FN;
  const auto type = FloatOfType(x->element_type());
  if (!is_scaled && (!type || *type == Float::kF64)) {
    return InvalidArgument("quantize: x must be float16, bfloat16, float32, or float8_e4m3fn with scales");
  }
  if (is_scaled && of_matrices) return InvalidArgument("quantize: matrices must not be FP8 already");
  if (type) params.type = *type;
  params.x_scales = in.TakeFloats("scales of x", {C, blocks}, is_scaled);
  if (in.NextIsGiven() && !of_matrices) {
    params.num_groups = static_cast<int32_t>(in.Peek()->element_count());
    params.group_sizes = in.TakeInts("group_sizes", {params.num_groups});
    if (auto error = CheckPadding(op, rows_per_group, C, params.num_groups); error.failure()) return error;
    params.rows_per_group = static_cast<int32_t>(rows_per_group);
  }
  const std::vector<int64_t> shape(dims.begin(), dims.end());
  const bool keeps = out.NextIsGiven();
  if (is_scaled && keeps)
    return InvalidArgument("quantize: rows that are FP8 already can only be transposed");
  params.values = out.TakeFp8("values", shape, keeps);
  params.scales = of_matrices ? out.TakeFloats("scales", {L, C / kFp8Block, blocks})
                              : out.TakeFloats("scales", {C, blocks}, keeps);
  const ffi::AnyBuffer* const transposed = out.Peek();
  const bool transposes = out.NextIsGiven();
  const int64_t columns = of_matrices ? C : transposes ? transposed->dimensions().back() : 0;
  if (columns % kFp8Block != 0 || columns > INT32_MAX) {
    return InvalidArgument("quantize: the transpose must have a multiple of 128 columns, got ", columns);
  }
  const std::vector<int64_t> turned =
      of_matrices ? std::vector<int64_t>{L, M, C} : std::vector<int64_t>{M, columns};
  params.transposed = out.TakeFp8("the transpose", turned, transposes);
  params.transposed_scales =
      out.TakeFloats("scales of the transpose", {columns / kFp8Block, M}, transposes && !of_matrices);
  params.num_columns = static_cast<int32_t>(columns);
  auto error = FirstError({in.error(), out.error()});
  if (error.failure() || L * C * M == 0) return error;
  return LaunchResult(op, cuda::LaunchQuantize(params, context.stream));
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuQuantizeHandler, ComputeQuantize,
                              ffi::Ffi::Bind()
                                  .Ctx<GpuLocalContext>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("of_matrices")
                                  .Attr<int64_t>("round_scale")
                                  .Attr<int64_t>("rows_per_group")
                                  .Attr<float>("floor"),
                              {ffi::Traits::kCmdBufferCompatible});

// Converts the activation of z [C, 2F] to FP8 rows; or, with the cotangent d_hidden [C, F], to FP8 columns,
// and the cotangent of z to rows and columns.
static ffi::Error ComputeQuantizeGated(GpuLocalContext context, ffi::RemainingArgs args,
                                       ffi::RemainingRets rets, int64_t activation, int64_t round_scale,
                                       int64_t rows_per_group, float floor) {
  const char* op = "quantize_gated";
  Arrays in(op, BuffersOf(args)), out(op, BuffersOf(rets));
  const ffi::AnyBuffer* const z = in.TakeAny("z");
  if (z == nullptr || z->dimensions().size() != 2 || z->element_type() != ffi::BF16 ||
      z->dimensions()[1] % (2 * kFp8Block) != 0) {
    return InvalidArgument("quantize_gated: z must be bfloat16 [C, 2F], F a multiple of 128");
  }
  if (activation < 0 || activation > static_cast<int64_t>(Activation::kClipped)) {
    return InvalidArgument("quantize_gated: unknown activation ", activation);
  }
  const int64_t C = z->dimensions()[0], F = z->dimensions()[1] / 2;
  QuantizeGatedParams params{};
  params.activation = static_cast<Activation>(activation);
  params.rounds = round_scale != 0;
  params.floor = floor;
  params.z = z->untyped_data();
  const bool is_backward = in.NextIsGiven();
  const ffi::AnyBuffer* const d_hidden = in.TakeAny("d_hidden");
  if (is_backward) {
    if (d_hidden->element_type() != ffi::BF16 || d_hidden->element_count() != static_cast<size_t>(C * F)) {
      return InvalidArgument("quantize_gated: d_hidden must be bfloat16 [C, F]");
    }
    params.d_hidden = d_hidden->untyped_data();
  }
  const ffi::AnyBuffer* const sizes = in.Peek();
  params.num_groups = sizes == nullptr ? 0 : static_cast<int32_t>(sizes->element_count());
  params.group_sizes = in.TakeInts("group_sizes", {params.num_groups});
  const int64_t columns = (C / kFp8Block + params.num_groups) * kFp8Block;
  if (auto error = FirstError({CheckProduct(op, "rows", {C}), CheckProduct(op, "columns", {2 * F}),
                               CheckProduct(op, "rows, with the padding of their groups,", {columns}),
                               CheckPadding(op, rows_per_group, C, params.num_groups)});
      error.failure()) {
    return error;
  }
  params.rows_per_group = static_cast<int32_t>(rows_per_group);
  params.num_rows = static_cast<int32_t>(C);
  params.width = static_cast<int32_t>(F);
  params.num_columns = static_cast<int32_t>(columns);
  const auto take_rows = [&](QuantizedResults& to, int64_t width) {
    to.values = out.TakeFp8("values", {C, width}, true);
    to.scales = out.TakeFloats("scales", {C, width / kFp8Block}, true);
  };
  const auto take_columns = [&](QuantizedResults& to, int64_t width) {
    to.transposed = out.TakeFp8("the transpose", {width, columns}, true);
    to.transposed_scales = out.TakeFloats("scales of the transpose", {columns / kFp8Block, width}, true);
  };
  if (is_backward) {
    take_columns(params.hidden, F);
    take_rows(params.d_z, 2 * F);
    take_columns(params.d_z, 2 * F);
  } else {
    take_rows(params.hidden, F);
  }
  auto error = FirstError({in.error(), out.error()});
  if (error.failure() || C * F * params.num_groups == 0) return error;
  return LaunchResult(op, cuda::LaunchQuantizeGated(params, context.stream));
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuQuantizeGatedHandler, ComputeQuantizeGated,
                              ffi::Ffi::Bind()
                                  .Ctx<GpuLocalContext>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("activation")
                                  .Attr<int64_t>("round_scale")
                                  .Attr<int64_t>("rows_per_group")
                                  .Attr<float>("floor"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
