// What ncclComm_t points to.
#pragma once

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "nccl/mailbox.h"

namespace fake_cuda {

/// One rank's end of a communicator. Its operations run in the order in which they were issued,
/// whatever their streams, as NCCL has it.
class Communicator {
 public:
  Communicator(std::string id, int rank, int ranks, std::shared_ptr<Mailbox> mailbox,
               std::string made_by);

  const std::string& id() const { return id_; }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  int device() const { return device_; }
  Mailbox& mailbox() const { return *mailbox_; }

  /// The place of the next operation. The caller holds issue_mutex().
  std::uint64_t take_turn() { return issued_++; }
  /// True once all operations before that place have ended.
  bool has_turn(std::uint64_t turn) const { return ended_ == turn; }
  void end_turn() { ++ended_; }

  /// Operations end at once, without their data.
  void abort() { aborted_ = true; }
  bool aborted() const { return aborted_; }

  /// From now on no operation of this rank starts: its peers wait in vain.
  void lose() { lost_ = true; }
  bool lost() const { return lost_; }

  void fail(ncclResult_t error) { error_ = error; }
  ncclResult_t error() const { return error_; }

  /// A name for a communicator made of this one: the same on all its ranks.
  std::string child_id(const std::string& kind) {
    return id_ + "." + kind + std::to_string(children_++);
  }

  void note_finalized();
  void note_end(const std::string& how);
  bool finalized() const { return finalized_; }

 private:
  const std::string id_;
  const int rank_;
  const int ranks_;
  const int device_;
  const std::shared_ptr<Mailbox> mailbox_;
  std::size_t row_;  ///< in the record
  int children_ = 0;
  bool finalized_ = false;
  std::uint64_t issued_ = 0;
  std::atomic<std::uint64_t> ended_ = 0;
  std::atomic<bool> aborted_ = false;
  std::atomic<bool> lost_ = false;
  std::atomic<ncclResult_t> error_ = ncclSuccess;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

/// Turns of several communicators are taken together, so that no two groups wait for each other.
std::mutex& issue_mutex();

/// The communicator of a handle: null, and a violation, for one that was ended.
CommunicatorPtr find(ncclComm_t handle);

/// A handle to it, until forget().
ncclComm_t remember(CommunicatorPtr communicator);
void forget(ncclComm_t handle);

}  // namespace fake_cuda
