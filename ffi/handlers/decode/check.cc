#include "handlers/decode/check.h"

namespace jax_ep {

ffi::Error DecodePayloads(const char* op, const std::vector<ffi::AnyBuffer>& args,
                          const std::vector<ffi::AnyBuffer>& rets, int64_t num_in, int64_t num_out,
                          std::vector<Payload>& payloads, PushParams* scaled) {
  const size_t num_args = rets.size() * (scaled == nullptr ? 1 : 2);
  if (args.size() != num_args) {
    return InvalidArgument(op, ": expected ", num_args, " arrays for ", rets.size(), " results, got ",
                           args.size());
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    const ffi::AnyBuffer &source = args[i], &target = rets[i];
    const int64_t elements = ElementsPerRow(source);
    if (source.dimensions().size() == 0 || source.dimensions()[0] != num_in ||
        target.dimensions().size() == 0 || target.dimensions()[0] != num_out ||
        ElementsPerRow(target) != elements || source.element_type() != target.element_type()) {
      return InvalidArgument(op, ": payload ", i, " must have ", num_in, " rows and its result ", num_out,
                             " rows of the same shape and dtype");
    }
    if (auto error = CheckProduct(op, "elements of a row", {elements}); error.failure()) return error;
    payloads.push_back({static_cast<const std::byte*>(source.untyped_data()),
                        static_cast<std::byte*>(target.untyped_data()),
                        elements * static_cast<int64_t>(ffi::ByteWidth(source.element_type())),
                        static_cast<int32_t>(source.element_type())});
    if (scaled == nullptr) continue;
    const ffi::AnyBuffer& factor = args[rets.size() + i];
    const auto type = FloatOfType(factor.element_type());
    if (!type || factor.element_type() != target.element_type() ||
        factor.element_count() != target.element_count() || (i > 0 && *type != scaled->factor_type)) {
      return InvalidArgument(op, ": factor ", i, " must be a floating array like result ", i,
                             ", and all of one dtype");
    }
    scaled->factors.push_back(factor.untyped_data());
    scaled->factor_type = *type;
  }
  return ffi::Error::Success();
}

ffi::Error DecodeQuantized(const char* op, const std::vector<ffi::AnyBuffer>& args,
                           const std::vector<ffi::AnyBuffer>& rets, int64_t num_in, int64_t num_out,
                           std::vector<Payload>& payloads, Float& type) {
  if (args.size() != 1 || rets.size() != 2) {
    return InvalidArgument(op, ": rows that become FP8 must be one array, and its results values and scales");
  }
  const ffi::AnyBuffer &source = args[0], &values = rets[0], &scales = rets[1];
  const auto from = FloatOfType(source.element_type());
  const int64_t elements = ElementsPerRow(source);
  const auto has_shape = [](const ffi::AnyBuffer& buffer, ffi::DataType dtype, int64_t rows,
                            int64_t per_row) {
    return buffer.dimensions().size() > 0 && buffer.dimensions()[0] == rows &&
           ElementsPerRow(buffer) == per_row && buffer.element_type() == dtype;
  };
  if (!from || *from == Float::kF64 || elements % kFp8Block != 0 ||
      !has_shape(source, source.element_type(), num_in, elements) ||
      !has_shape(values, ffi::DataType::F8E4M3FN, num_out, elements) ||
      !has_shape(scales, ffi::DataType::F32, num_out, elements / kFp8Block)) {
    return InvalidArgument(op, ": rows that become FP8 must be ", num_in,
                           " of float16, bfloat16 or float32, a multiple of ", kFp8Block,
                           " wide, and their results ", num_out, " rows of values and scales");
  }
  const auto* in = static_cast<const std::byte*>(source.untyped_data());
  payloads.push_back({in, static_cast<std::byte*>(values.untyped_data()), elements,
                      static_cast<int32_t>(source.element_type())});
  payloads.push_back({in, static_cast<std::byte*>(scales.untyped_data()),
                      elements / kFp8Block * static_cast<int64_t>(sizeof(float)),
                      static_cast<int32_t>(ffi::DataType::F32)});
  type = *from;
  return ffi::Error::Success();
}

ffi::Error DecodeIds(const char* what, const ffi::AnyBuffer& buffer, TopkIds& ids) {
  const bool is_int64 = buffer.element_type() == ffi::DataType::S64;
  if (!is_int64 && buffer.element_type() != ffi::DataType::S32) {
    return InvalidArgument(what, ": ids must be int32 or int64");
  }
  if (buffer.dimensions().size() != 2) return InvalidArgument(what, ": ids must have two dimensions");
  ids = {buffer.untyped_data(), is_int64};
  return ffi::Error::Success();
}

ffi::Error FindMember(const char* op, std::string_view group_key, std::shared_ptr<Group> group,
                      int32_t device_ordinal, const MeshPosition& in_program, int32_t num_ranks,
                      GroupMember& member) {
  member.group = std::move(group);
  if (member.group == nullptr) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      std::string(op) + ": the group of this program is closed (" + std::string(group_key) +
                          "); make the Group again before running it");
  }
  const auto position = member.group->Find(device_ordinal);
  if (!position || (in_program.rank >= 0 && position->rank != in_program.rank) ||
      member.group->num_ranks() != num_ranks) {
    return InvalidArgument(op, ": group ", member.group->name(), " was made for another mesh: device ",
                           device_ordinal, " runs as rank ", in_program.rank, " of ", num_ranks,
                           position ? ", and is another rank there" : ", and is not in it",
                           "; make the Group from the mesh of this shard_map");
  }
  member.position = *position;
  member.list = in_program.list;
  return ffi::Error::Success();
}

}  // namespace jax_ep
