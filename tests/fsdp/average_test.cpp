// Gradients that the reduce-scatter averages, as NCCL can, have the bits of divided sums.

#include <ATen/ops/equal.h>

#include <memory>

#include "fsdp/training/training.h"
#include "testing/forwarding_communicator.h"

namespace tessera::fsdp::average_tests {

/// A group that divides while it reduces. Counts the averages.
class Averaging final : public testing::ForwardingCommunicator {
 public:
  Averaging(comm::CommunicatorPtr inner, int& averages)
      : ForwardingCommunicator(std::move(inner)), averages_(averages) {}

  bool averages_while_reducing() const override { return true; }
  comm::WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                               ReduceOp op) override {
    averages_ += static_cast<int>(op == ReduceOp::kAvg);
    return inner().reduce_scatter(output, input, op);
  }
  comm::WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                                     const std::vector<at::Tensor>& inputs, ReduceOp op) override {
    averages_ += static_cast<int>(op == ReduceOp::kAvg);
    return inner().reduce_scatter_group(outputs, inputs, op);
  }

 private:
  int& averages_;
};

/// The gradients of this rank's shards after one backward.
std::vector<at::Tensor> gradients_in(const comm::WorldPtr& world, const Rank& rank,
                                     const std::function<void(ShardedModel&)>& change) {
  ShardedModel model(init_device_mesh(world, {world->size()}, {"dp"}));
  change(model);
  local_loss(model, rank).backward();
  std::vector<at::Tensor> gradients;
  for (const auto& [name, slot] : model.named_slots()) {
    gradients.push_back(local_tensor(slot->persistent().grad()));
  }
  return gradients;
}

/// The number of averages of one backward on `ranks` ranks. Expects gradients equal to those of
/// groups that do not average.
void expect_averages(int ranks, int expected, const std::function<void(ShardedModel&)>& change) {
  RunRanks(ranks, [&](Rank& rank) {
    int averages = 0;
    const auto averaging = std::make_shared<testing::WrappedWorld>(
        rank.world(), [&](comm::CommunicatorPtr group, const std::string&) {
          return std::make_shared<Averaging>(std::move(group), averages);
        });
    const std::vector<at::Tensor> found = gradients_in(averaging, rank, change);
    EXPECT_EQ(averages, expected);
    const std::vector<at::Tensor> divided = gradients_in(rank.world(), rank, change);
    ASSERT_EQ(found.size(), divided.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::equal(found[i], divided[i])) << i;
    }
  });
}

constexpr int kUnits = 4;  // three blocks and the head

TEST(Average, IsTakenByTheReduceScatterOfEachUnit) {
  expect_averages(4, kUnits, [](ShardedModel&) {});
}

TEST(Average, IsDividedAfterTheSumIfItsQuotientsRound) {
  expect_averages(3, 0, [](ShardedModel&) {});
}

TEST(Average, IsNotTakenWithAnotherDivisor) {
  expect_averages(4, 0, [](ShardedModel& model) { set_gradient_divide_factor(model, 2); });
}

TEST(Average, IsNotTakenIfAHookNeedsTheSum) {
  expect_averages(
      4, 0, [](ShardedModel& model) { set_all_reduce_hook(model, [](const at::Tensor&) {}); });
}

TEST(Average, IsNotTakenIfOnlySumsAreAskedFor) {
  expect_averages(4, 0, [](ShardedModel& model) { set_force_sum_reduction(model, true); });
}

}  // namespace tessera::fsdp::average_tests
