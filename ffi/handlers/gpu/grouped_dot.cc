// Grouped products on GPUs. The CPU uses XLA's ragged_dot.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "handlers/gpu/handlers.h"
#include "handlers/gpu/launch.h"
#include "kernels/launches.h"
#include "kernels/products/products.h"
#include "runtime/gpu/driver.h"
#include "runtime/gpu/prepare.h"

namespace jax_ep {

// Chooses the engine of a device that is in no group. Where there is a group, its set-up has done so, because
// the check of an engine allocates memory, and may wait for a kernel that waits for a peer. This runs before
// every execution of a program, and never while a CUDA graph is recorded.
static ffi::Error InitializeProducts(int32_t device, ffi::RemainingArgs, ffi::RemainingRets,
                                     ffi::Dictionary) {
  if (cuda::AreProductsPrepared(device)) return ffi::Error::Success();
  try {
    const std::string error = OnDevice(device, PrepareProducts);
    if (error.empty()) return ffi::Error::Success();
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, error);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(Text("grouped_dot: GPU ", device, ": ", error.what()));
  }
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    GpuProductsInitialize, InitializeProducts,
    ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs());

// Returns the number of redundant experts' matrices. Without them the operand is a scalar, or the result
// empty.
static int64_t NumRedundant(const ffi::AnyBuffer& redundant) {
  return redundant.dimensions().size() == 3 ? redundant.dimensions()[0] : 0;
}

// Checks an array of redundant experts' matrices, or of their scales, if there are any.
static ffi::Error CheckRedundant(const ffi::AnyBuffer& redundant, ffi::DataType type,
                                 const std::vector<int64_t>& shape) {
  if (shape[0] == 0) return ffi::Error::Success();
  if (redundant.element_type() != type) {
    return InvalidArgument("grouped_dot: matrices of redundant experts must have the dtype of the others");
  }
  return CheckShape("grouped_dot: matrices of redundant experts", redundant, shape);
}

// Returns whether a product has no elements. Then nothing is launched, because a grid must have blocks.
static bool IsEmpty(const ffi::AnyBuffer& out, const ffi::AnyBuffer& redundant_out) {
  return out.element_count() == 0 && redundant_out.element_count() == 0;
}

// Decodes the parameters that all handlers have. Each handler checks its other shapes.
static ffi::Error DecodeGroupedDot(const ffi::AnyBuffer& rows, const ffi::AnyBuffer& others,
                                   const ffi::AnyBuffer& redundant, ffi::BufferR1<ffi::S32> group_sizes,
                                   ffi::Result<ffi::AnyBuffer> out, ffi::ResultBufferR1<ffi::U8> scratch,
                                   int64_t num_sms, int64_t rows_per_group, int64_t outer,
                                   GroupedDotParams& params) {
  const int64_t num_rows = rows.dimensions()[0], inner = rows.dimensions()[1];
  const int64_t num_groups = group_sizes.element_count();
  const bool has_row_scales = params.row_scales != nullptr && params.product != GroupedDot::kWeights;
  if (const int64_t bytes =
          GroupedDotScratchBytes(num_groups, num_rows, has_row_scales ? inner / kFp8Block : 0);
      static_cast<int64_t>(scratch->element_count()) < bytes) {
    return InvalidArgument("grouped_dot: the scratch must have ", bytes, " bytes, got ",
                           scratch->element_count());
  }
  constexpr int64_t kMax = (int64_t{1} << 31) - 256;  // they are rounded up to whole tiles in 32 bits
  if (std::max({num_rows, num_groups, inner, outer}) > kMax || num_sms < 0 || num_sms > kMax) {
    return InvalidArgument("grouped_dot: sizes must be at most ", kMax,
                           ", and num_sms must be 0 or more; got ", num_rows, " rows, ", num_groups,
                           " groups, widths ", inner, " and ", outer, ", num_sms ", num_sms);
  }
  if (rows_per_group < 0 || rows_per_group > kMax) {
    return InvalidArgument("grouped_dot: rows_per_group must be 0 or more, and at most ", kMax, ", got ",
                           rows_per_group);
  }
  params.rows_per_group = static_cast<int32_t>(rows_per_group);
  params.num_rows = static_cast<int32_t>(num_rows);
  params.num_groups = static_cast<int32_t>(num_groups);
  params.num_home = static_cast<int32_t>(num_groups - NumRedundant(redundant));
  params.redundant = redundant.untyped_data();
  params.inner = static_cast<int32_t>(inner);
  params.outer = static_cast<int32_t>(outer);
  params.group_sizes = group_sizes.typed_data();
  params.rows = rows.untyped_data();
  params.others = others.untyped_data();
  params.out = out->untyped_data();
  params.scratch = scratch->typed_data();
  params.num_sms = static_cast<int32_t>(num_sms);
  return ffi::Error::Success();
}

