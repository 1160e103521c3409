#include "shm_communicator.h"

#include <ATen/core/Tensor.h>

#include <utility>

#include "shm_group.h"
#include "shm_negotiation.h"
#include "shm_reduce.h"
#include "shm_rounds.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

/// Up to this size every rank reduces everything: one round instead of two.
constexpr std::int64_t kOneRoundBytes = 32 << 10;

/// `whole[i]` is cut into equal parts, of which `own[i]` is this rank's.
Strands strands_of(const std::vector<at::Tensor>& whole, const std::vector<at::Tensor>& own) {
  Strands strands;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    strands.push_back({{bytes_of(whole[i]), bytes_of(own[i])}, data_of(whole[i]), data_of(own[i])});
  }
  return strands;
}

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
        GatherRounds{rank(), strands_of(outputs, inputs), slot_bytes()});
    auto operation = describe_operation(ShmKind::kAllGather, inputs);
    operation->rounds = rounds->count();
    operation->produce = [rounds, inputs](auto round, auto* slot) { rounds->produce(round, slot); };
    operation->consume = [rounds, outputs](auto round, Slots slots) {
      rounds->consume(round, slots);
    };
    return start(std::move(operation));
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
        group_->info(), slot_bytes(), strands_of(inputs, outputs),
        reduction("reduce_scatter", first, op), first.element_size());
    auto operation = describe_operation(ShmKind::kReduceScatter, inputs, op);
    operation->rounds = rounds->count();
    operation->produce = [rounds, inputs](auto round, auto* slot) { rounds->produce(round, slot); };
    operation->consume = [rounds, outputs](auto round, Slots slots) {
      rounds->consume(round, slots);
    };
    return start(std::move(operation));
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
    operation->rounds = rounds->count();
    operation->produce = [rounds, input](auto round, auto* slot) { rounds->produce(round, slot); };
    operation->consume = [rounds, output](auto round, Slots slots) {
      rounds->consume(round, slots);
    };
    return start(std::move(operation));
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    auto operation = describe_operation(ShmKind::kBroadcast, {tensor});
    operation->root = root;
    operation->rounds = rounds_for(bytes_of(tensor), slot_bytes());
    const auto piece = [total = bytes_of(tensor), capacity = slot_bytes()](std::int64_t round) {
      return Piece(total, capacity, round);
    };
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
    const Parts parts = line_parts(bytes_of(tensor), size());
    const Strands strands{{parts, data_of(tensor), data_of(tensor) + parts.offset(rank())}};
    const auto scatter = std::make_shared<ScatterRounds>(group_->info(), slot_bytes(), strands,
                                                         reduce, tensor.element_size());
    const GatherRounds gather{rank(), strands, slot_bytes()};
    const std::int64_t first = scatter->count();
    auto operation = describe_operation(ShmKind::kAllReduce, {tensor}, op);
    operation->rounds = first + gather.count();
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

}  // namespace

CommunicatorPtr make_shm_communicator(const c10::intrusive_ptr<c10d::Store>& store,
                                      const GroupInfo& group) {
  try {
    std::optional<ShmSegment> segment = negotiate_segment(*store, group);
    if (!segment) {
      return nullptr;
    }
    return std::make_shared<ShmCommunicator>(
        std::make_shared<ShmGroup>(std::move(*segment), group));
  } catch (const std::exception& error) {
    throw PeerError(describe(group, "setting up shared memory") + ": " + first_line(error.what()) +
                    "; check that every rank started");
  }
}

}  // namespace tessera::comm
