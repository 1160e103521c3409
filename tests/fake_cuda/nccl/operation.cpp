#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "nccl/nccl.h"
#include "record/record.h"
#include "runtime/runtime.h"

// ncclAllGather and the other collectives.

namespace fake_cuda {
namespace {

ncclResult_t call_any(Collective collective, const void* send, void* receive, std::size_t count,
                      ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t communicator,
                      cudaStream_t stream) {
  return call({.collective = collective,
               .send = send,
               .receive = receive,
               .count = count,
               .type = type,
               .op = op,
               .root = root,
               .communicator = find(communicator),
               .stream = find_stream(stream)});
}

ncclResult_t call_move(Collective collective, const void* send, void* receive, std::size_t count,
                       ncclDataType_t type, int root, ncclComm_t communicator,
                       cudaStream_t stream) {
  return call_any(collective, send, receive, count, type, ncclSum, root, communicator, stream);
}

ncclResult_t call_reduction(Collective collective, const void* send, void* receive,
                            std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                            ncclComm_t communicator, cudaStream_t stream) {
  return can_reduce(type, op)
             ? call_any(collective, send, receive, count, type, op, 0, communicator, stream)
             : ncclInvalidArgument;
}

}  // namespace
}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

ncclResult_t ncclAllGather(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           ncclComm_t communicator, cudaStream_t stream) {
  return call_move(Collective::kAllGather, send, receive, count, type, 0, communicator, stream);
}

ncclResult_t ncclAlltoAll(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                          ncclComm_t communicator, cudaStream_t stream) {
  return call_move(Collective::kAllToAll, send, receive, count, type, 0, communicator, stream);
}

ncclResult_t ncclBroadcast(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           int root, ncclComm_t communicator, cudaStream_t stream) {
  return call_move(Collective::kBroadcast, send, receive, count, type, root, communicator, stream);
}

ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t communicator, cudaStream_t stream) {
  return call_move(Collective::kSend, send, nullptr, count, type, peer, communicator, stream);
}

ncclResult_t ncclRecv(void* receive, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t communicator, cudaStream_t stream) {
  return call_move(Collective::kReceive, nullptr, receive, count, type, peer, communicator, stream);
}

