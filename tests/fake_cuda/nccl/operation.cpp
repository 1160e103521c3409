#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "nccl/nccl.h"
#include "record/record.h"
#include "runtime/runtime.h"

namespace fake_cuda {
namespace {

using Clock = std::chrono::steady_clock;

/// Sent before the data. The sender and the receiver of a transfer must have equal headers.
struct Header {
  std::int32_t collective;
  std::int32_t type;
  std::int32_t op;
  std::int32_t root;
  std::uint64_t bytes;

  bool operator==(const Header&) const = default;
};

/// Concurrent sends and receives. Transfers between the same two ranks run in the order of calls.
class Transfers {
 public:
  void send(Communicator& communicator, int peer, const Header& header, const void* data) {
    add(communicator, peer, /*sends=*/true, header, const_cast<void*>(data));
  }
  void receive(Communicator& communicator, int peer, const Header& header, void* data) {
    add(communicator, peer, /*sends=*/false, header, data);
  }

  /// Runs all transfers. Returns false if a communicator is aborted or `deadline` has passed.
  bool run(std::optional<std::chrono::steady_clock::time_point> deadline) {
    Backoff backoff;
    while (!lanes_.empty()) {
      if (advance()) {
        backoff.reset();
        continue;
      }
      if (aborted() || (deadline && std::chrono::steady_clock::now() > *deadline)) {
        return false;
      }
      backoff.pause();
    }
    return true;
  }

 private:
  struct Transfer {
    Communicator* communicator;
    int peer;
    bool sends;
    Header header;
    std::byte* data;
    Header header_of_peer{};
    std::size_t moved = 0;  ///< `moved`: bytes of header and data sent or received so far

    bool ended() const { return moved == sizeof(Header) + header.bytes; }

    bool advance() {
      if (communicator->lost()) {
        return false;
      }
      const std::size_t before = moved;
      moved += move_some();
      if (!sends && before < sizeof(Header) && moved == sizeof(Header) &&
          header_of_peer != header) {
        // NCCL would hang or write wrong data after this call. The fake reports the call and hangs.
        count_violation("rank " + std::to_string(peer) + " of communicator " + communicator->id() +
                        " calls another collective, or one of another size");
        communicator->lose();
      }
      return moved != before;
    }

    /// Moves the next bytes of the transfer: first of the header, then of the data.
    std::size_t move_some() {
      const bool in_header = moved < sizeof(Header);
      Header& header_bytes = sends ? header : header_of_peer;
      std::byte* const at = in_header ? reinterpret_cast<std::byte*>(&header_bytes) + moved
                                      : data + (moved - sizeof(Header));
      const std::size_t left = (in_header ? sizeof(Header) : sizeof(Header) + header.bytes) - moved;
      Mailbox& mailbox = communicator->mailbox();
      return sends ? mailbox.push(peer, at, left) : mailbox.pull(peer, at, left);
    }
  };
  using Lane = std::tuple<Communicator*, int, bool>;

  void add(Communicator& communicator, int peer, bool sends, const Header& header, void* data) {
    lanes_[{&communicator, peer, sends}].push_back(
        {&communicator, peer, sends, header, static_cast<std::byte*>(data)});
  }

  bool aborted() const {
    return std::any_of(lanes_.begin(), lanes_.end(),
                       [](const auto& lane) { return std::get<0>(lane.first)->aborted(); });
  }

  bool advance() {
    bool moved = false;
    for (auto lane = lanes_.begin(); lane != lanes_.end();) {
      std::deque<Transfer>& queue = lane->second;
      while (!queue.empty() && queue.front().advance()) {
        moved = true;
        if (queue.front().ended()) {
          queue.pop_front();
        }
      }
      lane = queue.empty() ? lanes_.erase(lane) : std::next(lane);
    }
    return moved;
  }

