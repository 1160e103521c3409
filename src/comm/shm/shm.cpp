// Collectives through shared memory, for ranks on one machine.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backends.h"
#include "group_info.h"
#include "shm/shm_rounds.h"
#include "shm/shm_segment.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/detail/environment.h"
#include "tessera/core/error.h"
#include "tessera/core/placement.h"
#include "watch/watch.h"

// ShmGroup runs the collectives of a process group one after another and synchronizes the ranks.
// ShmCommunicator decides which bytes are sent.
namespace tessera::comm {
namespace {

enum class ShmKind : std::int32_t {
  kAllGather,
  kAllReduce,
  kReduceScatter,
  kAllToAll,
  kBroadcast,
  kBarrier
};

/// A collective, divided into rounds. In each round a rank fills its slot (its buffer in shared
/// memory) and then reads the slots of all ranks. See ShmSegment.
struct ShmOperation {
  ShmKind kind = ShmKind::kBarrier;
  std::int64_t elements = 0;
  std::int32_t dtype = 0;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  std::int64_t rounds = 1;
  std::string purpose;
  /// Fills this rank's slot (buffer in shared memory) for round `round`; rounds begin at 0.
  std::function<void(std::int64_t round, std::byte* slot)> produce;
  /// Reads the slots (buffers in shared memory) of all ranks; `slots` is in rank order.
  std::function<void(std::int64_t round, std::span<const std::byte* const> slots)> consume;

  /// Whether the operation has ended. wait() does not run an ended operation again, but throws
  /// `error` if the operation has failed.
  bool done = false;
  std::exception_ptr error;
};
using ShmOperationPtr = std::shared_ptr<ShmOperation>;

const char* name_of(ShmKind kind) {
  switch (kind) {
    case ShmKind::kAllGather:
      return "all_gather";
    case ShmKind::kAllReduce:
      return "all_reduce";
    case ShmKind::kReduceScatter:
      return "reduce_scatter";
    case ShmKind::kAllToAll:
      return "all_to_all";
    case ShmKind::kBroadcast:
      return "broadcast";
    case ShmKind::kBarrier:
      return "barrier";
  }
  return "unknown";
}

/// Whether two ranks make the same call. The numbers of rounds are not compared, because ranks of
/// an all-to-all send different numbers of bytes.
bool same(const ShmCall& a, const ShmCall& b) {
  return a.sequence == b.sequence && a.elements == b.elements && a.kind == b.kind &&
         a.dtype == b.dtype && a.op == b.op && a.root == b.root && a.purpose == b.purpose;
}

std::string text_of(const ShmOperation& operation) {
  return with_purpose(name_of(operation.kind), operation.purpose);
}

/// Returns those arguments of a call that ranks compare, as text: "12 elements of Float, sum".
std::string arguments_of(const ShmCall& call) {
  std::string type = c10::toString(static_cast<c10::ScalarType>(call.dtype));
  std::string elements = detail::concat(call.elements, " elements of ", type);
  switch (static_cast<ShmKind>(call.kind)) {
    case ShmKind::kAllReduce:
    case ShmKind::kReduceScatter:
      return detail::concat(elements, ", ", to_string(static_cast<ReduceOp>(call.op)));
    case ShmKind::kBroadcast:
      return detail::concat(elements, ", root ", call.root);
    case ShmKind::kAllToAll:
      return type;
    case ShmKind::kBarrier:
      return "";
    case ShmKind::kAllGather:
      break;
  }
  return elements;
}

std::string to_text(const ShmCall& call) {
  const std::string purpose(call.purpose.data(), strnlen(call.purpose.data(), call.purpose.size()));
  const std::string arguments = arguments_of(call);
  return detail::concat(with_purpose(name_of(static_cast<ShmKind>(call.kind)), purpose), " (call ",
                        call.sequence, arguments.empty() ? "" : ": ", arguments, ")");
}

class ShmGroup {
 public:
  ShmGroup(std::unique_ptr<ShmSegment> segment, GroupInfo group)
      : segment_(std::move(segment)),
        group_(std::move(group)),
        slots_(static_cast<std::size_t>(group_.size())) {}