ncclResult_t ncclAllReduce(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t communicator, cudaStream_t stream) {
  return call_reduction(Collective::kAllReduce, send, receive, count, type, op, communicator,
                        stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, std::size_t count,
                               ncclDataType_t type, ncclRedOp_t op, ncclComm_t communicator,
                               cudaStream_t stream) {
  return call_reduction(Collective::kReduceScatter, send, receive, count, type, op, communicator,
                        stream);
}

ncclResult_t ncclMemAlloc(void** pointer, std::size_t bytes) {
  count_call("ncclMemAlloc");
  return cudaMalloc(pointer, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void* pointer) {
  count_call("ncclMemFree");
  return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

}  // extern "C"

namespace fake_cuda {
namespace {

/// `operation` with the addresses at which the fake accesses its buffers.
Operation viewed(Operation operation) {
  operation.send = view_of(operation.send);
  operation.receive = view_of(operation.receive);
  return operation;
}

std::byte* block(const void* buffer, std::size_t index, std::size_t bytes) {
  return static_cast<std::byte*>(const_cast<void*>(buffer)) + index * bytes;
}

/// One running operation: its transfers, and the work after them.
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
  // A send and its receive have equal headers.
  const bool pair =
      operation_.collective == Collective::kSend || operation_.collective == Collective::kReceive;
  return {.collective = static_cast<std::int32_t>(pair ? Collective::kSend : operation_.collective),
          .type = operation_.type,
          .op = operation_.op,
          .root = pair ? 0 : operation_.root,
          .bytes = bytes_};
}

bool Run::reduces() const {
  return operation_.collective == Collective::kReduceScatter ||
         operation_.collective == Collective::kAllReduce;
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

/// Copies the part that this rank sends to itself.
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

/// Reduces at the end, since the output may be the input, which is still being sent.
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
  constexpr std::array kNames = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all",
                                 "broadcast",  "send",           "receive"};
  return kNames.at(static_cast<std::size_t>(collective));
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

namespace {

using Clock = std::chrono::steady_clock;

thread_local int group_depth = 0;
thread_local std::vector<Operation> group;

/// The communicators of a group, each with the group's turn.
using Turns = std::map<CommunicatorPtr, std::uint64_t>;

/// The caller must lock issue_mutex().
Turns take_turns(const std::vector<Operation>& operations) {
  Turns turns;
  for (const Operation& operation : operations) {
    if (!turns.contains(operation.communicator)) {
      turns[operation.communicator] = operation.communicator->take_turn();
    }
  }
  return turns;
}

/// Waits for the turns. False if a communicator is aborted, or `deadline` has passed.
bool wait_for(const Turns& turns, std::optional<Clock::time_point> deadline) {
  Backoff backoff;
  for (const auto& [communicator, turn] : turns) {
    while (!communicator->has_turn(turn) || communicator->lost()) {
      if (communicator->aborted() || (deadline && Clock::now() > *deadline)) {
        return false;
      }
      backoff.pause();
    }
  }
  return true;
}

bool run(const std::vector<Operation>& operations, const Turns& turns,
         std::optional<Clock::time_point> deadline = std::nullopt) {
  const bool done = wait_for(turns, deadline) && execute(operations, deadline);
  for (const auto& [communicator, turn] : turns) {
    communicator->end_turn();
  }
  return done;
}

void count(const std::vector<Operation>& operations) {
  const std::lock_guard lock(record().mutex);
  record().groups += operations.size() > 1 ? 1 : 0;
  for (const Operation& operation : operations) {
    CollectiveUse& use = record().collectives[{
        operation.communicator->id(), name_of(operation.collective), name_of(operation.type),
        operation.stream->id(), operation.stream->priority()}];
    ++use.calls;
    use.bytes += static_cast<std::int64_t>(operation.input_bytes());
    use.unaligned += is_aligned(operation) ? 0 : 1;
    use.unaligned_part = std::max(use.unaligned_part,
                                  static_cast<std::int64_t>(bytes_of_unaligned_parts(operation)));
    ++record().streams[operation.stream->id()].collectives;
  }
}

/// A group runs on the stream of its first operation. The other streams wait before and after it,
/// as NCCL allows.
void launch(const std::vector<Operation>& operations) {
  count(operations);
  Stream& first = *operations.front().stream;
  std::set<Stream*> others;
  for (const Operation& operation : operations) {
    others.insert(operation.stream);
  }
  others.erase(&first);
  for (Stream* const other : others) {
    first.wait_for(other->mark());
  }
  {
    // Turns are taken in the order in which the streams get the work.
    const std::lock_guard lock(issue_mutex());
    first.submit_waiting([operations, turns = take_turns(operations)] { run(operations, turns); });
  }
  for (Stream* const other : others) {
    other->wait_for(first.mark());
  }
}

/// Applies the faults of TESSERA_FAKE_CUDA_FAULT. A lost operation makes its communicator lost.
ncclResult_t fail_on_demand(Communicator& communicator) {
  static std::atomic<std::int64_t> calls = 0;
  const std::int64_t number = ++calls;
  const Faults& faults = settings().faults;
  if (faults.nccl == number) {
    return ncclSystemError;
  }
  const bool broken = faults.async && number >= *faults.async;
  if (broken) {
    communicator.fail(ncclRemoteError);
  }
  if (broken || (faults.lost && number >= *faults.lost)) {
    communicator.lose();
  }
  return ncclSuccess;
}

}  // namespace

ncclResult_t call(Operation operation) {
  if (operation.communicator == nullptr || operation.stream == nullptr) {
    return ncclInvalidArgument;
  }
  if (!check_buffers(operation)) {
    return ncclInvalidArgument;
  }
  const ncclResult_t result = fail_on_demand(*operation.communicator);
  if (result != ncclSuccess) {
    return result;
  }
  if (group_depth > 0) {
    group.push_back(std::move(operation));
  } else {
    launch({std::move(operation)});
  }
  return ncclSuccess;
}

bool run_on_host(const Operation& operation) {
  constexpr std::chrono::seconds kPatience{10};
  Turns turns;
  {
    const std::lock_guard lock(issue_mutex());
    turns = take_turns({operation});
  }
  return run({operation}, turns, Clock::now() + kPatience);
}

}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (--group_depth == 0 && !group.empty()) {
    launch(std::exchange(group, {}));
  }
  return ncclSuccess;
}

}  // extern "C"
