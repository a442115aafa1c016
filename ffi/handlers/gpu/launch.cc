// Launches of ops that communicate: the first call of a call site and all later ones.
#include "handlers/gpu/launch.h"

namespace jax_ep {

ffi::TypeId GpuCallSite::id = {};

std::optional<Call> GpuCallSite::Find(int32_t device) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = calls_.find(device);
  return it == calls_.end() ? std::nullopt : std::optional(it->second);
}

void GpuCallSite::Add(int32_t device, const Call& call, bool through_arena) {
  std::lock_guard<std::mutex> lock(mutex_);
  calls_[device] = call;
  through_arena_ = through_arena;
  has_succeeded_ = true;
}

std::shared_ptr<Group> GpuCallSite::FindGroup(std::string_view key) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (group_ == nullptr || !group_->is_open()) group_ = jax_ep::FindGroup(std::string(key));
  return group_;
}

DevicePeers* GpuCallSite::FindPeers(const std::string& key) {
  if (DevicePeers* const peers = peers_.load()) return peers;
  DevicePeers* const peers = FindDevicePeers(key).get();
  if (peers != nullptr) peers_ = peers;  // concurrent searches of other devices find the same
  return peers;
}

ffi::Error GpuCallSite::CheckPeers() const {
  const DevicePeers* const peers = has_succeeded_.load() ? peers_.load() : nullptr;
  const std::string text = peers == nullptr ? "" : peers->DescribeFailure();
  return text.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kDeadlineExceeded, text);
}

SideStream& GpuCallSite::SideStreamOf(int32_t device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return side_streams_[device];
}

bool GpuCallSite::FixPath(bool fits_arena) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!through_arena_) through_arena_ = fits_arena;
  return *through_arena_;
}

void GpuCallSite::ReleasePath() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (calls_.empty()) through_arena_.reset();
}

std::string Describe(const Shape& shape) {
  return Text(shape.order == Order::kRank     ? "rank"
              : shape.order == Order::kPlaced ? "placed"
              : shape.has_fixed_blocks()      ? "expert_padded"
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

ffi::Error LaunchResult(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  if (error == cudaErrorCooperativeLaunchTooLarge) {
    return ffi::Error::Internal(Text(op,
                                     ": the GPU cannot run all blocks of the op at the same time, which wait "
                                     "for each other; give the op fewer with Group(num_sms=...), or give the "
                                     "process more of the GPU (MPS limits)"));
  }
  return ffi::Error::Internal(std::string(op) + ": the launch failed: " + cudaGetErrorString(error));
}

static ffi::Error CheckPreconditions(const DevicePeers& devices, const GroupMember& member,
                                     const OpDescription& description) {
  std::string reason = description.precondition_error;
  for (const void* buffer : description.published) {
    if (reason.empty()) reason = devices.CheckReachable(member.position, buffer);
  }
  if (reason.empty()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, Text(description.op, ": ", reason));
}

static ffi::Error RecordExpired(const GroupMember& member, const std::string& text) {
  member.group->RecordExpired(text);
  return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, text);
}

ffi::Error LaunchCollective(const GpuContext& context, const GroupMember& member,
                            const OpDescription& description,
                            const std::function<cudaError_t(const Peers&)>& launch) {
  const char* op = description.op;
  DevicePeers* const devices = context.site->FindPeers(member.group->key());
  if (devices == nullptr) return ffi::Error::Internal(std::string(op) + ": the group has no control blocks");
  const auto call = context.site->Find(context.device);
  HostMeeting& meeting = devices->host_meeting();
  const auto register_call = [&] {
    return devices->RegisterCall(Text(description.describe(), ", in program ", context.site->program()));
  };
  const auto notify = [&] {
    if (description.notify_other_domains == nullptr) return;
    const Call refused = call ? *call : Call{register_call(), 0};
    description.notify_other_domains(devices->MakePeers(member.position, refused, description.through_arena));
  };
  if (std::string text = devices->DescribeFailure(); !text.empty()) {
    // Others that do not know of the failure yet may wait at a first call.
    if (!call) meeting.GiveUpNext(*member.group, member.position);
    notify();
    return RecordExpired(member, text);
  }
  if (auto error = CheckPreconditions(*devices, member, description); error.failure()) {
    if (!call) meeting.GiveUpNext(*member.group, member.position);  // the others would wait for this rank
    notify();
    return error;
  }
  const auto launch_as = [&](const Call& published) {
    return LaunchResult(op,
                        launch(devices->MakePeers(member.position, published, description.through_arena)));
  };
  if (call) return launch_as(*call);
  const uint32_t hash = register_call();
  if (description.may_miss_ranks) {
    // A number for this call site that has no meaning for other ranks. These are counted down from the last
    // one, so that they differ from the numbers that ranks agree on.
    static std::atomic<uint32_t> sites{0};
    const Call unmatched{hash, kMaxSites - 1 - sites.fetch_add(1) % kMaxSites};
    context.site->Add(context.device, unmatched, description.through_arena);
    return launch_as(unmatched);
  }
  const HostMeeting::Hooks hooks = devices->HooksFor(member.position.group_index);
  const HostMeeting::Call begun = meeting.Begin(op, *member.group, member.position, hash, hooks);
  if (!begun.error.empty()) {
    notify();
    return RecordExpired(member, begun.error);
  }
  const Call first{hash, begun.number % kMaxSites};
  if (auto error = launch_as(first); error.failure()) {
    meeting.GiveUp(*member.group, member.position, begun.number);
    return error;
  }
  const std::string late = meeting.AwaitLaunches(op, *member.group, member.position, begun.number, hooks);
  if (!late.empty()) return RecordExpired(member, late);
  // Stored last, so that all ranks meet again if the launch failed on one of them.
  context.site->Add(context.device, first, description.through_arena);
  return ffi::Error::Success();
}

}  // namespace jax_ep
