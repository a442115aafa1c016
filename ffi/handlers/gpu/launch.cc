// How ops that communicate are launched: the first call of a call site, and all later ones.
#include "handlers/gpu/launch.h"

namespace jax_ep {

ffi::TypeId CudaCallSite::id = {};

std::optional<Call> CudaCallSite::Find(int32_t device) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = calls_.find(device);
  return it == calls_.end() ? std::nullopt : std::optional(it->second);
}

void CudaCallSite::Add(int32_t device, const Call& call, bool through_arena) {
  std::lock_guard<std::mutex> lock(mutex_);
  calls_[device] = call;
  through_arena_ = through_arena;
  has_succeeded_ = true;
}

std::shared_ptr<Group> CudaCallSite::FindGroup(std::string_view key) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (group_ == nullptr || !group_->is_open()) group_ = jax_ep::FindGroup(std::string(key));
  return group_;
}

DevicePeers* CudaCallSite::FindPeers(const std::string& key) {
  if (DevicePeers* const peers = peers_.load()) return peers;
  DevicePeers* const peers = FindDevicePeers(key).get();
  if (peers != nullptr) peers_ = peers;  // devices that search at the same time find the same
  return peers;
}

bool CudaCallSite::FixPath(bool fits_arena) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!through_arena_) through_arena_ = fits_arena;
  return *through_arena_;
}

void CudaCallSite::ReleasePath() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (calls_.empty()) through_arena_.reset();
}

std::string Describe(const Shape& shape) {
  return Text(shape.order == Order::kRank ? "rank"
              : shape.has_fixed_blocks()  ? "expert_padded"
                                          : "expert",
              ", ", shape.num_ranks, " ranks, ", shape.num_tokens, " tokens a rank, top-", shape.top_k,
              " of ", shape.num_experts, " experts, capacity ", shape.capacity, ", alignment ",
              shape.alignment);
}

std::string DtypeName(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16:
      return "bfloat16";
    case ffi::DataType::F16:
      return "float16";
    case ffi::DataType::F32:
      return "float32";
    case ffi::DataType::S32:
      return "int32";
    case ffi::DataType::U8:
      return "uint8";
    case ffi::DataType::F8E4M3FN:
      return "float8_e4m3fn";
    default:
      return Text("XLA dtype ", static_cast<int>(type));
  }
}

ffi::Error Launched(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  if (error == cudaErrorCooperativeLaunchTooLarge) {
    return ffi::Error::Internal(Text(op,
                                     ": the GPU cannot run all blocks of the op at the same time, which wait "
                                     "for each other; give it fewer with Group(num_sms=...), or the process "
                                     "more of the GPU (MPS limits)"));
  }
  return ffi::Error::Internal(std::string(op) + ": the launch failed: " + cudaGetErrorString(error));
}

static ffi::Error CheckReach(const DevicePeers& devices, const Seat& seat, const Announcement& announced) {
  std::string reason = announced.obstacle;
  for (const void* buffer : announced.published) {
    if (reason.empty()) reason = devices.ReasonAgainst(seat.place, buffer);
  }
  if (reason.empty()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, Text(announced.op, ": ", reason));
}

static ffi::Error Expired(const Seat& seat, const std::string& text) {
  seat.group->RecordExpired(text);
  return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, text);
}

ffi::Error LaunchTogether(const CudaContext& context, const Seat& seat, const Announcement& announced,
                          const std::function<cudaError_t(const Peers&)>& launch) {
  const char* op = announced.op;
  DevicePeers* const devices = context.site->FindPeers(seat.group->key());
  if (devices == nullptr) return ffi::Error::Internal(std::string(op) + ": the group has no control blocks");
  const auto call = context.site->Find(context.device);
  Board& board = devices->board();
  const auto tell_others = [&] {
    if (announced.tell_others == nullptr) return;
    const Call refused = call ? *call : Call{devices->Remember(announced.what()), 0};
    announced.tell_others(devices->At(seat.place, refused, announced.through_arena));
  };
  if (std::string text = devices->DescribeFailure(); !text.empty()) {
    // Others may wait at a first call, without having heard of the failure.
    if (!call) board.GiveUpNext(*seat.group, seat.place);
    tell_others();
    return Expired(seat, text);
  }
  if (auto error = CheckReach(*devices, seat, announced); error.failure()) {
    if (!call) board.GiveUpNext(*seat.group, seat.place);  // the others would wait for this rank
    tell_others();
    return error;
  }
  if (call) return Launched(op, launch(devices->At(seat.place, *call, announced.through_arena)));
  const uint32_t hash = devices->Remember(announced.what());
  if (announced.may_miss_ranks) {
    // A number for this call site, which says nothing to other ranks.
    static std::atomic<uint32_t> sites{0};
    const Call alone{hash, sites.fetch_add(1) % kMaxSites};
    context.site->Add(context.device, alone, announced.through_arena);
    return Launched(op, launch(devices->At(seat.place, alone, announced.through_arena)));
  }
  const Board::Hooks hooks = devices->HooksFor(seat.place.group);
  const Board::Call begun = board.Begin(op, *seat.group, seat.place, hash, hooks);
  if (!begun.error.empty()) {
    tell_others();
    return Expired(seat, begun.error);
  }
  const Call first{hash, begun.number % kMaxSites};
  if (auto error = Launched(op, launch(devices->At(seat.place, first, announced.through_arena)));
      error.failure()) {
    board.GiveUp(*seat.group, seat.place, begun.number);
    return error;
  }
  const std::string late = board.Launched(op, *seat.group, seat.place, begun.number, hooks);
  if (!late.empty()) return Expired(seat, late);
  // Only now: where the launch failed on one rank, all of them meet here again.
  context.site->Add(context.device, first, announced.through_arena);
  return ffi::Error::Success();
}

}  // namespace jax_ep