  const GroupInfo& info() const { return group_; }
  std::size_t slot_bytes() const { return segment_->slot_bytes(); }

  /// Waits for the previous operation. Starts `operation` without waiting for other ranks.
  void start(const ShmOperationPtr& operation) {
    // Successive operations use the same slots (buffers), so the previous operation must end first.
    // If the previous operation fails, both start() and the wait() of the previous operation throw.
    if (under_way_ != nullptr) {
      finish(*under_way_);
    }
    if (failed_) {
      throw PeerError(describe(group_, text_of(*operation).c_str()) +
                      ": the group failed earlier; end this rank and start the job again");
    }
    // The call is written to shared memory before produce() announces that the slot is filled: a
    // rank that sees the announcement reads the call.
    publish(*operation);
    produce(*operation, 0);
    under_way_ = operation;
  }

  /// Throws Error on all ranks if the ranks' calls differ; the process group then stays usable.
  /// Throws PeerError if another rank has ended or does not arrive in time.
  void finish(ShmOperation& operation) {
    // Keeps the operation alive during run(): the caller may have released the Work that owns it.
    ShmOperationPtr keep;
    if (!operation.done) {
      operation.done = true;
      keep = std::exchange(under_way_, nullptr);
      try {
        run(operation);
        // After a PeerError the process group is unusable, because round numbers no longer match.
        // All ranks throw other Errors in the same round, so the process group stays usable.
      } catch (const PeerError&) {
        failed_ = true;
        operation.error = std::current_exception();
      } catch (const Error&) {
        operation.error = std::current_exception();
      }
    }
    if (operation.error) {
      std::rethrow_exception(operation.error);
    }
  }

  void abort() { segment_->wake_peers(); }

 private:
  void publish(const ShmOperation& operation) {
    // The call belongs to the next round, which produce() begins. The call's memory is reused two
    // rounds later; by then all ranks have read the call.
    ShmCall& call = segment_->call(group_.rank, round_ + 1);
    call = {++sequence_,
            operation.elements,
            static_cast<std::int32_t>(operation.kind),
            operation.dtype,
            static_cast<std::int32_t>(operation.op),
            operation.root,
            operation.rounds,
            {}};
    // A purpose (such as "for unit 'layers.0.mlp'") that is too long is cut at the front, because
    // the end of a unit's name is more specific.
    const std::size_t length = std::min(operation.purpose.size(), call.purpose.size());
    std::copy_n(operation.purpose.end() - static_cast<std::ptrdiff_t>(length), length,
                call.purpose.begin());
  }

  void produce(const ShmOperation& operation, std::int64_t round) {
    ++round_;
    operation.produce(round, segment_->slot(group_.rank, round_));
    segment_->arrive(group_.rank, round_);
  }

  void run(ShmOperation& operation) {
    const std::string collective = text_of(operation);
    std::int64_t rounds = 1;
    for (std::int64_t round = 0; round < rounds; ++round) {
      if (round > 0) {
        produce(operation, round);
      }
      // After wait(), all ranks' slots (buffers) of this round can be read, until this rank calls
      // arrive() for the next round.
      segment_->wait(group_, round_, collective.c_str());
      if (round == 0) {
        // Each rank's call says how many rounds the rank needs. The calls are readable after the
        // first round.
        rounds = agreed_rounds(operation);
      }
      for (int rank = 0; rank < group_.size(); ++rank) {
        slots_[static_cast<std::size_t>(rank)] = segment_->slot(rank, round_);
      }
      operation.consume(round, slots_);
    }
  }

