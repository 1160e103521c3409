// What is known to go wrong in PyTorch 2.11's FSDP2, one test each; more of them are in
// replicas_test.cpp, unused_test.cpp and options_test.cpp.

#include <algorithm>

#include "fsdp/streams/recording_streams.h"
#include "fsdp/training/training.h"
#include "fsdp/unit.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/initialization.h"
#include "tessera/optim/adamw.h"
#include "testing/module_values.h"

namespace tessera::fsdp {
namespace {

/// An embedding whose table is also the weight of the head.
class Tied : public nn::Module<Tied> {
 public:
  explicit Tied(std::int64_t vocabulary) {
    table = register_module("table", std::make_shared<nn::Embedding>(vocabulary, 4));
    head = register_module(
        "head", std::make_shared<nn::Linear>(4, vocabulary, nn::LinearOptions{.bias = false}));
    head->tie_slot("weight", table->slot("weight"));
  }
  at::Tensor forward(const at::Tensor& ids) { return (*head)((*table)(ids)); }

  std::shared_ptr<nn::Embedding> table;
  std::shared_ptr<nn::Linear> head;
};

class TiedWeights : public ::testing::TestWithParam<std::pair<int, std::int64_t>> {};

TEST_P(TiedWeights, AreOneParameterWithTheSumOfBothGradients) {
  const auto [ranks, vocabulary] = GetParam();
  const at::Tensor ids = at::arange(12, at::kLong).remainder(vocabulary);
  Filled<Tied> alone(vocabulary);
  alone(ids).square().mean().backward();
  RunRanks(ranks, [&, v = vocabulary](Rank& rank) {
    Filled<Tied> model(v);
    fully_shard(model, rank.mesh({rank.size()}, {"dp"}));
    model(ids).square().mean().backward();
    EXPECT_EQ(model.named_slots().size(), 1u);
    EXPECT_TRUE(model.table->weight->is_same(*model.head->weight));
    EXPECT_TRUE(full_tensor(model.table->slot("weight")->persistent().grad())
                    .allclose(alone.table->weight->grad(), 1e-4, 1e-6));
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, TiedWeights,
                         ::testing::Values(std::pair{2, 7}, std::pair{4, 8}, std::pair{4, 3}));

class NeighboursOfUnevenRows : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(NeighboursOfUnevenRows, ShowTheRightValuesBetweenForwardAndBackward) {
  const std::int64_t rows = GetParam();
  Filled<nn::Linear> alone(3, rows);
  const at::Tensor x = testing::uniform_values({4, 3}, 5);
  alone(x).square().sum().backward();
  RunRanks(4, [&](Rank& rank) {
    Filled<nn::Linear> linear(3, rows);
    fully_shard(linear, rank.mesh({4}, {"dp"}),
                {.reshard_after_forward = true, .post_forward_mesh_size = 2});
    const at::Tensor loss = linear(x).square().sum();
    EXPECT_TRUE(full_tensor(linear.slot("weight")->get()).equal(alone.weight->detach()));
    loss.backward();
    EXPECT_TRUE(full_tensor(linear.slot("weight")->persistent().grad())
                    .allclose(alone.weight->grad(), 1e-4, 1e-5));
  });
}

INSTANTIATE_TEST_SUITE_P(Rows, NeighboursOfUnevenRows, ::testing::Values(2, 3, 5, 6, 8));

TEST(KnownDefects, OneRankDividesOnceByTheFactor) {
  RunRanks(1, [](Rank& rank) {
    for (const at::ScalarType reduce : {at::kFloat, at::kHalf}) {
      Filled<nn::Linear> linear(3, 4, {.bias = false});
      fully_shard(linear, rank.mesh({1}, {"dp"}), {.mp_policy = {.reduce_dtype = reduce}});
      set_gradient_divide_factor(linear, 4);
      linear(at::ones({1, 3})).sum().backward();
      EXPECT_TRUE(
          full_tensor(linear.slot("weight")->persistent().grad()).equal(at::full({4, 3}, 0.25)));
    }
  });
}

TEST(KnownDefects, AnOptimizerMadeBeforeSteps) {
  RunRanks(2, [](Rank& rank) {
    Filled<SmallModel> model(4, 6, 3);
    optim::AdamW optimizer(model, {.lr = 0.1});
    shard(model, rank.mesh({2}, {"dp"}));
    const at::Tensor before = full_tensor(model.head->slot("weight")->persistent()).clone();
    local_loss(model, rank).backward();
    optimizer.step();
    const at::Tensor moved =
        full_tensor(model.head->slot("weight")->persistent()).sub(before).abs();
    EXPECT_GT(moved.min().item<double>(), 0.05);
  });
}

TEST(KnownDefects, RanksWithOneSeedInitialiseDifferentShardsOfOneTensor) {
  nn::Linear alone(3, 8);
  nn::init_weights(alone, 7);
  RunRanks(4, [&](Rank& rank) {
    const auto linear = testing::made_on_meta<nn::Linear>(3, 8);
    fully_shard(*linear, rank.mesh({4}, {"dp"}));
    nn::to_empty(*linear, at::kCPU);
    nn::init_weights(*linear, 7);
    EXPECT_TRUE(full_tensor(linear->slot("weight")->persistent()).equal(alone.weight->detach()));
  });
}

/// What a user's program passes between layers.
struct Activation {
  at::Tensor value;
};

template <class Visit>
void visit_tensors(Activation& activation, Visit&& visit) {
  visit(activation.value);
}

struct StructLayer : nn::Module<StructLayer> {
  Activation forward(const Activation& in) { return {at::relu((*linear)(in.value))}; }
  nn::Child<nn::Linear> linear{*this, "linear", 4, 4};
};

struct StructModel : nn::Module<StructModel> {
  at::Tensor forward(const at::Tensor& x) { return (*second)((*first)(Activation{x})).value; }
  nn::Child<StructLayer> first{*this, "first"}, second{*this, "second"};
};

TEST(KnownDefects, UnitsThatPassStructsReduceWithinBackward) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    Filled<StructModel> model;
    fully_shard(*model.first, mesh);
    fully_shard(*model.second, mesh);
    fully_shard(model, mesh);
    const auto streams = testing::record(model);
    model(testing::uniform_values({2, 4}, 1)).sum().backward();
    const std::vector<std::string>& notes = streams->notes();
    const auto reduced = std::ranges::find(notes, "reduce_scatter unit 'second'");
    ASSERT_NE(reduced, notes.end());
    EXPECT_NE(std::find(reduced, notes.end(), "unshard unit 'first'"), notes.end());
  });
}

TEST(KnownDefects, OneRankCopiesNothing) {
  RunRanks(1, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 4);
    const void* memory = linear.weight->const_data_ptr();
    fully_shard(linear, rank.mesh({1}, {"dp"}));
    EXPECT_EQ(local_tensor(linear.weight).const_data_ptr(), memory);
    const comm::TrafficTable before = rank.world()->traffic().table();
    unshard(linear);
    EXPECT_EQ(linear.weight->const_data_ptr(), memory);
    linear(at::ones({1, 3})).sum().backward();
    EXPECT_TRUE(rank.world()->traffic().since(before).empty());
    EXPECT_EQ(local_tensor(linear.weight).const_data_ptr(), memory);
  });
}

TEST(KnownDefects, TheDivideFactorReachesUnitsBelow) {
  RunRanks(2, [](Rank& rank) {
    const std::vector<at::Tensor> expected = testing::gradients_alone();
    testing::ShardedModel model(rank.mesh({2}, {"dp"}));
    set_gradient_divide_factor(model, 4);
    local_loss(model, rank).backward();
    testing::expect_gradients(model, expected, 0.5);
  });
}

TEST(KnownDefects, ForwardTwiceWithOneLoss) {
  RunRanks(2, [](Rank& rank) {
    SmallModel policy(4, 6, 3), alone(4, 6, 3);
    testing::fill(policy);
    testing::fill(alone);
    shard(policy, rank.mesh({2}, {"dp"}));
    // DPO: the same model on a chosen and a rejected answer.
    const at::Tensor a = testing::batch(4, 0), b = testing::batch(4, 1);
    policy(a).sum().mul(policy(b).sum()).backward();
    alone(a).sum().mul(alone(b).sum()).backward();
    testing::expect_gradients(policy, testing::gradients_of(alone));
  });
}

}  // namespace
}  // namespace tessera::fsdp
