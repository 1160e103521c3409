// The operator of a row's loss where a rank has some of the vocabulary, against libtorch's loss of
// whole logits. What it has in common with the others is in fused_operators_test, its layouts are
// in operators_test, and what becomes of the losses is in tests/tensor_parallel.

#include "dtensor/listing_mode.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/comm/trace.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "testing/distributed.h"

namespace tessera::row_losses_test {
namespace {

using testing::values;

constexpr std::int64_t kTokens = 5;

at::Tensor some_targets(std::int64_t vocabulary) {
  const at::Tensor targets = at::arange(kTokens, at::kLong).mul(3).add(1).remainder(vocabulary);
  targets[2] = -100;
  return targets;
}

struct Outcome {
  at::Tensor losses, gradient;
};

/// The loss of whole logits by libtorch, and the gradient of a sum with a weight for each row.
Outcome of_libtorch(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& weights,
                    const detail::RowLossOptions& options) {
  const at::Tensor leaf = logits.clone().requires_grad_();
  const at::Tensor squares =
      leaf.logsumexp(1).square().masked_fill(targets.eq(options.ignore_index), 0);
  const at::Tensor losses = at::cross_entropy_loss(leaf, targets, {}, at::Reduction::None,
                                                   options.ignore_index, options.label_smoothing) +
                            squares * options.z_loss;
  losses.mul(weights).sum().backward();
  return {losses.detach(), leaf.grad()};
}

struct Split {
  std::vector<std::int64_t> mesh;
  Placements logits, targets;
  std::int64_t vocabulary;
  std::int64_t calls;  ///< collectives that a rank starts, forward and backward
};

class CrossEntropyOperator : public ::testing::TestWithParam<Split> {};

TEST_P(CrossEntropyOperator, IsLibtorchsInAStrictScope) {
  const Split& split = GetParam();
  const at::Tensor logits = values({kTokens, split.vocabulary}).mul(3);
  const at::Tensor targets = some_targets(split.vocabulary);
  const at::Tensor weights = at::arange(1, kTokens + 1, at::kDouble);
  RunRanks(testing::ranks_of(split.mesh), [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh(split.mesh, {"dp", "tp"});
    // One after another: a plan must not be taken for that of other options.
    for (const detail::RowLossOptions& options :
         {detail::RowLossOptions{}, detail::RowLossOptions{-100, 0.2, 0.03},
          detail::RowLossOptions{-100, 0.2, 0.5}, detail::RowLossOptions{-100, 0.3, 0.5},
          detail::RowLossOptions{1, 0, 0}}) {
      const at::Tensor valid = targets.masked_fill(targets.eq(-100), options.ignore_index);
      const Outcome expected = of_libtorch(logits, valid, weights, options);
      const at::Tensor leaf =
          distribute_tensor(logits, mesh, split.logits).tensor().detach().requires_grad_();
      const at::Tensor own = distribute_tensor(valid, mesh, split.targets).tensor();
      const at::Tensor of_rows = distribute_tensor(weights, mesh, split.targets).tensor();
      const StrictScope strict;
      const std::int64_t implicit = implicit_redistributions();
      const comm::TrafficTable before = rank.world()->traffic().table();
      const at::Tensor losses = detail::cross_entropy(leaf, own, options);
      losses.mul(of_rows).backward(at::ones_like(losses));
      EXPECT_EQ(comm::total(rank.world()->traffic().since(before)).calls, split.calls);
      EXPECT_EQ(implicit_redistributions(), implicit);

      EXPECT_CLOSE(losses, expected.losses, 0, 1e-12);
      EXPECT_EQ(DistributedTensor(leaf.grad()).layout(), DistributedTensor(leaf).layout());
      EXPECT_CLOSE(leaf.grad(), expected.gradient, 0, 1e-12);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Splits, CrossEntropyOperator,
    ::testing::Values(
        Split{{1, 2}, {Replicate{}, Shard{1}}, {Replicate{}, Replicate{}}, 8, 2},
        Split{{1, 3}, {Replicate{}, Shard{1}}, {Replicate{}, Replicate{}}, 11, 2},
        Split{{1, 4}, {Replicate{}, Shard{1}}, {Replicate{}, Replicate{}}, 5, 2},  // no columns
        // Fewer bytes would gather it.
        Split{{1, 2}, {Replicate{}, Shard{1}}, {Replicate{}, Replicate{}}, 2, 2},
        Split{{2, 2}, {Shard{0}, Shard{1}}, {Shard{0}, Replicate{}}, 7, 2},
        Split{{2, 2}, {Shard{1}, Shard{0}}, {Replicate{}, Shard{0}}, 7, 2},
        Split{{2, 2}, {Shard{1}, Shard{1}}, {Replicate{}, Replicate{}}, 7, 2},
        Split{{6, 1}, {Shard{0}, Shard{1}}, {Shard{0}, Replicate{}}, 7, 0},  // no rows
        Split{{2, 2}, {Shard{0}, Replicate{}}, {Shard{0}, Replicate{}}, 7, 0},
        Split{{2, 2}, {Replicate{}, Replicate{}}, {Replicate{}, Replicate{}}, 7, 0}));

TEST_ON_MESH(CrossEntropyOperator, TakesTheRowsOfWholeTargets, {2, 2}, {"dp", "tp"}) {
  const at::Tensor logits = values({kTokens, 7}), targets = some_targets(7);
  const at::Tensor expected = detail::cross_entropy(logits, targets);
  const at::Tensor split = distribute_tensor(logits, mesh, {Shard{0}, Shard{1}});
  const StrictScope strict;
  const at::Tensor whole = distribute_tensor(targets, mesh, {Replicate{}, Replicate{}});
  EXPECT_CLOSE(detail::cross_entropy(split, whole), expected, 0, 1e-12);
  const ReplicationScope same;
  EXPECT_CLOSE(detail::cross_entropy(split, targets), expected, 0, 1e-12);
}

TEST_ON_MESH(CrossEntropyOperator, MovesNothingElseInAStrictScope, {2}, {"tp"}) {
  const at::Tensor logits = values({kTokens, 7}), targets = some_targets(7);
  const at::Tensor expected = detail::cross_entropy(logits, targets);
  const at::Tensor columns = distribute_tensor(logits, mesh, {Shard{1}});
  const at::Tensor terms = distribute_tensor(logits, mesh, {Partial{}});
  const at::Tensor rows = distribute_tensor(targets, mesh, {Shard{0}});
  const auto both = [&] {
    return std::vector{testing::full_tensor(detail::cross_entropy(columns, rows)),
                       testing::full_tensor(detail::cross_entropy(terms, rows))};
  };
  for (const at::Tensor& losses : both()) {
    EXPECT_TRUE(losses.allclose(expected, 0, 1e-12));
  }
  const StrictScope strict;
  const std::string refusal = "tessera::cross_entropy needs its inputs redistributed";
  EXPECT_ERROR(detail::cross_entropy(columns, rows), refusal);
  EXPECT_ERROR(detail::cross_entropy(terms, rows), refusal);
  EXPECT_ERROR(detail::cross_entropy(columns, targets), "argument 1, [5], is plain");
}

TEST(CrossEntropyOperator, IsOneOperatorToModesWhereTheVocabularyIsSplit) {
  const DeviceMesh mesh = init_device_mesh(comm::fake_world(0, 2), {2}, {"tp"});
  const at::Tensor logits = distribute_tensor(values({kTokens, 7}), mesh, {Shard{1}});
  const at::Tensor targets = distribute_tensor(some_targets(7), mesh, {Replicate{}});
  ListingMode mode;
  const OperatorModeScope scope(mode);
  detail::cross_entropy(logits, targets);
  EXPECT_EQ(mode.names, std::vector<std::string>{"tessera::cross_entropy"});
}

TEST(CrossEntropyOperator, HasShapesAndTrafficWithoutValues) {
  const comm::WorldPtr world = comm::meta_world(1, 3);
  const DeviceMesh mesh = init_device_mesh(world, {3}, {"tp"});
  const at::Tensor logits =
      distribute_tensor(values({kTokens, 7}).to(at::kMeta), mesh, {Shard{1}}).tensor().detach();
  const at::Tensor targets =
      distribute_tensor(some_targets(7).to(at::kMeta), mesh, {Replicate{}}).tensor();
  logits.requires_grad_();
  const StrictScope strict;
  const comm::TrafficTable before = world->traffic().table();
  const at::Tensor losses = detail::cross_entropy(logits, targets);
  losses.sum().backward();
  EXPECT_EQ(losses.sizes().vec(), std::vector<std::int64_t>{kTokens});
  EXPECT_EQ(local_tensor(logits.grad()).sizes(), local_tensor(logits).sizes());
  EXPECT_EQ(comm::total(world->traffic().since(before)).calls, 2);
}

TEST(CrossEntropyOperator, RefusesWhatHasNoLoss) {
  const at::Tensor logits = values({2, 3}), targets = at::tensor({0, 2}, at::kLong);
  EXPECT_ERROR(detail::cross_entropy(logits, targets.add(1)), "outside the vocabulary [0, 3)");
  EXPECT_ERROR(detail::cross_entropy(logits, targets.sub(1)), "outside the vocabulary [0, 3)");
  EXPECT_ERROR(detail::cross_entropy(logits, targets.to(at::kInt)), "must be int64, but are Int");
  EXPECT_ERROR(detail::cross_entropy(logits, targets[0]), "but they are [2, 3] and []");
  EXPECT_ERROR(detail::cross_entropy(logits, targets, {-100, 2, 0}), "label_smoothing is 2");
  EXPECT_ERROR(detail::cross_entropy(logits, targets, {-100, 0, -1}), "z_loss is -1");
  RunOnMesh({2}, {"tp"}, [&](const DeviceMesh& mesh) {
    const at::Tensor split = distribute_tensor(logits, mesh, {Shard{1}});
    const ReplicationScope same;
    EXPECT_ERROR(detail::cross_entropy(split, targets.add(1)), "outside the vocabulary [0, 3)");
    EXPECT_ERROR(detail::cross_entropy(split, targets[0]), "but they are [2, 3] and []");
  });
}

}  // namespace
}  // namespace tessera::row_losses_test
