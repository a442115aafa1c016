#include "runtime/groups.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/text.h"

namespace jax_ep {
namespace {

struct Entry {
  std::shared_ptr<Group> group;
  int users = 0;
};

struct Registry {
  std::mutex mutex;
  std::map<std::string, Entry> groups;
};

// Never destroyed: handlers may still run while the process exits.
Registry& GetRegistry() {
  static Registry* const registry = new Registry;
  return *registry;
}

}  // namespace

std::optional<Group::Position> Group::Find(int64_t device) const {
  for (size_t i = 0; i < devices_.size(); ++i) {
    if (devices_[i] == device) {
      const int position = static_cast<int>(i);
      return Position{position / num_ranks_, position % num_ranks_};
    }
  }
  return std::nullopt;
}

Group::Options Group::options() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return options_;
}

void Group::set_options(const Options& options) {
  std::lock_guard<std::mutex> lock(mutex_);
  options_ = options;
}

void Group::RecordExpired(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!expired_) expired_ = text;
}

std::optional<std::string> Group::TakeExpired() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!expired_) expired_ = TakeLateHops();
  return std::exchange(expired_, std::nullopt);
}

void Group::BeginHop(const Position& position, int64_t run_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Hop>& hops = hops_[{position.group_index, position.rank}];
  // Runs of one device follow one another, so hops of earlier runs will not end any more.
  hops.erase(std::remove_if(hops.begin(), hops.end(), [&](const Hop& hop) { return hop.run_id != run_id; }),
             hops.end());
  hops.push_back({run_id, Clock::now()});
}

void Group::EndHop(const Position& position, int64_t run_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Hop>& hops = hops_[{position.group_index, position.rank}];
  const auto it =
      std::find_if(hops.begin(), hops.end(), [&](const Hop& hop) { return hop.run_id == run_id; });
  if (it != hops.end()) hops.erase(it);
}

std::optional<std::string> Group::TakeLateHops() {
  const auto limit = std::chrono::duration<double>(options_.timeout_s);
  std::string late;
  for (auto& [position, hops] : hops_) {
    const auto is_late = [&](const Hop& hop) { return Clock::now() - hop.begun >= limit; };
    const auto end = std::remove_if(hops.begin(), hops.end(), is_late);
    if (end == hops.end()) continue;
    hops.erase(end, hops.end());
    late += Text(late.empty() ? "" : ", ", position.second, " of list ", position.first + 1);
  }
  if (late.empty()) return std::nullopt;
  return Text("hop between domains: of group ", name_, ", rank(s) ", late,
              " did not hear from the other domains within ", options_.timeout_s,
              " s. A process there has ended, hangs or has not reached the same op. The error of the program "
              "is what JAX's collectives reported. This process should end, because JAX's collectives do not "
              "work any more. If ranks are only slow, raise Group(timeout_s=...).");
}

std::string ListName(const std::string& name, int index, int count) {
  return count == 1 ? name : Text(name, " (list ", index + 1, " of ", count, ")");
}

void OpenGroup(const std::string& key, const std::string& name, std::vector<int64_t> devices, int num_ranks,
               bool relays_for_other_domains, const Group::Options& options) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  Entry& entry = registry.groups[key];
  if (entry.users++ == 0) {
    entry.group = std::make_shared<Group>(key, name, std::move(devices), num_ranks, relays_for_other_domains);
  }
  entry.group->set_options(options);
}

void CloseGroup(const std::string& key) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto it = registry.groups.find(key);
  if (it == registry.groups.end() || --it->second.users > 0) return;
  it->second.group->Close();
  registry.groups.erase(it);
}

std::shared_ptr<Group> FindGroup(const std::string& key) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto it = registry.groups.find(key);
  return it == registry.groups.end() ? nullptr : it->second.group;
}

}  // namespace jax_ep
