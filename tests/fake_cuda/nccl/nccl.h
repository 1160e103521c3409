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

/// True for the reductions that reduce() knows.
bool can_reduce(ncclDataType_t type, ncclRedOp_t op);

/// output[i] = op over the inputs[r][i], in the order of ranks. `output` may be one of the inputs.
void reduce(void* output, const std::vector<const void*>& inputs, std::size_t count,
            ncclDataType_t type, ncclRedOp_t op);

/// A sum of elements that are first multiplied by `factor`.
ncclRedOp_t make_scaled_sum(double factor);

/// The number of type `type` at `address`.
double number_at(const void* address, ncclDataType_t type);

// How the ranks of a communicator, processes or threads of one host, pass bytes to each other.

/// A queue of bytes for each pair of ranks, in shared memory.
class Mailbox {
 public:
  /// Waits for all ranks. Null if they do not come within `patience`.
  static std::shared_ptr<Mailbox> open(const std::string& id, int rank, int ranks,
                                       std::chrono::milliseconds patience);

  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  ~Mailbox();

  /// How many bytes fit in the queue to `rank`, and are in it now.
  std::size_t push(int rank, const std::byte* data, std::size_t bytes);

  /// How many bytes were there from `rank`, and are in `data` now.
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

/// For loops that wait for another rank: gives the core away, and later sleeps.
class Backoff {
 public:
  void pause();
  void reset() { idle_ = 0; }

 private:
  int idle_ = 0;
};

// What ncclComm_t points to.

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

// Transfers of bytes between ranks.

/// What both ends of a transfer must have in common.
struct Header {
  std::int32_t collective;
  std::int32_t type;
  std::int32_t op;
  std::int32_t root;
  std::uint64_t bytes;

  bool operator==(const Header&) const = default;
};

/// Sends and receives that run together. Those between one pair of ranks keep their order.
class Transfers {
 public:
  void send(Communicator& communicator, int peer, const Header& header, const void* data);
  void receive(Communicator& communicator, int peer, const Header& header, void* data);

  /// True when all have ended, false if that can't be any more or is too late.
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

/// The communicator of a handle: null, and a violation, for one that was ended.
CommunicatorPtr find(ncclComm_t handle);

/// A handle to it, until forget().
ncclComm_t remember(CommunicatorPtr communicator);
void forget(ncclComm_t handle);

// Collectives as sends and receives between pairs of ranks.

enum class Collective {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kAllToAll,
  kBroadcast,
  kReduce,
  kSend,
  kReceive
};

std::string name_of(Collective collective);

/// One call of NCCL, with the meanings of its arguments there.
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

  /// Bytes of this rank's input: what the traffic of a Communicator counts.
  std::size_t input_bytes() const;
};

/// Moves the data of operations that NCCL would run as one group: all at once, in any order among
/// them. False if a communicator was aborted or `deadline` has passed.
bool execute(std::vector<Operation> operations,
             std::optional<std::chrono::steady_clock::time_point> deadline = std::nullopt);

// From a call of NCCL to work on streams.

/// Adds to the calling thread's open group or, outside of one, launches at once.
ncclResult_t call(Operation operation);

/// Runs in the calling thread, after all that was issued before. False if the peers do not come
/// within a few seconds, or the communicator is aborted.
bool run_on_host(const Operation& operation);

// What NCCL may not be given.

/// False, and a violation, for buffers that are not the device's, that reach past their memory,
/// that overlap otherwise than in place, or that are not aligned to their elements. NCCL would read
/// or write what it must not.
bool check_buffers(const Operation& operation);

/// Whether NCCL can move the buffers by 16 bytes at a time. By single bytes it is many times
/// slower.
bool is_aligned(const Operation& operation);

/// Bytes of each rank's part, if this is no multiple of 16: the parts of most ranks then begin
/// where NCCL moves single bytes. Else 0.
std::size_t bytes_of_unaligned_parts(const Operation& operation);

}  // namespace fake_cuda
