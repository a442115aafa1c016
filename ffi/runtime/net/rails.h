// The rails of a group: each joins the ranks of one index on all hosts by a communicator of NCCL's, over
// which hops between hosts go.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/hop/hop.h"
#include "runtime/net/nccl.h"

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

// Once they are published they live as long as the process: programs may be under way, and a group of the
// same devices finds them again.
class Rails {
 public:
  // The steps of making them. All processes of the rails must take each, and go on to the next only if it has
  // succeeded on all: but for Allocate they wait for each other. They say why hops cannot go over the rails,
  // or nothing.
  std::string Connect(const std::vector<RailSeat>& seats, int num_hosts);
  std::string Allocate();
  std::string Register();
  std::string Join();
  // A few hops, each of which may wait so long.
  std::string Try(double trial_s);
  // Of rails that cannot be used, instead of a further step. Communicators and memory are given back if no
  // window was made; else nobody knows what a trial has left under way, and they stay.
  void Drop();

  // What a hop needs on a device, but for its arrays; null if the device is on no rail.
  struct Rail {
    int64_t device;
    ncclComm_t comm;
    HopParams hop;
    // Among all of its ranks, or where a network has none between different rails, along these.
    ncclGinConnectionType_t connections;
    cuda::Gin gin;

    size_t window_bytes() const {
      return static_cast<size_t>(AlignUp(hop.window.bytes(), NCCL_WIN_REQUIRED_ALIGNMENT));
    }
  };
  const Rail* Find(int64_t device) const;

  // Why a hop has failed: then all later ones do. Empty if none has.
  std::string WhyFailed() const;

 private:
  template <typename F>
  std::string OnAll(const char* what, F&& f);
  std::string Collective(Rail& rail, ncclResult_t result);
  static std::string WhyNotBy(Rail& rail);
  std::string Try(const Rail& rail);

  const Nccl* nccl_ = nullptr;
  int num_hosts_ = 0;
  std::vector<Rail> rails_;
};

// New ones, to be made. A thread may still be at work on those that were begun before.
std::shared_ptr<Rails> BeginRails(const std::string& key);
// Those that were begun last.
std::shared_ptr<Rails> FindBegunRails(const std::string& key);
// From now on programs find them.
void PublishRails(const std::string& key);
// Null if none were published.
std::shared_ptr<Rails> FindRails(const std::string& key);

}  // namespace jax_ep
