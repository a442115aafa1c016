// Rails of a group. Each rail is an NCCL communicator of the ranks with the same index on all domains. Hops
// between domains use it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/hop/hop.h"
#include "runtime/net/nccl.h"

namespace jax_ep {

// Device of this process on its rail.
struct RailDevice {
  int64_t device;
  int domain;      // number of the domain on the rail
  std::string id;  // of the rail, made by MakeRailId in one process
};

// Returns an id by which the ranks of a rail find each other: an ncclUniqueId in hexadecimal digits. Throws
// std::runtime_error.
std::string MakeRailId();

// After PublishRails they live as long as the process, because programs may be running, and because a later
// group of the same devices uses them again.
class Rails {
 public:
  // Steps of the set-up. All processes of the rails must take each step, and go on to the next one only if it
  // has succeeded on all. In all steps except Allocate the processes wait for each other. Each returns an
  // error, empty on success.
  std::string Connect(const std::vector<RailDevice>& devices, int num_domains);
  std::string Allocate();
  std::string Register();
  std::string Join();
  // Runs a few hops, each of which may wait for `trial_s` seconds.
  std::string RunTrial(double trial_s);
  // Releases rails that cannot be used, instead of a further step. Releases communicators and memory only if
  // no window was made. Otherwise they stay, because operations of a trial may still be in progress.
  void Drop();

  // State of one device: all that a hop needs except its arrays.
  struct Rail {
    int64_t device;
    ncclComm_t comm;
    HopParams hop;
    // Connections among all ranks, or along the rails only if the network has no others.
    ncclGinConnectionType_t connections;
    cuda::Gin gin;

    size_t window_bytes() const {
      return static_cast<size_t>(AlignUp(hop.window.bytes(), NCCL_WIN_REQUIRED_ALIGNMENT));
    }
  };
  // Returns the rail of a device, null if there is none.
  const Rail* Find(int64_t device) const;

  // Returns why a hop has failed, empty if none has. After one failure all later hops fail.
  std::string DescribeFailure() const;

 private:
  template <typename F>
  std::string ForEachRail(const char* what, F&& f);
  // Returns the error of a call that all ranks of a rail make. Aborts the communicator after an error.
  std::string CheckCollective(Rail& rail, ncclResult_t result);
  static std::string CheckCapabilities(Rail& rail);
  std::string RunTrialHops(const Rail& rail);

  const Nccl* nccl_ = nullptr;
  int num_domains_ = 0;
  std::vector<Rail> rails_;
};

// Begins new rails for a key. A thread may still be setting up rails that were begun before.
std::shared_ptr<Rails> BeginRails(const std::string& key);
// Returns the rails that were begun last.
std::shared_ptr<Rails> FindPendingRails(const std::string& key);
// Makes the rails that were begun last available to programs.
void PublishRails(const std::string& key);
// Returns published rails, null if there are none.
std::shared_ptr<Rails> FindRails(const std::string& key);

}  // namespace jax_ep
