// The groups that are open in this process: their devices, options and last expired wait.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace jax_ep {

// Returns a group's name for errors, with the number of its list if the mesh has several. `name` shows the
// devices.
std::string ListName(const std::string& name, int index, int count);

class Group {
 public:
  // `devices` are device ids in rank order, one independent group after another. Devices of other processes
  // are -1. `num_ranks` devices make one group. `relays_for_other_domains` is true if the ranks are those of
  // one domain and relay rows that came from other domains.
  Group(std::string key, std::string name, std::vector<int64_t> devices, int num_ranks,
        bool relays_for_other_domains)
      : key_(std::move(key)),
        name_(std::move(name)),
        devices_(std::move(devices)),
        num_ranks_(num_ranks),
        relays_for_other_domains_(relays_for_other_domains) {}

  const std::string& key() const { return key_; }
  const std::string& name() const { return name_; }
  std::string ListName(int index) const {
    return jax_ep::ListName(name_, index, static_cast<int>(devices_.size()) / num_ranks_);
  }
  int num_ranks() const { return num_ranks_; }
  bool relays_for_other_domains() const { return relays_for_other_domains_; }

  // Position of a device: the index of its group among the mesh's independent groups, and its rank in it.
  struct Position {
    int group_index;
    int rank;
  };
  // Returns the position of a device, empty if the mesh does not have it.
  std::optional<Position> Find(int64_t device) const;
  // Returns whether the rank belongs to this process.
  bool IsLocal(const Position& position) const {
    return devices_[position.group_index * num_ranks_ + position.rank] >= 0;
  }

  // Returns whether a user of the group is left. A closed group never opens again; OpenGroup makes a new one.
  bool is_open() const { return is_open_.load(std::memory_order_acquire); }
  void Close() { is_open_.store(false, std::memory_order_release); }

  // Options of the newest user.
  struct Options {
    double timeout_s;
    int num_sms;  // limit of SMs for an op on GPUs; 0: chosen from the shapes
  };
  Options options() const;
  double timeout_s() const { return options().timeout_s; }
  void set_options(const Options& options);

  // Records that one of JAX's collectives between domains begins or ends at a position. A collective that
  // fails does not end.
  void BeginHop(const Position& position, int64_t run_id);
  void EndHop(const Position& position, int64_t run_id);

  // Stores the text of an expired wait until TakeExpired returns it. TakeExpired also checks for hops that
  // have not ended in time.
  void RecordExpired(const std::string& text);
  std::optional<std::string> TakeExpired();

 private:
  using Clock = std::chrono::steady_clock;
  struct Hop {
    int64_t run_id;
    Clock::time_point begun;
  };

  std::optional<std::string> TakeLateHops();

  const std::string key_;
  const std::string name_;
  const std::vector<int64_t> devices_;
  const int num_ranks_;
  const bool relays_for_other_domains_;
  std::atomic<bool> is_open_{true};
  mutable std::mutex mutex_;
  Options options_{300.0, 0};
  std::optional<std::string> expired_;
  std::map<std::pair<int, int>, std::vector<Hop>> hops_;  // in progress, by position
};

// Opens a group or adds a user to it. `key` stands for its content.
void OpenGroup(const std::string& key, const std::string& name, std::vector<int64_t> devices, int num_ranks,
               bool relays_for_other_domains, const Group::Options& options);
// Drops one user. The last one closes the group.
void CloseGroup(const std::string& key);
// Returns an open group, null if there is none.
std::shared_ptr<Group> FindGroup(const std::string& key);

}  // namespace jax_ep
