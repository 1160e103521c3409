#pragma once

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "runtime/runtime.h"

// NCCL's element types and reductions, on the host.

namespace fake_cuda {

std::size_t bytes_of(ncclDataType_t type);
std::string name_of(ncclDataType_t type);

/// Whether reduce() can compute this reduction.
bool can_reduce(ncclDataType_t type, ncclRedOp_t op);

/// output[i] = op over the inputs[r][i], in the order of ranks. `output` may be one of the inputs.
void reduce(void* output, const std::vector<const void*>& inputs, std::size_t count,
            ncclDataType_t type, ncclRedOp_t op);

// How the ranks of a communicator, which are processes or threads of one host, pass bytes to each
// other.

/// A queue of bytes for each pair of ranks, in shared memory.
class Mailbox {
 public:
  /// Waits for all ranks. Null if they do not come within `patience`.
  static std::shared_ptr<Mailbox> open(const std::string& id, int rank, int ranks,
                                       std::chrono::milliseconds patience);

  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  ~Mailbox();

  /// Copies bytes to the queue to `rank`; returns how many fitted.
  std::size_t push(int rank, const std::byte* data, std::size_t bytes);

  /// Moves bytes from the queue of `rank` to `data`; returns how many there were.
  std::size_t pull(int rank, std::byte* data, std::size_t bytes);

 private:
  struct Queue;
  struct Segment;

  Mailbox(Segment* segment, int rank, int ranks);
  Queue& queue(int from, int to);

  Segment* const segment_;
  const int rank_;
  const int ranks_;
};

/// For loops that wait for another rank: yields the core, and sleeps after a while.
class Backoff {
 public:
  void pause();
  void reset() { idle_ = 0; }

 private:
  int idle_ = 0;
};

// The object behind ncclComm_t.

/// One rank of a communicator. Its operations run in the order of the calls, whatever their
/// streams, as in NCCL.
class Communicator {
 public:
  Communicator(std::string id, int rank, int ranks, std::shared_ptr<Mailbox> mailbox,
               std::string made_by);

  const std::string& id() const { return id_; }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  int device() const { return device_; }
  Mailbox& mailbox() const { return *mailbox_; }

  /// The place of the next operation in this order. The caller must lock issue_mutex().
  std::uint64_t take_turn() { return issued_++; }
  /// True once all operations before that place have ended.
  bool has_turn(std::uint64_t turn) const { return ended_ == turn; }
  void end_turn() { ++ended_; }

  /// Operations end at once, without their data.
  void abort() { aborted_ = true; }
  bool aborted() const { return aborted_; }

  /// From now on no operation of this rank starts, so that its peers wait without end.
  void lose() { lost_ = true; }
  bool lost() const { return lost_; }

  void fail(ncclResult_t error) { error_ = error; }
  ncclResult_t error() const { return error_; }

  /// The name of a communicator that is made from this one; equal on all ranks.
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
  std::size_t row_;  ///< its index in the record
  int children_ = 0;
  bool finalized_ = false;
  std::uint64_t issued_ = 0;
  std::atomic<std::uint64_t> ended_ = 0;
  std::atomic<bool> aborted_ = false;
  std::atomic<bool> lost_ = false;
  std::atomic<ncclResult_t> error_ = ncclSuccess;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

/// A group takes the turns of all its communicators under this lock, so that no two groups wait for
/// each other.
std::mutex& issue_mutex();

/// The communicator of a handle. Null, and a violation, if the communicator has ended.
CommunicatorPtr find(ncclComm_t handle);

/// Makes a handle, which is valid until forget().
ncclComm_t remember(CommunicatorPtr communicator);
void forget(ncclComm_t handle);

// Collectives as sends and receives between pairs of ranks.

enum class Collective {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kAllToAll,
  kBroadcast,
  kSend,
  kReceive
};

std::string name_of(Collective collective);

/// The arguments of one NCCL call.
struct Operation {
  Collective collective;
  const void* send;
  void* receive;
  std::size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
  int root;  ///< or the peer
  CommunicatorPtr communicator;
  Stream* stream;

  /// The bytes of this rank's input, as Communicator counts traffic.
  std::size_t input_bytes() const;
};

// From NCCL calls to work on streams.

/// Runs in the calling thread, after all earlier calls. False if the peers do not call within a few
/// seconds, or the communicator is aborted.
bool run_on_host(const Operation& operation);

}  // namespace fake_cuda
