#include "nccl/operation.h"

#include <algorithm>
#include <cstring>
#include <list>

#include "nccl/reduction.h"
#include "runtime/memory.h"

namespace fake_cuda {
namespace {

/// `operation` on the addresses at which the fake reads and writes.
Operation viewed(Operation operation) {
  operation.send = view_of(operation.send);
  operation.receive = view_of(operation.receive);
  return operation;
}

std::byte* block(const void* buffer, std::size_t index, std::size_t bytes) {
  return static_cast<std::byte*>(const_cast<void*>(buffer)) + index * bytes;
}

/// One operation on its way: what it sends and receives, and what is left to do then.
class Run {
 public:
  explicit Run(Operation operation)
      : operation_(std::move(operation)),
        communicator_(*operation_.communicator),
        rank_(static_cast<std::size_t>(communicator_.rank())),
        ranks_(static_cast<std::size_t>(communicator_.ranks())),
        bytes_(operation_.count * bytes_of(operation_.type)) {}

  void start(Transfers& transfers);
  void finish();

 private:
  Header header() const;
  bool reduces() const;
  bool is_root() const { return operation_.root == communicator_.rank(); }
  void send(Transfers& transfers, std::size_t peer, const void* data) {
    transfers.send(communicator_, static_cast<int>(peer), header(), data);
  }
  void receive(Transfers& transfers, std::size_t peer, void* data) {
    transfers.receive(communicator_, static_cast<int>(peer), header(), data);
  }
  void send_to_peer(Transfers& transfers, std::size_t peer);
  void receive_from_peer(Transfers& transfers, std::size_t peer);
  void keep_own();

  Operation operation_;
  Communicator& communicator_;
  std::size_t rank_;
  std::size_t ranks_;
  std::size_t bytes_;
  std::vector<std::vector<std::byte>> inputs_;  ///< of a reduction, by rank
};

Header Run::header() const {
  // The two ends of a pair name each other.
  const bool pair =
      operation_.collective == Collective::kSend || operation_.collective == Collective::kReceive;
  return {.collective = static_cast<std::int32_t>(pair ? Collective::kSend : operation_.collective),
          .type = operation_.type,
          // Ranks number their scaled sums apart.
          .op = std::min<std::int32_t>(operation_.op, ncclNumOps),
          .root = pair ? 0 : operation_.root,
          .bytes = bytes_};
}

bool Run::reduces() const {
  switch (operation_.collective) {
    case Collective::kReduceScatter:
    case Collective::kAllReduce:
      return true;
    case Collective::kReduce:
      return is_root();
    default:
      return false;
  }
}

void Run::start(Transfers& transfers) {
  const auto peer = static_cast<std::size_t>(operation_.root);
  if (operation_.collective == Collective::kSend) {
    return send(transfers, peer, operation_.send);
  }
  if (operation_.collective == Collective::kReceive) {
    return receive(transfers, peer, operation_.receive);
  }
  inputs_.resize(reduces() ? ranks_ : 0);
  for (std::size_t other = 0; other < ranks_; ++other) {
    if (other != rank_) {
      send_to_peer(transfers, other);
      receive_from_peer(transfers, other);
    }
  }
  keep_own();
}

void Run::send_to_peer(Transfers& transfers, std::size_t peer) {
  switch (operation_.collective) {
    case Collective::kAllGather:
    case Collective::kAllReduce:
      return send(transfers, peer, operation_.send);
    case Collective::kReduceScatter:
    case Collective::kAllToAll:
      return send(transfers, peer, block(operation_.send, peer, bytes_));
    case Collective::kBroadcast:
      return is_root() ? send(transfers, peer, operation_.send) : void();
    case Collective::kReduce:
      return static_cast<int>(peer) == operation_.root ? send(transfers, peer, operation_.send)
                                                       : void();
    default:
      return;
  }
}

void Run::receive_from_peer(Transfers& transfers, std::size_t peer) {
  if (reduces()) {
    inputs_[peer].resize(bytes_);
    return receive(transfers, peer, inputs_[peer].data());
  }
  switch (operation_.collective) {
    case Collective::kAllGather:
    case Collective::kAllToAll:
      return receive(transfers, peer, block(operation_.receive, peer, bytes_));
    case Collective::kBroadcast:
      return static_cast<int>(peer) == operation_.root
                 ? receive(transfers, peer, operation_.receive)
                 : void();
    default:
      return;
  }
}

/// What goes from this rank to itself.
void Run::keep_own() {
  switch (operation_.collective) {
    case Collective::kAllGather:
      std::memmove(block(operation_.receive, rank_, bytes_), operation_.send, bytes_);
      return;
    case Collective::kAllToAll:
      std::memmove(block(operation_.receive, rank_, bytes_), block(operation_.send, rank_, bytes_),
                   bytes_);
      return;
    case Collective::kBroadcast:
      if (is_root()) {
        std::memmove(operation_.receive, operation_.send, bytes_);
      }
      return;
    default:
      return;
  }
}

/// Reduces last: the output may be the input, which is sent until then.
void Run::finish() {
  if (!reduces()) {
    return;
  }
  std::vector<const void*> inputs;
  for (std::size_t rank = 0; rank < ranks_; ++rank) {
    const bool scatters = operation_.collective == Collective::kReduceScatter;
    const void* const own = block(operation_.send, scatters ? rank_ : 0, bytes_);
    inputs.push_back(rank == rank_ ? own : inputs_[rank].data());
  }
  reduce(operation_.receive, inputs, operation_.count, operation_.type, operation_.op);
}

}  // namespace

std::string name_of(Collective collective) {
  switch (collective) {
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kAllReduce:
      return "all_reduce";
    case Collective::kAllToAll:
      return "all_to_all";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kReduce:
      return "reduce";
    case Collective::kSend:
      return "send";
    case Collective::kReceive:
      return "receive";
  }
  return "?";
}

std::size_t Operation::input_bytes() const {
  const std::size_t bytes = count * bytes_of(type);
  switch (collective) {
    case Collective::kReduceScatter:
    case Collective::kAllToAll:
      return bytes * static_cast<std::size_t>(communicator->ranks());
    case Collective::kReceive:
      return 0;
    default:
      return bytes;
  }
}

bool execute(std::vector<Operation> operations,
             std::optional<std::chrono::steady_clock::time_point> deadline) {
  Transfers transfers;
  std::list<Run> runs;  // the transfers point into them
  for (Operation& operation : operations) {
    runs.emplace_back(viewed(std::move(operation))).start(transfers);
  }
  if (!transfers.run(deadline)) {
    return false;
  }
  for (Run& run : runs) {
    run.finish();
  }
  return true;
}

}  // namespace fake_cuda
