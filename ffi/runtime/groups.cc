#include "runtime/groups.h"

#include <map>
#include <utility>

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

std::optional<Group::Place> Group::Find(int64_t device) const {
  for (size_t i = 0; i < devices_.size(); ++i) {
    if (devices_[i] == device) {
      const int place = static_cast<int>(i);
      return Place{place / num_ranks_, place % num_ranks_};
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
  return std::exchange(expired_, std::nullopt);
}

void OpenGroup(const std::string& key, const std::string& name, std::vector<int64_t> devices, int num_ranks,
               const Group::Options& options) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  Entry& entry = registry.groups[key];
  if (entry.users++ == 0) {
    entry.group = std::make_shared<Group>(key, name, std::move(devices), num_ranks);
  }
  entry.group->set_options(options);
}

void CloseGroup(const std::string& key) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto it = registry.groups.find(key);
  if (it != registry.groups.end() && --it->second.users == 0) registry.groups.erase(it);
}

std::shared_ptr<Group> FindGroup(const std::string& key) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto it = registry.groups.find(key);
  return it == registry.groups.end() ? nullptr : it->second.group;
}

}  // namespace jax_ep
