// The rails of a group: each joins the ranks of one index on all hosts by a communicator of NCCL's, over
// which hops between hosts go.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/hop/hop.h"
#include "runtime/nccl.h"

namespace jax_ep {

// A device of this process on its rail.
struct RailSeat {
  int64_t device;
  int host;        // its number on the rail
  std::string id;  // of the rail, as MakeRailId gives it on one process
};

// What the ranks of a rail find each other by: an ncclUniqueId in hexadecimal digits. Throws
// std::runtime_error.
std::string MakeRailId();

// They live as long as the process: programs may be under way, and a group of the same devices finds them
// again.
class Rails {
 public:
  // All processes of the rails must call Connect at the same time, and then Prepare. They say why hops cannot
  // go over the rails, or nothing.
  std::string Connect(const std::vector<RailSeat>& seats, int num_hosts);
  // Makes the windows, and tries a few hops, for up to so many seconds each.
  std::string Prepare(double trial_s);
  // Forgets rails that cannot be used. Communicators are given back if no window was made; else nobody knows
  // what a trial has left under way, and they stay.
  void Drop();

  // What a hop needs on a device, but for its arrays; null if the device is on no rail.
  struct Rail {
    int64_t device;
    ncclComm_t comm;
    HopParams hop;
    // Among all of its ranks, or where a network has none between different rails, along these.
    ncclGinConnectionType_t connections;
    cuda::Gin gin;
  };
  const Rail* Find(int64_t device) const;

  // How long a hop waits for another host.
  void Configure(double timeout_s);
  // Why a hop has failed: then all later ones do. Empty if none has.
  std::string WhyFailed() const;

 private:
  template <typename F>
  std::string OnAll(const char* what, F&& f);
  std::string MakeWindow(Rail& rail);
  std::string Try(const Rail& rail);

  const Nccl* nccl_ = nullptr;
  int num_hosts_ = 0;
  std::vector<Rail> rails_;
};

// The group's rails, which are made if there are none yet.
std::shared_ptr<Rails> MakeRails(const std::string& key);
// Null if none were made.
std::shared_ptr<Rails> FindRails(const std::string& key);

}  // namespace jax_ep
