// Collectives through shared memory. Each is an operation of rounds: what a rank writes to its
// slot, and what it reads from all slots. ShmGroup runs the rounds, shm_rounds.h has the arithmetic
// of slots and tensors. The end of this file decides whether the ranks can share memory at all.

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <utility>

#include "backends.h"
#include "host/host.h"
#include "shm/shm_group.h"
#include "shm/shm_reduce.h"
#include "shm/shm_rounds.h"
#include "shm/shm_segment.h"
#include "tessera/core/detail/environment.h"
#include "tessera/core/error.h"
#include "watch/meeting.h"

namespace tessera::comm {
namespace {

/// Up to this size every rank reduces everything: one round instead of two. For short tensors
/// waiting for the peers costs more than the additions.
constexpr std::int64_t kOneRoundBytes = 32 << 10;

/// `whole[i]` is cut into equal parts; `own[i]` is this rank's part.
SplitBuffers split_buffers(const std::vector<at::Tensor>& whole,
                           const std::vector<at::Tensor>& own) {
  SplitBuffers buffers;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    buffers.push_back({{bytes_of(whole[i]), bytes_of(own[i])}, data_of(whole[i]), data_of(own[i])});
  }
  return buffers;
}

/// Keeps the group's memory mapped until the wait ends.
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
    const ReduceFunction reduce = reduction("all_reduce", tensor, op);
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
        reduction("reduce_scatter", first, op), first.element_size());
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
    operation->elements = 0;  // Differs between ranks; the counts are checked instead.
    return start_rounds(std::move(operation), rounds, {output}, {input});
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    auto operation = describe_operation(ShmKind::kBroadcast, {tensor});
    operation->root = root;
    operation->rounds = rounds_for(bytes_of(tensor), slot_bytes());
    const auto piece = [total = bytes_of(tensor), capacity = slot_bytes()](std::int64_t round) {
      return Piece(total, capacity, round);
    };
    // Peers of the root arrive with an empty slot, and the root has nothing to take.
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
    // A round without data.
    auto operation = std::make_shared<ShmOperation>();
    operation->produce = [](auto, auto*) {};
    operation->consume = [](auto, Slots) {};
    start(std::move(operation))->wait();
  }

  void abort() override { group_->abort(); }
  std::string name() const override { return "shm"; }

 private:
  std::int64_t slot_bytes() const { return static_cast<std::int64_t>(group_->slot_bytes()); }

  ReduceFunction reduction(const char* collective, const at::Tensor& tensor, ReduceOp op) const {
    const ReduceFunction reduce = find_reduce(tensor.scalar_type(), op);
    TESSERA_CHECK(reduce != nullptr, describe(group_->info(), collective), ": ", to_string(op),
                  " of ", tensor.scalar_type(),
                  " is not implemented; convert to float, or to another type");
    return reduce;
  }

  ShmOperationPtr describe_operation(ShmKind kind, const std::vector<at::Tensor>& tensors,
                                     ReduceOp op = ReduceOp::kSum) const {
    auto operation = std::make_shared<ShmOperation>();
    operation->kind = kind;
    for (const at::Tensor& tensor : tensors) {
      // A group of tensors is compared by its total size. Different sizes rarely have one total.
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

  /// The operation's functions share the rounds. They also hold the tensors whose memory they read
  /// or write, because the operation may outlive the call.
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

  /// A reduce-scatter into this rank's own part, in place, then an all-gather of the parts.
  WorkPtr all_reduce_in_parts(const at::Tensor& tensor, ReduceOp op, ReduceFunction reduce) {
    const EqualParts parts = line_parts(bytes_of(tensor), size());
    const SplitBuffers buffers{{parts, data_of(tensor), data_of(tensor) + parts.offset(rank())}};
    const auto scatter = std::make_shared<ScatterRounds>(group_->info(), slot_bytes(), buffers,
                                                         reduce, tensor.element_size());
    const GatherRounds gather{rank(), buffers, slot_bytes()};
    const std::int64_t first = scatter->count();
    auto operation = describe_operation(ShmKind::kAllReduce, {tensor}, op);
    operation->rounds = first + gather.count();
    // `keep`: buffers hold bare pointers into the tensor.
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

/// Written by the group's first rank, read by the others.
constexpr auto kHandleKey = "handle";

/// The first rank makes the segment, the others open it. All continue to the vote, also those
/// without a segment: no rank may be left waiting.
std::optional<ShmSegment> reach_segment(const detail::StorePtr& store, const GroupInfo& group) {
  const bool wanted = tessera::detail::environment_switch("TESSERA_SHM").value_or(true);
  if (group.rank != 0) {
    return wanted ? ShmSegment::open(value_from(store, group, 0, kHandleKey)) : std::nullopt;
  }
  auto segment = wanted ? ShmSegment::create(group.size()) : std::nullopt;
  // Also without a segment, because the peers wait for the key.
  tell(store, group, kHandleKey, segment ? segment->handle() : "none");
  return segment;
}

/// True if every rank says `yes`. A key for each rank and question; every rank reads all of them,
/// and so comes to the same answer.
bool all_say(const detail::StorePtr& store, const GroupInfo& group, const std::string& question,
             bool yes) {
  tell(store, group, question + std::to_string(group.rank), yes ? "yes" : "no");
  bool result = true;
  for (int rank = 0; rank < group.size(); ++rank) {
    result = value_from(store, group, rank, question + std::to_string(rank)) == "yes" && result;
  }
  return result;
}

/// A wait for a dead peer ends because its pid is gone. In another pid namespace the pid is unused
/// or another process's; such a group uses no shared memory.
bool recognises_peers(const ShmSegment& segment, const GroupInfo& group) {
  for (int rank = 0; rank < group.size(); ++rank) {
    if (!is_alive(segment.process(rank))) {
      return false;
    }
  }
  return true;
}

/// The segment of a group; nullopt on every rank if one of them cannot reach it, cannot see its
/// peers' processes (another pid namespace) or has TESSERA_SHM=0. Collective.
std::optional<ShmSegment> negotiate_segment(const detail::StorePtr& store, const GroupInfo& group) {
  std::optional<ShmSegment> segment = reach_segment(store, group);
  if (segment) {
    segment->set_process(group.rank, this_process());
  }
  // Peers can be recognised only once all of them have written who they are.
  const bool reached = all_say(store, group, "reached", segment.has_value());
  const bool recognised =
      all_say(store, group, "recognised", reached && recognises_peers(*segment, group));
  if (!recognised) {
    return std::nullopt;
  }
  // All have opened it by now. From here on the mappings alone keep the memory.
  segment->close_handle();
  return segment;
}

}  // namespace

CommunicatorPtr make_shm_communicator(const detail::StorePtr& store, const GroupInfo& group) {
  try {
    std::optional<ShmSegment> segment = negotiate_segment(store, group);
    if (!segment) {
      return nullptr;
    }
    return std::make_shared<ShmCommunicator>(
        std::make_shared<ShmGroup>(std::move(*segment), group));
  } catch (const PeerError&) {
    throw;
  } catch (const std::exception& error) {
    throw PeerError(describe(group, "setting up shared memory") + ": " + first_line(error.what()) +
                    "; check that every rank started");
  }
}

}  // namespace tessera::comm