static ffi::Error ComputeGroupedDot(GpuLocalContext context, ffi::AnyBuffer rows, ffi::AnyBuffer others,
                                    ffi::AnyBuffer redundant_others, ffi::BufferR1<ffi::S32> group_sizes,
                                    ffi::BufferR0<ffi::S32> first_row, ffi::Result<ffi::AnyBuffer> out,
                                    ffi::Result<ffi::AnyBuffer> redundant_out,
                                    ffi::ResultBufferR1<ffi::U8> scratch, int64_t product, int64_t allow_tf32,
                                    int64_t num_sms, int64_t rows_per_group) {
  const auto type = FloatOfType(rows.element_type());
  if (!type || *type == Float::kF64 || others.element_type() != rows.element_type() ||
      out->element_type() != rows.element_type()) {
    return InvalidArgument(
        "grouped_dot: rows, others and the result must all be float16, bfloat16 or float32");
  }
  GroupedDotParams params{};
  params.product = static_cast<GroupedDot>(product);
  params.first_row = first_row.typed_data();
  params.type = *type;
  params.allow_tf32 = allow_tf32 != 0;
  const bool is_weight_gradient = params.product == GroupedDot::kWeights;
  const size_t rank = is_weight_gradient ? 2 : 3;
  if (rows.dimensions().size() != 2 || others.dimensions().size() != rank || product < 0 || product > 2) {
    return InvalidArgument("grouped_dot: rows must be [C, M], others [L, M, N] or, for the weights, [C, N]");
  }
  const int64_t num_rows = rows.dimensions()[0], inner = rows.dimensions()[1];
  const int64_t num_groups = group_sizes.element_count();
  const ffi::AnyBuffer& redundant = is_weight_gradient ? *redundant_out : redundant_others;
  const int64_t num_redundant = NumRedundant(redundant), num_home = num_groups - num_redundant;
  const bool transposed = params.product == GroupedDot::kRowsTransposed;
  const int64_t outer = others.dimensions()[transposed ? 1 : rank - 1];
  const auto matrices = [&](int64_t count) {
    return transposed ? std::vector<int64_t>{count, outer, inner} : std::vector<int64_t>{count, inner, outer};
  };
  auto error = is_weight_gradient
                   ? FirstError({CheckShape("grouped_dot: others", others, {num_rows, outer}),
                                 CheckShape("grouped_dot: the result", *out, matrices(num_home))})
                   : FirstError({CheckShape("grouped_dot: weights", others, matrices(num_home)),
                                 CheckShape("grouped_dot: the result", *out, {num_rows, outer})});
  if (error.success()) error = CheckRedundant(redundant, rows.element_type(), matrices(num_redundant));
  if (error.success()) error = CheckPadding("grouped_dot", rows_per_group, num_rows, num_groups);
  if (error.success()) {
    error = DecodeGroupedDot(rows, others, redundant, group_sizes, out, scratch, num_sms, rows_per_group,
                             outer, params);
  }
  if (error.failure() || IsEmpty(*out, *redundant_out)) return error;
  return LaunchResult("grouped_dot", cuda::LaunchGroupedDot(params, ThisDevice(nullptr), context.stream));
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuGroupedDotHandler, ComputeGroupedDot,
                              ffi::Ffi::Bind()
                                  .Ctx<GpuLocalContext>()
                                  .Arg<ffi::AnyBuffer>()           // rows [C, M]
                                  .Arg<ffi::AnyBuffer>()           // others [L, M, N] or [C, N]
                                  .Arg<ffi::AnyBuffer>()           // others [S, M, N], or a scalar
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // group_sizes [L + S]
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // first_row
                                  .Ret<ffi::AnyBuffer>()           // [C, N] or [L, M, N]
                                  .Ret<ffi::AnyBuffer>()           // [S, M, N] or [0]
                                  .Ret<ffi::BufferR1<ffi::U8>>()   // scratch
                                  .Attr<int64_t>("product")
                                  .Attr<int64_t>("allow_tf32")
                                  .Attr<int64_t>("num_sms")
                                  .Attr<int64_t>("rows_per_group"),
                              {ffi::Traits::kCmdBufferCompatible});