  std::int64_t agreed_rounds(const ShmOperation& operation) {
    const ShmCall& own = segment_->call(group_.rank, round_);
    std::int64_t rounds = operation.rounds;
    for (int rank = 0; rank < group_.size(); ++rank) {
      const ShmCall& peer = segment_->call(rank, round_);
      // Every rank compares its call with the calls of all other ranks, so that all ranks throw if
      // the calls of any two ranks differ.
      TESSERA_CHECK(same(own, peer), describe(group_, text_of(operation).c_str()),
                    ": the ranks disagree: this rank calls ", to_text(own), ", but rank ",
                    group_.ranks[static_cast<std::size_t>(rank)], " calls ", to_text(peer),
                    "; call the same collectives in the same order on all ranks");
      rounds = std::max(rounds, peer.rounds);
    }
    return rounds;
  }

  std::unique_ptr<ShmSegment> segment_;
  GroupInfo group_;
  std::vector<const std::byte*> slots_;
  /// The number of the last round for which this rank has filled its slot. Wraps around.
  std::uint32_t round_ = 0;
  /// The number of collectives so far. The ranks compare this number in each collective, and so
  /// find out whether a rank has skipped a collective.
  std::uint64_t sequence_ = 0;
  /// Whether another rank has ended or did not arrive in time. The process group is then unusable,
  /// because the round numbers of the ranks no longer match.
  bool failed_ = false;
  /// The operation that was started and has not ended; at most one, because successive operations
  /// use the same slots (buffers).
  ShmOperationPtr under_way_;
};

// The communicator for shared memory. In each round of a collective, a rank fills its slot (a
// buffer) and reads all slots. ShmGroup runs the rounds.

/// Tensors of at most this size in bytes are reduced by every rank, in one round instead of two.
/// For small tensors, waiting costs more than the additions.
constexpr std::int64_t kOneRoundBytes = 32 << 10;

/// `whole`: tensors that contain one part for each rank. `own[i]`: this rank's part of `whole[i]`.
SplitBuffers split_buffers(const std::vector<at::Tensor>& whole,
                           const std::vector<at::Tensor>& own) {
  SplitBuffers buffers;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    buffers.push_back({{bytes_of(whole[i]), bytes_of(own[i])}, data_of(whole[i]), data_of(own[i])});
  }
  return buffers;
}

/// A running collective. The ShmWork keeps the shared memory mapped until wait() has returned.
class ShmWork final : public Work {
 public:
  ShmWork(std::shared_ptr<ShmGroup> group, ShmOperationPtr operation)
      : group_(std::move(group)), operation_(std::move(operation)) {}
  void wait() override { group_->finish(*operation_); }

 private:
  std::shared_ptr<ShmGroup> group_;
  ShmOperationPtr operation_;
};

class ShmCommunicator final : public Communicator {
 public:
  explicit ShmCommunicator(std::shared_ptr<ShmGroup> group)
      : Communicator(group->info().rank, group->info().size()), group_(std::move(group)) {}

  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    return all_gather_group({output}, {input});
  }

