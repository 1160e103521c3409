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

namespace fake_cuda {

std::size_t bytes_of(ncclDataType_t type);
std::string name_of(ncclDataType_t type);

bool can_reduce(ncclDataType_t type, ncclRedOp_t op);

/// For each index i, reduces all inputs[r][i] to output[i]. `output` may be one of the inputs.
void reduce(void* output, const std::vector<const void*>& inputs, std::size_t count,
            ncclDataType_t type, ncclRedOp_t op);

// Classes that move bytes between ranks. The ranks are processes or threads on one host.

/// A byte queue for each pair of ranks, in shared memory.
class Mailbox {
 public:
  /// Opens the queues and waits for all ranks. Returns null if a rank is missing after `patience`.
  static std::shared_ptr<Mailbox> open(const std::string& id, int rank, int ranks,
                                       std::chrono::milliseconds patience);

  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  ~Mailbox();

  /// Writes bytes to the queue for `rank`. Returns the number of bytes for which there was space.
  std::size_t push(int rank, const std::byte* data, std::size_t bytes);

  /// Reads bytes from the queue filled by `rank`. Returns how many bytes were read.
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

/// Pauses a loop that waits for another rank: short waits yield the CPU core, long waits sleep.
class Backoff {
 public:
  void pause();
  void reset() { idle_ = 0; }

 private:
  int idle_ = 0;
};

/// The object behind ncclComm_t: one rank of a communicator. As in NCCL, operations run in the
/// order of the calls, even on different streams.
class Communicator {
 public:
  Communicator(std::string id, int rank, int ranks, std::shared_ptr<Mailbox> mailbox,
               std::string made_by);

  const std::string& id() const { return id_; }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  int device() const { return device_; }
  Mailbox& mailbox() const { return *mailbox_; }

  /// Takes the index of the communicator's next operation. The caller must lock issue_mutex().
  std::uint64_t take_turn() { return issued_++; }
  /// Whether all operations of this communicator with an index below `turn` have ended.
  bool has_turn(std::uint64_t turn) const { return ended_ == turn; }
  void end_turn() { ++ended_; }

  /// Ends all running and later operations of the communicator. These operations move no more data.
  void abort() { aborted_ = true; }
  bool aborted() const { return aborted_; }

  /// Simulates a lost rank: later operations of this rank never start, so other ranks hang.
  void lose() { lost_ = true; }
  bool lost() const { return lost_; }

  void fail(ncclResult_t error) { error_ = error; }
  ncclResult_t error() const { return error_; }

  /// Returns an id for a communicator that is made from this communicator. All ranks get equal ids.
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
  std::size_t row_;
  int children_ = 0;
  bool finalized_ = false;
  std::uint64_t issued_ = 0;
  std::atomic<std::uint64_t> ended_ = 0;
  std::atomic<bool> aborted_ = false;
  std::atomic<bool> lost_ = false;
  std::atomic<ncclResult_t> error_ = ncclSuccess;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

/// Locked while a NCCL group takes an operation index in each of its communicators. All
/// communicators then run two groups in the same order, so the groups cannot deadlock.
std::mutex& issue_mutex();

/// Returns the communicator of a handle. After forget(handle), counts an error and returns null.
CommunicatorPtr find(ncclComm_t handle);

/// Returns a new handle for the communicator. The handle is valid until forget(handle).
ncclComm_t remember(CommunicatorPtr communicator);
void forget(ncclComm_t handle);

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

struct Operation {
  Collective collective;
  const void* send;
  void* receive;
  std::size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
  int root;  ///< root; for a send or receive: the other rank
  CommunicatorPtr communicator;
  Stream* stream;

  bool reduces() const {
    return collective == Collective::kReduceScatter || collective == Collective::kAllReduce;
  }
  /// Returns the input's size in bytes, counted as in comm::Communicator's traffic counters.
  std::size_t input_bytes() const;
};

/// Runs an operation in the calling thread, after all earlier operations. Returns false if the
/// peers do not call within 10 s, or if the communicator is aborted.
bool run_on_host(const Operation& operation);

}  // namespace fake_cuda
