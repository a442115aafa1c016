// Where the ranks of a group meet on the host, in all of its processes: at the first call of a call site.
//
// What others load late on one device (kernels, graphs) holds locks of the driver, and so could hold up a
// kernel that its peers wait for. So the first call of every call site is launched only once all have come,
// by all ranks or by none, but for a rank that gives up while others look: then the op fails on those, within
// a second. Nobody goes on before all have launched. A call's number is its place among the first calls of
// its rank: the same on all ranks, if all reach the same ops in the same order.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "runtime/groups.h"

namespace jax_ep {

class Board {
 public:
  // For a group whose ranks all live in this process. `total_ranks` are those of all groups of a mesh.
  static std::shared_ptr<Board> Make(int total_ranks);
  // Maps a file of Bytes(total_ranks) zeros, which every process of the group maps. The caller keeps the
  // descriptor. Throws std::runtime_error.
  static std::shared_ptr<Board> Map(int descriptor, int total_ranks);
  static int64_t Bytes(int total_ranks);

  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  struct Call {
    uint32_t number;    // from 1; the same on all ranks of the group
    std::string error;  // empty: all ranks are here with the same op
  };
  struct Hooks {
    // The op of a signature in words; empty if this process does not know it.
    std::function<std::string(uint64_t signature)> describe;
    // Whether the process of a rank of this group has ended. May be null.
    std::function<bool(int rank)> is_gone;
    // Why an earlier op failed, as far as this process knows; empty if none has. May be null.
    std::function<std::string()> failure;
  };

  // Announces the first call of a call site and waits, at most the group's time-out, until every rank has
  // come to a call of this number. An error if one did not, if its signature is another one, if a rank has
  // given this call or an earlier one up, or if `hooks.failure` knows of an op that failed. Who fails here
  // gives the call up, and with it all later ones, until Reset: they fail on all ranks.
  Call Begin(const char* op, const Group& group, const Group::Place& place, uint64_t signature,
             const Hooks& hooks);

  // Says that a call was launched and waits until every rank has said so; the reason why it gave up, or
  // nothing.
  std::string Launched(const char* op, const Group& group, const Group::Place& place, uint32_t number,
                       const Hooks& hooks);

  // Gives a call up that this rank has begun, because its launch failed, or the next one, because it is
  // refused before it begins; and with it all later ones. Peers that wait for this rank in such a call fail
  // within a second, in which their own process may hear of the cause (`Hooks::failure`).
  void GiveUp(const Group& group, const Group::Place& place, uint32_t number);
  void GiveUpNext(const Group& group, const Group::Place& place);

  // The ranks `first`, ... `first + count - 1` of the mesh.
  bool HasFailed(int first, int count) const;
  uint32_t LastCall(int first, int count) const;
  // Their next call is number `calls` + 1. Nobody of their groups may be in a call; every rank of a group
  // must be reset, each by its own process, to the same number before one of them begins a call.
  void Reset(int first, int count, uint32_t calls);

 private:
  struct Row;
  class Meeting;

  Board(void* memory, int total_ranks);

  Row* const rows_;  // [total_ranks]
  const int total_ranks_;
};

}  // namespace jax_ep