  WorkPtr all_gather_group(const std::vector<at::Tensor>& outputs,
                           const std::vector<at::Tensor>& inputs) override {
    const auto rounds = std::make_shared<GatherRounds>(
        GatherRounds{rank(), split_buffers(outputs, inputs), slot_bytes()});
    return start_rounds(describe_operation(ShmKind::kAllGather, inputs), rounds, outputs, inputs);
  }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    const ReduceFunction reduce = reduction(group_->info(), "all_reduce", tensor.scalar_type(), op);
    return bytes_of(tensor) <= kOneRoundBytes ? all_reduce_in_one_round(tensor, op, reduce)
                                              : all_reduce_in_parts(tensor, op, reduce);
  }

  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    return reduce_scatter_group({output}, {input}, op);
  }

  WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                               const std::vector<at::Tensor>& inputs, ReduceOp op) override {
    const at::Tensor& first = inputs.front();
    const auto rounds = std::make_shared<ScatterRounds>(
        group_->info(), slot_bytes(), split_buffers(inputs, outputs),
        reduction(group_->info(), "reduce_scatter", first.scalar_type(), op), first.element_size());
    return start_rounds(describe_operation(ShmKind::kReduceScatter, inputs, op), rounds, outputs,
                        inputs);
  }

  bool moves_groups_in_place() const override { return true; }
  bool compares_calls() const override { return true; }

  WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                     std::span<const std::int64_t> output_counts,
                     std::span<const std::int64_t> input_counts) override {
    const auto rounds = std::make_shared<ExchangeRounds>(group_->info(), slot_bytes(), output,
                                                         input, output_counts, input_counts);
    auto operation = describe_operation(ShmKind::kAllToAll, {input});
    // Ranks of an all-to-all have different numbers of elements, so these are not compared.
    // ExchangeRounds compares what each pair of ranks sends and expects.
    operation->elements = 0;
    return start_rounds(std::move(operation), rounds, {output}, {input});
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    auto operation = describe_operation(ShmKind::kBroadcast, {tensor});
    operation->root = root;
    operation->rounds = rounds_for(bytes_of(tensor), slot_bytes());
    const auto piece = [total = bytes_of(tensor), capacity = slot_bytes()](std::int64_t round) {
      return Piece(total, capacity, round);
    };
    // The root fills its slot (a buffer in shared memory), and the other ranks read the slot.
    const bool sends = root == rank();
    operation->produce = [=](auto round, auto* slot) {
      copy_bytes(slot, data_of(tensor) + piece(round).offset, sends ? piece(round).bytes : 0);
    };
    operation->consume = [=](auto round, Slots slots) {
      copy_bytes(data_of(tensor) + piece(round).offset, slots[static_cast<std::size_t>(root)],
                 sends ? 0 : piece(round).bytes);
    };
    return start(std::move(operation));
  }

  void barrier() override {
    auto operation = std::make_shared<ShmOperation>();
    operation->produce = [](auto, auto*) {};
    operation->consume = [](auto, Slots) {};
    start(std::move(operation))->wait();
  }

  void abort() override { group_->abort(); }
  std::string name() const override { return "shm"; }

 private:
  std::int64_t slot_bytes() const { return static_cast<std::int64_t>(group_->slot_bytes()); }

  ShmOperationPtr describe_operation(ShmKind kind, const std::vector<at::Tensor>& tensors,
                                     ReduceOp op = ReduceOp::kSum) const {
    auto operation = std::make_shared<ShmOperation>();
    operation->kind = kind;
    for (const at::Tensor& tensor : tensors) {
      // Of the tensors' sizes, the ranks compare only the total number of elements: different lists
      // of tensors rarely have the same total.
      operation->elements += tensor.numel();
    }
    operation->dtype = static_cast<std::int32_t>(tensors.front().scalar_type());
    operation->op = op;
    operation->purpose = purpose();
    return operation;
  }

  WorkPtr start(ShmOperationPtr operation) {
    group_->start(operation);
    return std::make_shared<ShmWork>(group_, std::move(operation));
  }

  /// Starts an operation. The operation owns `inputs` and `outputs`, because it can still run after
  /// this function has returned.
  template <class Rounds>
  WorkPtr start_rounds(ShmOperationPtr operation, const std::shared_ptr<Rounds>& rounds,
                       const std::vector<at::Tensor>& outputs,
                       const std::vector<at::Tensor>& inputs) {
    operation->rounds = rounds->count();
    operation->produce = [rounds, inputs](auto round, auto* slot) { rounds->produce(round, slot); };
    operation->consume = [rounds, outputs](auto round, Slots slots) {
      rounds->consume(round, slots);
    };
    return start(std::move(operation));
  }

  WorkPtr all_reduce_in_one_round(const at::Tensor& tensor, ReduceOp op, ReduceFunction reduce) {
    auto operation = describe_operation(ShmKind::kAllReduce, {tensor}, op);
    operation->produce = [tensor](auto, auto* slot) {
      copy_bytes(slot, data_of(tensor), bytes_of(tensor));
    };
    operation->consume = [tensor, reduce](auto, Slots slots) {
      reduce(data_of(tensor), slots, static_cast<std::size_t>(tensor.numel()));
    };
    return start(std::move(operation));
  }

  /// All-reduces in two stages: a reduce-scatter into this rank's part of `tensor`, in place, then
  /// an all-gather of all parts.
  WorkPtr all_reduce_in_parts(const at::Tensor& tensor, ReduceOp op, ReduceFunction reduce) {
    const EqualParts parts = line_parts(bytes_of(tensor), size());
    const SplitBuffers buffers{{parts, data_of(tensor), data_of(tensor) + parts.offset(rank())}};
    const auto scatter = std::make_shared<ScatterRounds>(group_->info(), slot_bytes(), buffers,
                                                         reduce, tensor.element_size());
    const GatherRounds gather{rank(), buffers, slot_bytes()};
    const std::int64_t first = scatter->count();
    auto operation = describe_operation(ShmKind::kAllReduce, {tensor}, op);
    operation->rounds = first + gather.count();
    // `keep` owns the tensor, because `buffers` contains raw pointers into the tensor.
    operation->produce = [=, keep = tensor](std::int64_t round, std::byte* slot) {
      round < first ? scatter->produce(round, slot) : gather.produce(round - first, slot);
    };
    operation->consume = [=](std::int64_t round, Slots slots) {
      round < first ? scatter->consume(round, slots) : gather.consume(round - first, slots);
    };
    return start(std::move(operation));
  }

  std::shared_ptr<ShmGroup> group_;
};

