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

// One of a mesh's independent groups, for errors. `name` shows the lists of their devices.
std::string NameOfOne(const std::string& name, int index, int count);

class Group {
 public:
  // `devices` are device ids, group by group, in rank order, -1 for those of other processes; `num_ranks` of
  // them make one group. `hands_on`: these are the ranks of a host, who hand on to each other what came from
  // other hosts.
  Group(std::string key, std::string name, std::vector<int64_t> devices, int num_ranks, bool hands_on)
      : key_(std::move(key)),
        name_(std::move(name)),
        devices_(std::move(devices)),
        num_ranks_(num_ranks),
        hands_on_(hands_on) {}

  const std::string& key() const { return key_; }
  const std::string& name() const { return name_; }
  std::string NameOf(int index) const {
    return NameOfOne(name_, index, static_cast<int>(devices_.size()) / num_ranks_);
  }
  int num_ranks() const { return num_ranks_; }
  bool hands_on() const { return hands_on_; }

  // Which of the mesh's independent groups a device belongs to, and its rank there; empty if none.
  struct Place {
    int group;
    int rank;
  };
  std::optional<Place> Find(int64_t device) const;
  // Whether a rank of one of the groups belongs to this process.
  bool IsLocal(const Place& place) const { return devices_[place.group * num_ranks_ + place.rank] >= 0; }

  // Whether a user of the group is left. A closed group never opens again: OpenGroup makes a new one.
  bool is_open() const { return is_open_.load(std::memory_order_acquire); }
  void Close() { is_open_.store(false, std::memory_order_release); }

  // What the newest user asks for.
  struct Options {
    double timeout_s;
    int num_sms;  // most SMs that an op may take on GPUs; 0: chosen from the shapes
  };
  Options options() const;
  double timeout_s() const { return options().timeout_s; }
  void set_options(const Options& options);

  // A collective of JAX's between hosts begins at a place, or has ended there. One that fails does not end.
  void BeginHop(const Place& place, int64_t run_id);
  void EndHop(const Place& place, int64_t run_id);

  // Keeps the text of an expired wait until TakeExpired is called, which also looks for hops that have not
  // ended in time.
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
  const bool hands_on_;
  std::atomic<bool> is_open_{true};
  mutable std::mutex mutex_;
  Options options_{300.0, 0};
  std::optional<std::string> expired_;
  std::map<std::pair<int, int>, std::vector<Hop>> hops_;  // under way, by place
};

// Opens a group or adds a user to it. `key` is its content.
void OpenGroup(const std::string& key, const std::string& name, std::vector<int64_t> devices, int num_ranks,
               bool hands_on, const Group::Options& options);
// Drops one user; the last one frees the group.
void CloseGroup(const std::string& key);
// Null if no such group is open.
std::shared_ptr<Group> FindGroup(const std::string& key);

}  // namespace jax_ep