static ffi::Error ComputeGroupedDotFp8(GpuLocalContext context, ffi::AnyBuffer rows,
                                       ffi::BufferR2<ffi::F32> row_scales, ffi::AnyBuffer weights,
                                       ffi::BufferR3<ffi::F32> weight_scales, ffi::AnyBuffer redundant,
                                       ffi::AnyBuffer redundant_scales, ffi::BufferR1<ffi::S32> group_sizes,
                                       ffi::Result<ffi::AnyBuffer> out, ffi::ResultBufferR1<ffi::U8> scratch,
                                       int64_t num_sms, int64_t rows_per_group) {
  if (rows.element_type() != ffi::F8E4M3FN || weights.element_type() != ffi::F8E4M3FN ||
      out->element_type() != ffi::BF16) {
    return InvalidArgument("grouped_dot: FP8 rows and weights must be float8_e4m3fn, the result bfloat16");
  }
  if (rows.dimensions().size() != 2 || weights.dimensions().size() != 3) {
    return InvalidArgument("grouped_dot: FP8 rows must be [C, M], weights [L, N, M]");
  }
  const int64_t num_rows = rows.dimensions()[0], inner = rows.dimensions()[1];
  const int64_t num_redundant = NumRedundant(redundant), outer = weights.dimensions()[1];
  const int64_t num_home = group_sizes.element_count() - num_redundant;
  if (inner % kFp8Block != 0 || outer % kFp8Block != 0) {
    return InvalidArgument("grouped_dot: widths of FP8 matrices must be multiples of 128, got ", inner,
                           " and ", outer);
  }
  GroupedDotParams params{};
  params.product = GroupedDot::kRowsTransposed;
  params.type = Float::kBF16;
  params.row_scales = row_scales.typed_data();
  params.other_scales = weight_scales.typed_data();
  params.redundant_scales = static_cast<const float*>(redundant_scales.untyped_data());
  const int64_t blocks = inner / kFp8Block;
  auto error = FirstError(
      {CheckShape("grouped_dot: weights", weights, {num_home, outer, inner}),
       CheckShape("grouped_dot: scales of rows", row_scales, {num_rows, blocks}),
       CheckShape("grouped_dot: scales of weights", weight_scales, {num_home, outer / kFp8Block, blocks}),
       CheckRedundant(redundant, ffi::F8E4M3FN, {num_redundant, outer, inner}),
       CheckRedundant(redundant_scales, ffi::F32, {num_redundant, outer / kFp8Block, blocks}),
       CheckShape("grouped_dot: the result", *out, {num_rows, outer}),
       CheckPadding("grouped_dot", rows_per_group, num_rows, group_sizes.element_count())});
  if (error.success()) {
    error = DecodeGroupedDot(rows, weights, redundant, group_sizes, out, scratch, num_sms, rows_per_group,
                             outer, params);
  }
  if (error.failure() || out->element_count() == 0) return error;
  return LaunchResult("grouped_dot", cuda::LaunchGroupedDot(params, ThisDevice(nullptr), context.stream));
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuGroupedDotFp8Handler, ComputeGroupedDotFp8,
                              ffi::Ffi::Bind()
                                  .Ctx<GpuLocalContext>()
                                  .Arg<ffi::AnyBuffer>()           // rows [C, M]
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // scales [C, M / 128]
                                  .Arg<ffi::AnyBuffer>()           // weights [L, N, M]
                                  .Arg<ffi::BufferR3<ffi::F32>>()  // scales [L, N / 128, M / 128]
                                  .Arg<ffi::AnyBuffer>()           // weights [S, N, M], or a scalar
                                  .Arg<ffi::AnyBuffer>()           // their scales, or a scalar
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // group_sizes [L + S]
                                  .Ret<ffi::AnyBuffer>()           // [C, N]
                                  .Ret<ffi::BufferR1<ffi::U8>>()   // scratch
                                  .Attr<int64_t>("num_sms")
                                  .Attr<int64_t>("rows_per_group"),
                              {ffi::Traits::kCmdBufferCompatible});