/// The key in the store under which the first rank puts the handle of the shared memory.
constexpr auto kHandleKey = "handle";

/// The first rank of the group creates the shared memory, and the other ranks map the memory.
/// Returns nullptr on a rank on which this fails.
std::unique_ptr<ShmSegment> reach_segment(const detail::StorePtr& store, const GroupInfo& group) {
  const bool wanted = tessera::detail::environment_switch("TESSERA_SHM").value_or(true);
  if (group.rank != 0) {
    return wanted ? ShmSegment::open(value_of(store, group, kHandleKey)) : nullptr;
  }
  auto segment = wanted ? ShmSegment::create(group.size()) : nullptr;
  // The key is written even after a failure, because the other ranks wait for the key.
  tell(store, group, kHandleKey, segment ? segment->handle() : "none");
  return segment;
}

/// Whether `yes` is true on every rank of the group. All ranks get the same result, because each
/// rank reads the values of all ranks from the store.
bool all_say(const detail::StorePtr& store, const GroupInfo& group, bool yes) {
  const auto key_of = [](int rank) { return "reached" + std::to_string(rank); };
  tell(store, group, key_of(group.rank), yes ? "yes" : "no");
  bool result = true;
  for (int rank = 0; rank < group.size(); ++rank) {
    result = value_of(store, group, key_of(rank)) == "yes" && result;
  }
  return result;
}

/// Whether this rank can map the flight records of all other ranks and check their processes by
/// pid. In another pid namespace, a pid can belong to another process.
bool recognises_peers(const GroupInfo& group) {
  WorldWatch& world = group.watch->world();
  return world.away(group.ranks).empty() && !world.first_to_end(group.ranks);
}

/// Returns a process group's shared memory. Returns nullptr on every rank if any rank cannot use
/// the memory or has TESSERA_SHM=0. Collective.
std::unique_ptr<ShmSegment> negotiate_segment(const detail::StorePtr& store,
                                              const GroupInfo& group) {
  std::unique_ptr<ShmSegment> segment = reach_segment(store, group);
  return all_say(store, group, segment != nullptr && recognises_peers(group)) ? std::move(segment)
                                                                              : nullptr;
}

}  // namespace

CommunicatorPtr make_shm_communicator(const detail::StorePtr& store, const GroupInfo& group) {
  try {
    std::unique_ptr<ShmSegment> segment = negotiate_segment(store, group);
    if (!segment) {
      return nullptr;
    }
    return std::make_shared<ShmCommunicator>(std::make_shared<ShmGroup>(std::move(segment), group));
  } catch (const PeerError&) {
    throw;
  } catch (const std::exception& error) {
    throw PeerError(describe(group, "setting up shared memory") + ": " + first_line(error.what()) +
                    "; check that every rank started");
  }
}

}  // namespace tessera::comm
