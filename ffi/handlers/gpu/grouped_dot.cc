// Grouped products on GPUs. The CPU uses XLA's ragged_dot.
#include "handlers/gpu/grouped_dot.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "handlers/gpu/handlers.h"
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

static ffi::Error CheckType(const char* what, const ffi::AnyBuffer& buffer, ffi::DataType type) {
  if (buffer.element_type() == type) return ffi::Error::Success();
  return InvalidArgument("grouped_dot: ", what, " must be ", DtypeName(type), ", got ",
                         DtypeName(buffer.element_type()));
}

// Checks the types of a product's operands, and how many dimensions they have.
static ffi::Error CheckTypes(const ProductAttributes& attributes, const ffi::AnyBuffer& rows,
                             const ffi::AnyBuffer& others, const ffi::AnyBuffer& out) {
  const auto type = FloatOfType(rows.element_type());
  const bool is_fp8 = rows.element_type() == ffi::F8E4M3FN;
  const bool is_weight_gradient = attributes.product == static_cast<int64_t>(GroupedDot::kWeights);
  if (others.element_type() != rows.element_type() ||
      out.element_type() != (is_fp8 ? ffi::BF16 : rows.element_type()) ||
      (!is_fp8 && (!type || *type == Float::kF64))) {
    return InvalidArgument(
        "grouped_dot: rows, others and the result must all be float16, bfloat16 or float32; or rows and "
        "others float8_e4m3fn, the result bfloat16");
  }
  if (attributes.product < 0 || attributes.product > 2 ||
      (is_fp8 && attributes.product == static_cast<int64_t>(GroupedDot::kRows))) {
    return InvalidArgument("grouped_dot: attribute product out of range: ", attributes.product);
  }
  if (rows.dimensions().size() != 2 || others.dimensions().size() != (is_weight_gradient ? 2 : 3)) {
    return InvalidArgument("grouped_dot: rows must be [C, M], others [L, M, N] or, for the weights, [C, N]");
  }
  return ffi::Error::Success();
}

// Checks a product's sizes, after its shapes.
static ffi::Error CheckSizes(const ProductAttributes& attributes, bool is_fp8, bool is_transposed,
                             int64_t num_rows, int64_t num_groups, int64_t inner, int64_t outer,
                             int64_t scratch_bytes) {
  constexpr int64_t kMax = (int64_t{1} << 31) - 256;  // they are rounded up to whole tiles in 32 bits
  const int64_t num_sms = attributes.num_sms, rows_per_group = attributes.rows_per_group;
  if (std::max({num_rows, num_groups, inner, outer, num_sms, rows_per_group}) > kMax || num_sms < 0) {
    return InvalidArgument("grouped_dot: sizes must be at most ", kMax,
                           ", and num_sms must be 0 or more; got ", num_rows, " rows, ", num_groups,
                           " groups, widths ", inner, " and ", outer, ", num_sms ", num_sms);
  }
  if (is_fp8 &&
      (inner % kFp8Block != 0 || outer % kFp8Block != 0 || (is_transposed && num_rows % kFp8Block != 0))) {
    return InvalidArgument(
        "grouped_dot: widths of FP8 matrices, and numbers of transposed rows, must be "
        "multiples of 128, got ",
        inner, " and ", outer, ", and ", num_rows, " rows");
  }
  const int64_t scaled_blocks = is_fp8 && !is_transposed ? inner / kFp8Block : 0;
  if (const int64_t bytes = GroupedDotScratchBytes(num_groups, num_rows, scaled_blocks);
      scratch_bytes < bytes) {
    return InvalidArgument("grouped_dot: the scratch must have ", bytes, " bytes, got ", scratch_bytes);
  }
  const int64_t own_rows = is_fp8 && is_transposed ? 0 : rows_per_group;  // transposed groups are adjacent
  return CheckPadding("grouped_dot", own_rows, num_rows, num_groups);
}