  std::map<Lane, std::deque<Transfer>> lanes_;
};

/// Returns `operation` with the buffers' addresses replaced by those that the fake can access.
Operation viewed(Operation operation) {
  operation.send = view_of(operation.send);
  operation.receive = view_of(operation.receive);
  return operation;
}

std::byte* block(const void* buffer, std::size_t index, std::size_t bytes) {
  return static_cast<std::byte*>(const_cast<void*>(buffer)) + index * bytes;
}

/// Runs one operation: its transfers, then its reduction, if the operation reduces.
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
  bool is_root() const { return operation_.root == communicator_.rank(); }
  void send(Transfers& transfers, std::size_t peer, const void* data) {
    transfers.send(communicator_, static_cast<int>(peer), header(), data);
  }
  void receive(Transfers& transfers, std::size_t peer, void* data) {
    transfers.receive(communicator_, static_cast<int>(peer), header(), data);
  }
  /// Returns the block of the input that is sent to `peer`; nullopt if nothing is sent to `peer`.
  std::optional<const void*> part_for(std::size_t peer) const;
  /// Returns where to store the data from `peer`; nullopt if `peer` sends no data.
  std::optional<void*> place_for(std::size_t peer);

  Operation operation_;
  Communicator& communicator_;
  std::size_t rank_;
  std::size_t ranks_;
  std::size_t bytes_;
  std::vector<std::vector<std::byte>> inputs_;  ///< for reductions: the input of each rank
};

Header Run::header() const {
  // Headers of a send and its receive must be equal: both contain the kind kSend and root 0.
  const bool pair =
      operation_.collective == Collective::kSend || operation_.collective == Collective::kReceive;
  return {.collective = static_cast<std::int32_t>(pair ? Collective::kSend : operation_.collective),
          .type = operation_.type,
          .op = operation_.op,
          .root = pair ? 0 : operation_.root,
          .bytes = bytes_};
}

void Run::start(Transfers& transfers) {
  const auto peer = static_cast<std::size_t>(operation_.root);
  if (operation_.collective == Collective::kSend) {
    return send(transfers, peer, operation_.send);
  }
  if (operation_.collective == Collective::kReceive) {
    return receive(transfers, peer, operation_.receive);
  }
  inputs_.resize(operation_.reduces() ? ranks_ : 0);
  for (std::size_t other = 0; other < ranks_; ++other) {
    if (other == rank_ && operation_.reduces()) {
      continue;
    }
    const std::optional<const void*> part = part_for(other);
    const std::optional<void*> place = place_for(other);
    if (other == rank_) {
      if (part && place) {
        std::memmove(*place, *part, bytes_);
      }
      continue;
    }
    if (part) {
      send(transfers, other, *part);
    }
    if (place) {
      receive(transfers, other, *place);
    }
  }
}

std::optional<const void*> Run::part_for(std::size_t peer) const {
  switch (operation_.collective) {
    case Collective::kReduceScatter:
    case Collective::kAllToAll:
      return block(operation_.send, peer, bytes_);
    case Collective::kBroadcast:
      return is_root() ? std::optional(operation_.send) : std::nullopt;
    default:
      return operation_.send;
  }
}

std::optional<void*> Run::place_for(std::size_t peer) {
  if (operation_.reduces()) {
    inputs_[peer].resize(bytes_);
    return inputs_[peer].data();
  }
  if (operation_.collective == Collective::kBroadcast) {
    return static_cast<int>(peer) == operation_.root ? std::optional(operation_.receive)
                                                     : std::nullopt;
  }
  return block(operation_.receive, peer, bytes_);
}

/// Reduces after all transfers, because `output` can be the input that other ranks still read.
void Run::finish() {
  if (!operation_.reduces()) {
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

namespace {

/// Executes operations of one NCCL group at the same time. Returns false if a communicator was
/// aborted or `deadline` has passed.
bool execute(std::vector<Operation> operations, std::optional<Clock::time_point> deadline) {
  Transfers transfers;
  std::list<Run> runs;
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

/// NCCL moves 16 bytes at a time if buffers begin at multiples of 16.
constexpr std::size_t kUnit = 16;

struct Buffer {
  const void* data;
  std::size_t bytes;

  std::uintptr_t begin() const { return reinterpret_cast<std::uintptr_t>(data); }
  std::uintptr_t end() const { return begin() + bytes; }
  bool aligned_to(std::size_t unit) const { return begin() % unit == 0; }
};

Buffer input_of(const Operation& operation) {
  return {operation.send, operation.input_bytes()};
}

Buffer output_of(const Operation& operation) {
  const std::size_t bytes = operation.count * bytes_of(operation.type);
  const auto ranks = static_cast<std::size_t>(operation.communicator->ranks());
  const bool whole = operation.collective == Collective::kAllGather ||
                     operation.collective == Collective::kAllToAll;
  return {operation.receive, whole ? bytes * ranks : bytes};
}

bool overlap(const Buffer& a, const Buffer& b) {
  return a.begin() < b.end() && b.begin() < a.end();
}

/// Whether NCCL documents this overlap of input and output as an in-place operation.
bool in_place(const Operation& operation, const Buffer& input, const Buffer& output) {
  const auto rank = static_cast<std::size_t>(operation.communicator->rank());
  switch (operation.collective) {
    case Collective::kAllGather:
      return input.begin() == output.begin() + rank * input.bytes;
    case Collective::kReduceScatter:
      return output.begin() == input.begin() + rank * output.bytes;
    case Collective::kAllToAll:
      return false;
    default:
      return input.begin() == output.begin();
  }
}

/// Returns why NCCL cannot use the buffer; "" if NCCL can. Empty and null buffers are allowed.
std::string fault_of(const Buffer& buffer, std::size_t element) {
  if (buffer.data == nullptr || buffer.bytes == 0) {
    return "";
  }
  if (kind_of(buffer.data) == MemoryKind::kPageable) {
    return "a buffer is pageable memory of the host";
  }
  if (buffer.bytes > bytes_from(buffer.data)) {
    return "a buffer reaches past the end of its memory";
  }
  return buffer.aligned_to(element) ? "" : "a buffer is not aligned to its elements";
}

/// Returns whether NCCL can use the operation's buffers. A buffer must be accessible to the GPU,
/// inside its allocation and aligned. Buffers may overlap only as NCCL documents.
bool check_buffers(const Operation& operation) {
  const Buffer input = input_of(operation);
  const Buffer output = output_of(operation);
  const std::size_t element = bytes_of(operation.type);
  std::string fault = fault_of(input, element);
  fault = fault.empty() ? fault_of(output, element) : fault;
  const bool both = input.data != nullptr && output.data != nullptr;
  if (fault.empty() && both && overlap(input, output) && !in_place(operation, input, output)) {
    fault = "input and output overlap, but not as an operation in place";
  }
  if (!fault.empty()) {
    count_violation(name_of(operation.collective) + ": " + fault);
  }
  return fault.empty();
}

/// Whether buffers begin at multiples of 16 bytes. Otherwise NCCL moves single bytes and is slow.
bool is_aligned(const Operation& operation) {
  return input_of(operation).aligned_to(kUnit) && output_of(operation).aligned_to(kUnit);
}

/// For all-gathers, reduce-scatters and all-to-alls: returns the number of bytes that are sent to
/// each rank if this number is not a multiple of 16. Otherwise returns 0.
std::size_t bytes_of_unaligned_parts(const Operation& operation) {
  const bool in_parts = operation.collective == Collective::kAllGather ||
                        operation.collective == Collective::kReduceScatter ||
                        operation.collective == Collective::kAllToAll;
  const std::size_t part = operation.count * bytes_of(operation.type);
  return in_parts && operation.communicator->ranks() > 1 && part % kUnit != 0 ? part : 0;
}

thread_local int group_depth = 0;
thread_local std::vector<Operation> group;

/// The operation index ("turn") of a NCCL group in each communicator that the group uses.
using Turns = std::map<CommunicatorPtr, std::uint64_t>;

/// Takes the next operation index of each communicator. The caller must lock issue_mutex().
Turns take_turns(const std::vector<Operation>& operations) {
  Turns turns;
  for (const Operation& operation : operations) {
    if (!turns.contains(operation.communicator)) {
      turns[operation.communicator] = operation.communicator->take_turn();
    }
  }
  return turns;
}

/// Waits for all earlier operations of each communicator. False after an abort or `deadline`.
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
  for (const Operation& operation : operations) {
    CollectiveUse& use = record().collectives[{
        operation.communicator->id(), name_of(operation.collective), name_of(operation.type),
        operation.stream->id(), operation.stream->priority()}];
    ++use.calls;
    use.bytes += static_cast<std::int64_t>(operation.input_bytes());
    use.unaligned += is_aligned(operation) ? 0 : 1;
    use.unaligned_part = std::max(use.unaligned_part,
                                  static_cast<std::int64_t>(bytes_of_unaligned_parts(operation)));
  }
}

/// Runs a NCCL group on the stream of its first operation. As in NCCL, the group waits for the
/// streams of its other operations, and these streams wait for the group.
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
    // While locked, work enters the stream in the order of the operation indices.
    const std::lock_guard lock(issue_mutex());
    first.submit_waiting([operations, turns = take_turns(operations)] { run(operations, turns); });
  }
  for (Stream* const other : others) {
    other->wait_for(first.mark());
  }
}

/// Applies the faults "nccl", "async" and "lost" of TESSERA_FAKE_CUDA_FAULT to a NCCL call.
ncclResult_t fail_on_demand(Communicator& communicator) {
  static std::atomic<std::int64_t> calls = 0;
  const std::int64_t number = ++calls;
  if (settings().fault("nccl") == number) {
    return ncclSystemError;
  }
  const auto async = settings().fault("async"), lost = settings().fault("lost");
  const bool broken = async && number >= *async;
  if (broken) {
    communicator.fail(ncclRemoteError);
  }
  if (broken || (lost && number >= *lost)) {
    communicator.lose();
  }
  return ncclSuccess;
}

/// Adds the operation to this thread's open NCCL group. Launches it if no group is open.
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

}  // namespace

bool run_on_host(const Operation& operation) {
  constexpr std::chrono::seconds kPatience{10};
  Turns turns;
  {
    const std::lock_guard lock(issue_mutex());
    turns = take_turns({operation});
  }
  return run({operation}, turns, Clock::now() + kPatience);
}

namespace {

ncclResult_t call(Collective collective, const void* send, void* receive, std::size_t count,
                  ncclDataType_t type, ncclComm_t communicator, cudaStream_t stream, int root = 0,
                  ncclRedOp_t op = ncclSum) {
  const Operation operation{.collective = collective,
                            .send = send,
                            .receive = receive,
                            .count = count,
                            .type = type,
                            .op = op,
                            .root = root,
                            .communicator = find(communicator),
                            .stream = find_stream(stream)};
  return operation.reduces() && !can_reduce(type, op) ? ncclInvalidArgument : call(operation);
}

}  // namespace
}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

