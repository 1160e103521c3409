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

// Transfers of bytes between ranks.

/// The properties on which both ends of a transfer must agree.
struct Header {
  std::int32_t collective;
  std::int32_t type;
  std::int32_t op;
  std::int32_t root;
  std::uint64_t bytes;

  bool operator==(const Header&) const = default;
};

/// Sends and receives that run at the same time. Transfers between a pair of ranks keep their
/// order.
class Transfers {
 public:
  void send(Communicator& communicator, int peer, const Header& header, const void* data);
  void receive(Communicator& communicator, int peer, const Header& header, void* data);

  /// True if all transfers have ended; false if they can't end any more or `deadline` has passed.
  bool run(std::optional<std::chrono::steady_clock::time_point> deadline);

 private:
  struct Transfer {
    Communicator* communicator;
    int peer;
    bool sends;
    Header header;
    std::byte* data;
    Header header_of_peer{};
    std::size_t moved = 0;  ///< bytes moved, of the header and then the data

    bool advance();
    std::size_t move_some();
    bool ended() const { return moved == sizeof(Header) + header.bytes; }
  };
  using Lane = std::tuple<Communicator*, int, bool>;

  void add(Transfer transfer);
  bool advance();
  bool aborted() const;

  std::map<Lane, std::deque<Transfer>> lanes_;
};

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

/// Moves the data of operations that NCCL runs as one group: all at once, in any order. False if a
/// communicator was aborted or `deadline` has passed.
bool execute(std::vector<Operation> operations,
             std::optional<std::chrono::steady_clock::time_point> deadline = std::nullopt);

// From NCCL calls to work on streams.

/// Adds to the calling thread's open group or, outside of one, launches at once.
ncclResult_t call(Operation operation);

/// Runs in the calling thread, after all earlier calls. False if the peers do not call within a few
/// seconds, or the communicator is aborted.
bool run_on_host(const Operation& operation);

// Buffers that NCCL refuses.

/// False, and a violation, for buffers that are not device memory, that reach past their memory,
/// that overlap otherwise than in place, or that are not aligned to their elements: NCCL would
/// access wrong memory.
bool check_buffers(const Operation& operation);

/// Whether NCCL can move the buffers by 16 bytes at a time; by single bytes it is many times
/// slower.
bool is_aligned(const Operation& operation);

/// The bytes of each rank's part if they are no multiple of 16, so that NCCL moves most parts by
/// single bytes; else 0.
std::size_t bytes_of_unaligned_parts(const Operation& operation);

}  // namespace fake_cuda