// Checks which columns of matrices a result has. The kernels load 16 bytes at once, and scales of 128
// columns.
static ffi::Error CheckColumns(int64_t first, int64_t count, int64_t width, bool is_fp8) {
  const int64_t unit = is_fp8 ? kFp8Block : 8;
  const bool is_all = first == 0 && count == width;
  if (is_all || (first >= 0 && first <= width - count && first % unit == 0 && count % unit == 0)) {
    return ffi::Error::Success();
  }
  return InvalidArgument("grouped_dot: the result must have columns of matrices of width ", width,
                         ", in multiples of ", unit, ", got ", count, " from ", first, " on");
}

ffi::Error DecodeGroupedDot(Arrays in, Arrays results, const ProductAttributes& attributes,
                            std::optional<GroupedDotParams>& decoded) {
  const ffi::AnyBuffer* const rows = in.TakeAny("rows");
  const ffi::AnyBuffer* const row_scales = in.TakeAny("scales of rows");
  const ffi::AnyBuffer* const others = in.TakeAny("others");
  const ffi::AnyBuffer* const other_scales = in.TakeAny("scales of the others");
  const ffi::AnyBuffer* const redundant_others = in.TakeAny("matrices of redundant experts");
  const ffi::AnyBuffer* const redundant_scales = in.TakeAny("scales of redundant experts");
  const ffi::AnyBuffer* const group_sizes = in.TakeAny("group_sizes");
  const int32_t* const first_row = in.TakeInts("first_row", {});
  const ffi::AnyBuffer* const out = results.TakeAny("the result");
  const ffi::AnyBuffer* const redundant_out = results.TakeAny("matrices of redundant experts");
  const ffi::AnyBuffer* const scratch = results.TakeAny("scratch");
  if (auto error = FirstError({in.error(), results.error()}); error.failure()) return error;
  if (auto error = CheckTypes(attributes, *rows, *others, *out); error.failure()) return error;
  GroupedDotParams params{};
  params.product = static_cast<GroupedDot>(attributes.product);
  const bool is_fp8 = rows->element_type() == ffi::F8E4M3FN;
  const bool is_weight_gradient = params.product == GroupedDot::kWeights;
  const bool is_transposed = params.product == GroupedDot::kRowsTransposed;
  // FP8 rows are transposed in a gradient of matrices.
  const bool has_columns = is_fp8 && is_weight_gradient;
  const int64_t num_rows = rows->dimensions()[has_columns ? 1 : 0];
  const int64_t inner = rows->dimensions()[has_columns ? 0 : 1];
  const int64_t width = others->dimensions()[has_columns ? 0 : is_weight_gradient || is_transposed ? 1 : 2];
  const bool has_piece = !is_weight_gradient && out->dimensions().size() == 2;
  const int64_t outer = has_piece ? out->dimensions()[1] : width;
  const int64_t num_groups = static_cast<int64_t>(group_sizes->element_count());
  const ffi::AnyBuffer& redundant = is_weight_gradient ? *redundant_out : *redundant_others;
  const int64_t num_redundant = NumRedundant(redundant), num_home = num_groups - num_redundant;
  const auto matrices = [&](int64_t count, int64_t block = 1) {
    return is_transposed ? std::vector<int64_t>{count, width / block, inner / block}
                         : std::vector<int64_t>{count, inner / block, width / block};
  };
  // The shapes of the other operand, and of what is computed.
  const std::vector<int64_t> of_rows{num_rows, outer}, of_columns{outer, num_rows};
  auto error = FirstError(
      {CheckType("group_sizes", *group_sizes, ffi::S32), CheckType("the scratch", *scratch, ffi::U8),
       CheckShape("grouped_dot: group_sizes", *group_sizes, {num_groups}),
       CheckShape("grouped_dot: others", *others,
                  has_columns          ? of_columns
                  : is_weight_gradient ? of_rows
                                       : matrices(num_home)),
       CheckShape("grouped_dot: the result", *out, is_weight_gradient ? matrices(num_home) : of_rows)});
  if (error.success() && num_redundant > 0) {
    const ffi::DataType type = is_weight_gradient ? out->element_type() : others->element_type();
    error = FirstError(
        {CheckType("matrices of redundant experts", redundant, type),
         CheckShape("grouped_dot: matrices of redundant experts", redundant, matrices(num_redundant))});
  }
  if (error.success() && is_fp8) {
    error =
        FirstError({CheckType("scales", *row_scales, ffi::F32), CheckType("scales", *other_scales, ffi::F32),
                    CheckShape("grouped_dot: scales of rows", *row_scales,
                               has_columns ? std::vector<int64_t>{num_rows / kFp8Block, inner}
                                           : std::vector<int64_t>{num_rows, inner / kFp8Block}),
                    CheckShape("grouped_dot: scales of the others", *other_scales,
                               has_columns ? std::vector<int64_t>{num_rows / kFp8Block, outer}
                                           : matrices(num_home, kFp8Block))});
    if (error.success() && num_redundant > 0 && !is_weight_gradient) {
      error = FirstError({CheckType("scales", *redundant_scales, ffi::F32),
                          CheckShape("grouped_dot: scales of redundant experts", *redundant_scales,
                                     matrices(num_redundant, kFp8Block))});
    }
    params.row_scales = static_cast<const float*>(row_scales->untyped_data());
    params.other_scales = static_cast<const float*>(other_scales->untyped_data());
    params.redundant_scales = static_cast<const float*>(redundant_scales->untyped_data());
  }
  if (error.success()) {
    error = FirstError({CheckSizes(attributes, is_fp8, is_weight_gradient, num_rows, num_groups, inner, width,
                                   static_cast<int64_t>(scratch->element_count())),
                        CheckColumns(attributes.first_column, outer, width, is_fp8)});
  }
  if (error.failure()) return error;
  params.type = is_fp8 ? Float::kBF16 : *FloatOfType(rows->element_type());
  params.allow_tf32 = attributes.allow_tf32 != 0;
  params.num_rows = static_cast<int32_t>(num_rows);
  params.num_groups = static_cast<int32_t>(num_groups);
  params.num_home = static_cast<int32_t>(num_home);
  params.inner = static_cast<int32_t>(inner);
  params.outer = static_cast<int32_t>(outer);
  params.matrix_width = static_cast<int32_t>(width);
  params.group_sizes = static_cast<const int32_t*>(group_sizes->untyped_data());
  params.rows_per_group = static_cast<int32_t>(attributes.rows_per_group);
  params.first_row = first_row;
  params.rows = rows->untyped_data();
  // The matrices' columns from the first one on that the result has.
  const int64_t first = attributes.first_column * (is_transposed ? inner : 1);
  const auto from_first = [&](void* data) {
    return static_cast<std::byte*>(data) + first * (is_fp8 ? 1 : BytesOf(params.type));
  };
  params.others = from_first(others->untyped_data());
  params.redundant = from_first(redundant.untyped_data());
  if (is_fp8 && is_transposed) {
    params.other_scales += first / kFp8Block / kFp8Block;
    params.redundant_scales += first / kFp8Block / kFp8Block;
  }
  params.out = out->untyped_data();
  params.scratch = scratch->untyped_data();
  params.num_sms = static_cast<int32_t>(attributes.num_sms);
  params.clears_rows = attributes.clears_rows != 0;
  // Without elements nothing is launched, because a grid must have blocks.
  if (out->element_count() > 0 || redundant_out->element_count() > 0) decoded = params;
  return ffi::Error::Success();
}

ffi::Error RunGroupedDot(const std::optional<GroupedDotParams>& params, cudaStream_t stream) {
  if (!params) return ffi::Error::Success();
  return LaunchResult("grouped_dot", cuda::LaunchGroupedDot(*params, ThisDevice(nullptr), stream));
}

static ffi::Error ComputeGroupedDot(GpuLocalContext context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                    ProductAttributes attributes) {
  const char* op = "grouped_dot";
  std::optional<GroupedDotParams> params;
  auto error = DecodeGroupedDot({op, BuffersOf(args)}, {op, BuffersOf(rets)}, attributes, params);
  return error.failure() ? error : RunGroupedDot(params, context.stream);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(GpuGroupedDotHandler, ComputeGroupedDot,
                              BindArrays<ProductAttributes>(ffi::Ffi::Bind().Ctx<GpuLocalContext>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