ncclResult_t ncclAllGather(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           ncclComm_t communicator, cudaStream_t stream) {
  return call(Collective::kAllGather, send, receive, count, type, communicator, stream);
}

ncclResult_t ncclAlltoAll(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                          ncclComm_t communicator, cudaStream_t stream) {
  return call(Collective::kAllToAll, send, receive, count, type, communicator, stream);
}

ncclResult_t ncclBroadcast(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           int root, ncclComm_t communicator, cudaStream_t stream) {
  return call(Collective::kBroadcast, send, receive, count, type, communicator, stream, root);
}

ncclResult_t ncclBcast(void* buffer, std::size_t count, ncclDataType_t type, int root,
                       ncclComm_t communicator, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, communicator, stream);
}

ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t communicator, cudaStream_t stream) {
  return call(Collective::kSend, send, nullptr, count, type, communicator, stream, peer);
}

ncclResult_t ncclRecv(void* receive, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t communicator, cudaStream_t stream) {
  return call(Collective::kReceive, nullptr, receive, count, type, communicator, stream, peer);
}

ncclResult_t ncclAllReduce(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t communicator, cudaStream_t stream) {
  return call(Collective::kAllReduce, send, receive, count, type, communicator, stream, /*root=*/0,
              op);
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, std::size_t count,
                               ncclDataType_t type, ncclRedOp_t op, ncclComm_t communicator,
                               cudaStream_t stream) {
  return call(Collective::kReduceScatter, send, receive, count, type, communicator, stream,
              /*root=*/0, op);
}

ncclResult_t ncclMemAlloc(void** pointer, std::size_t bytes) {
  count_call("ncclMemAlloc");
  return cudaMalloc(pointer, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void* pointer) {
  count_call("ncclMemFree");
  return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

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