// The gradient of the matrices. Groups begin at multiples of 128, as GpuQuantizeHandler transposes them.
static ffi::Error ComputeGroupedDotFp8Weights(
    GpuLocalContext context, ffi::AnyBuffer rows, ffi::BufferR2<ffi::F32> row_scales, ffi::AnyBuffer others,
    ffi::BufferR2<ffi::F32> other_scales, ffi::BufferR1<ffi::S32> group_sizes,
    ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> redundant_out,
    ffi::ResultBufferR1<ffi::U8> scratch, int64_t num_sms, int64_t rows_per_group) {
  if (rows.element_type() != ffi::F8E4M3FN || others.element_type() != ffi::F8E4M3FN ||
      out->element_type() != ffi::BF16) {
    return InvalidArgument("grouped_dot: FP8 rows must be float8_e4m3fn, the result bfloat16");
  }
  if (rows.dimensions().size() != 2 || others.dimensions().size() != 2) {
    return InvalidArgument("grouped_dot: transposed FP8 rows must be [M, C] and [N, C]");
  }
  const int64_t inner = rows.dimensions()[0], num_rows = rows.dimensions()[1];
  const int64_t num_redundant = NumRedundant(*redundant_out), outer = others.dimensions()[0];
  const int64_t num_home = group_sizes.element_count() - num_redundant;
  if (inner % kFp8Block != 0 || outer % kFp8Block != 0 || num_rows % kFp8Block != 0) {
    return InvalidArgument("grouped_dot: sizes of transposed FP8 rows must be multiples of 128, got ", inner,
                           " and ", outer, " columns of ", num_rows, " rows");
  }
  GroupedDotParams params{};
  const int64_t blocks = num_rows / kFp8Block;
  auto error = FirstError({CheckShape("grouped_dot: the other rows", others, {outer, num_rows}),
                           CheckShape("grouped_dot: scales of rows", row_scales, {blocks, inner}),
                           CheckShape("grouped_dot: scales of the other rows", other_scales, {blocks, outer}),
                           CheckRedundant(*redundant_out, ffi::BF16, {num_redundant, inner, outer}),
                           CheckShape("grouped_dot: the result", *out, {num_home, inner, outer})});
  if (error.success()) {
    error = DecodeGroupedDot(rows, others, *redundant_out, group_sizes, out, scratch, num_sms, rows_per_group,
                             outer, params);
  }
  if (error.failure() || IsEmpty(*out, *redundant_out)) return error;
  std::swap(params.num_rows, params.inner);  // the rows are transposed
  params.product = GroupedDot::kWeights;
  params.type = Float::kBF16;
  params.row_scales = row_scales.typed_data();
  params.other_scales = other_scales.typed_data();
  return LaunchResult("grouped_dot", cuda::LaunchGroupedDot(params, ThisDevice(nullptr), context.stream));
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuGroupedDotFp8WeightsHandler, ComputeGroupedDotFp8Weights,
                              ffi::Ffi::Bind()
                                  .Ctx<GpuLocalContext>()
                                  .Arg<ffi::AnyBuffer>()           // rows [M, C]
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // scales [C / 128, M]
                                  .Arg<ffi::AnyBuffer>()           // others [N, C]
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // scales [C / 128, N]
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // group_sizes [L + S]
                                  .Ret<ffi::AnyBuffer>()           // [L, M, N]
                                  .Ret<ffi::AnyBuffer>()           // [S, M, N] or [0]
                                  .Ret<ffi::BufferR1<ffi::U8>>()   // scratch
                                  .Attr<int64_t>("num_sms")
                                  .Attr<int64_t>("rows_per_group"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
