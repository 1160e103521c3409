#include "tessera/fsdp/fully_shard.h"

#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include "fsdp/small_model.h"
#include "tessera/core/error.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/meta_device.h"

namespace tessera::fsdp {
namespace {

using testing::ErrorsOfRanks;
using testing::SmallModel;
using testing::whole;

constexpr std::int64_t kRows = 12;  // of the global batch; divides by 1, 2, 3 and 4

/// Blocks first, the root last.
void shard(SmallModel& model, const DeviceMesh& mesh, const Options& options = {}) {
  for (const auto& block : model.blocks) fully_shard(*block, mesh, options);
  fully_shard(model, mesh, options);
}

at::Tensor batch(std::int64_t dim, int step) {
  return testing::wave({kRows, dim}, 100 + step);
}

/// Loss of this rank's rows of a batch.
at::Tensor local_loss(SmallModel& model, const at::Tensor& rows, const Rank& rank) {
  const std::int64_t count = kRows / rank.size();
  return testing::loss_of(model, rows, rank.rank() * count, count);
}

struct Sizes {
  int ranks;
  std::int64_t dim, hidden, classes;
};

/// What one rank computes with the whole batch.
struct Reference {
  std::vector<double> losses;
  std::vector<at::Tensor> gradients;  ///< of the last step
  std::vector<at::Tensor> parameters;
};

Reference train_alone(const Sizes& sizes, int steps) {
  SmallModel model(sizes.dim, sizes.hidden, sizes.classes);
  testing::fill(model);
  Reference reference;
  for (int step = 0; step < steps; ++step) {
    const at::Tensor loss = testing::loss_of(model, batch(sizes.dim, step), 0, kRows);
    loss.backward();
    reference.losses.push_back(loss.item<double>());
    reference.gradients.clear();
    for (const auto& [name, slot] : model.named_slots())
      reference.gradients.push_back(slot->get().grad());
    testing::descend(model, 0.1);
  }
  for (const auto& [name, slot] : model.named_slots())
    reference.parameters.push_back(slot->get().detach());
  return reference;
}

class Parity : public ::testing::TestWithParam<Sizes> {};

TEST_P(Parity, TrainsAsOneRankDoes) {
  const Sizes sizes = GetParam();
  const Reference reference = train_alone(sizes, 3);
  RunRanks(sizes.ranks, [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({sizes.ranks}, {"dp"});
    SmallModel model(sizes.dim, sizes.hidden, sizes.classes);
    testing::fill(model);
    shard(model, mesh);
    for (std::size_t step = 0; step < reference.losses.size(); ++step) {
      const at::Tensor loss = local_loss(model, batch(sizes.dim, static_cast<int>(step)), rank);
      loss.backward();
      const at::Tensor sum = loss.detach().clone();
      mesh.group().all_reduce(sum, ReduceOp::kSum)->wait();
      EXPECT_NEAR(sum.item<double>() / sizes.ranks, reference.losses[step], 1e-5);
      if (step + 1 == reference.losses.size()) {
        std::size_t i = 0;
        for (const auto& [name, slot] : model.named_slots()) {
          EXPECT_TRUE(
              whole(slot->persistent().grad()).allclose(reference.gradients[i++], 1e-4, 1e-6))
              << name;
        }
      }
      testing::descend(model, 0.1);
    }
    std::size_t i = 0;
    for (const auto& [name, slot] : model.named_slots()) {
      const at::Tensor difference = whole(slot->persistent()).sub(reference.parameters[i++]);
      EXPECT_LT(difference.abs().max().item<double>(), 1e-6) << name;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, Parity,
                         ::testing::Values(Sizes{1, 6, 10, 3}, Sizes{2, 8, 16, 4},
                                           Sizes{4, 8, 16, 4}, Sizes{4, 7, 30, 5},
                                           Sizes{3, 7, 5, 2}, Sizes{4, 3, 2, 1}));

TEST(FullyShard, KeepsTheChunkOfEachRank) {
  RunRanks(4, [](Rank& rank) {
    nn::Linear linear(2, 7);
    testing::fill(linear);
    const at::Tensor before = linear.weight->detach().clone();
    fully_shard(linear, rank.mesh({4}, {"dp"}));
    const std::vector<at::Tensor> chunks = before.chunk(4);
    EXPECT_TRUE(local_tensor(linear.weight).equal(chunks[static_cast<std::size_t>(rank.rank())]));
    EXPECT_EQ(DistributedTensor(linear.weight).placements(), Placements{Shard{0}});
    EXPECT_TRUE(linear.weight->requires_grad());
  });
}

TEST(FullyShard, ShowsWholeTensorsInForwardAndShardsAfter) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    testing::fill(model);
    shard(model, rank.mesh({2}, {"dp"}));
    bool seen_whole = false;
    model.blocks[0]->add_forward_hook([&](nn::ModuleBase&, nn::TensorList) {
      seen_whole = model.blocks[1]->up->weight->defined();
    });
    model.blocks[1]->up->add_forward_hook([&](nn::ModuleBase& up, nn::TensorList) {
      seen_whole = !tessera::is_distributed(up.slot("weight")->get());
    });
    local_loss(model, batch(4, 0), rank).backward();
    EXPECT_TRUE(seen_whole);
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_TRUE(tessera::is_distributed(slot->get())) << name;
    }
  });
}

TEST(FullyShard, ReducesFrozenParametersNot) {
  RunRanks(2, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2}, {"dp"});
    SmallModel model(4, 6, 3);
    testing::fill(model);
    for (const auto& block : model.blocks)
      block->up->slot("weight")->get().set_requires_grad(false);
    shard(model, mesh);
    const comm::TrafficTable before = rank.world()->traffic().table();
    local_loss(model, batch(4, 0), rank).backward();
    EXPECT_FALSE(model.blocks[0]->up->slot("weight")->persistent().grad().defined());
    EXPECT_TRUE(model.blocks[0]->down->slot("weight")->persistent().grad().defined());
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    const std::int64_t trainable = 3 * (6 + 4 * 6 + 4) + (3 + 1) / 2 * 2 * (4 + 1);
    EXPECT_EQ(traffic.at({"dp", "reduce_scatter"}).bytes, trainable * 4);
  });
}

TEST(FullyShard, AddsTheGradientsOfTwoBackwards) {
  RunRanks(3, [](Rank& rank) {
    SmallModel model(5, 7, 2);
    testing::fill(model);
    shard(model, rank.mesh({3}, {"dp"}));
    local_loss(model, batch(5, 0), rank).backward();
    const at::Tensor once = whole(model.head->slot("weight")->persistent().grad());
    local_loss(model, batch(5, 0), rank).backward();
    EXPECT_TRUE(whole(model.head->slot("weight")->persistent().grad()).allclose(once.mul(2)));
  });
}

TEST(FullyShard, RunsBackwardTwiceThroughOneGraph) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(5, 7, 2);
    testing::fill(model);
    shard(model, rank.mesh({2}, {"dp"}));
    const at::Tensor loss = local_loss(model, batch(5, 0), rank);
    loss.backward({}, /*retain_graph=*/true);
    const nn::SlotPtr& slot = model.blocks[0]->down->slot("weight");
    const at::Tensor once = whole(slot->persistent().grad());
    loss.backward();
    EXPECT_TRUE(whole(slot->persistent().grad()).allclose(once.mul(2)));
  });
}

TEST(FullyShard, AddsUpTwoForwardsBeforeOneBackward) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(5, 7, 2);
    SmallModel alone(5, 7, 2);
    testing::fill(model);
    testing::fill(alone);
    shard(model, rank.mesh({2}, {"dp"}));
    local_loss(model, batch(5, 0), rank).add(local_loss(model, batch(5, 1), rank)).backward();
    testing::loss_of(alone, batch(5, 0), 0, kRows)
        .add(testing::loss_of(alone, batch(5, 1), 0, kRows))
        .backward();
    const auto expected = alone.named_slots();
    std::size_t i = 0;
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_TRUE(
          whole(slot->persistent().grad()).allclose(expected[i++].second->get().grad(), 1e-4, 1e-6))
          << name;
    }
  });
}

TEST(FullyShard, ForgetsAForwardThatNoBackwardFollowed) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    testing::fill(model);
    shard(model, rank.mesh({2}, {"dp"}));
    const at::Tensor before = local_loss(model, batch(4, 0), rank).detach();
    {
      const c10::AutoGradMode no_grad(false);
      for (const auto& [name, slot] : model.named_slots()) local_tensor(slot->persistent()).zero_();
    }
    EXPECT_NE(before.item<double>(), 0.0);
    EXPECT_EQ(local_loss(model, batch(4, 0), rank).item<double>(), 0.0);
  });
}

TEST(FullyShard, FreesEverythingAfterAForwardWithoutGradients) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    testing::fill(model);
    shard(model, rank.mesh({2}, {"dp"}));
    const c10::AutoGradMode no_grad(false);
    local_loss(model, batch(4, 0), rank);
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_TRUE(tessera::is_distributed(slot->get())) << name;
    }
  });
}

/// Two layers of which a call uses one.
class Branches : public nn::Module<Branches> {
 public:
  Branches() {
    left = register_module("left", std::make_shared<nn::Linear>(3, 2));
    right = register_module("right", std::make_shared<nn::Linear>(3, 2));
  }
  at::Tensor forward(const at::Tensor& x, bool go_left) { return (go_left ? *left : *right)(x); }

  std::shared_ptr<nn::Linear> left, right;
};

TEST(FullyShard, CountsAParameterThatARankDidNotUseAsZero) {
  RunRanks(2, [](Rank& rank) {
    Branches model;
    Branches alone;
    testing::fill(model);
    testing::fill(alone);
    fully_shard(model, rank.mesh({2}, {"dp"}));
    const at::Tensor x = testing::wave({4, 3}, 9);
    model(x, rank.rank() == 0).sum().backward();
    alone(x, true).sum().backward();
    EXPECT_TRUE(whole(model.left->slot("weight")->persistent().grad())
                    .allclose(alone.left->weight->grad().div(2)));
    EXPECT_TRUE(whole(model.right->slot("weight")->persistent().grad())
                    .allclose(alone.left->weight->grad().div(2)));
  });
}

/// A unit that a call may leave out.
class Optional : public nn::Module<Optional> {
 public:
  Optional() {
    base = register_module("base", std::make_shared<nn::Linear>(3, 3));
    extra = register_module("extra", std::make_shared<nn::Linear>(3, 3));
  }
  at::Tensor forward(const at::Tensor& x, bool use_extra) {
    const at::Tensor y = (*base)(x);
    return use_extra ? (*extra)(y) : y;
  }

  std::shared_ptr<nn::Linear> base, extra;
};

TEST(FullyShard, LetsRanksLeaveOutAUnitThatMayBeUnused) {
  const at::Tensor x = testing::wave({4, 3}, 9);
  RunRanks(2, [&](Rank& rank) {
    Optional model;
    Optional alone;
    testing::fill(model);
    testing::fill(alone);
    const DeviceMesh mesh = rank.mesh({2}, {"dp"});
    fully_shard(*model.base, mesh);
    fully_shard(*model.extra, mesh, {.may_be_unused = true});
    fully_shard(model, mesh);
    for (int step = 0; step < 2; ++step) {
      model(x, rank.rank() == step).sum().backward();
      alone(x, true).sum().add(alone(x, false).sum()).div(2).backward();
    }
    const auto expected = alone.named_slots();
    std::size_t i = 0;
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_TRUE(
          whole(slot->persistent().grad()).allclose(expected[i++].second->get().grad(), 1e-4, 1e-6))
          << name;
      EXPECT_TRUE(tessera::is_distributed(slot->get())) << name;
    }
  });
}

TEST(FullyShard, FreesAUnitThatMayBeUnusedAfterAForwardWithoutGradients) {
  RunRanks(2, [](Rank& rank) {
    Optional model;
    testing::fill(model);
    const DeviceMesh mesh = rank.mesh({2}, {"dp"});
    fully_shard(*model.extra, mesh, {.may_be_unused = true});
    fully_shard(model, mesh);
    const c10::AutoGradMode no_grad(false);
    model(testing::wave({4, 3}, 9), rank.rank() == 0);
    EXPECT_TRUE(tessera::is_distributed(model.extra->weight));
  });
}

TEST(FullyShard, StartsAfreshAfterAForwardThatFailed) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    testing::fill(model);
    shard(model, rank.mesh({2}, {"dp"}));
    bool fails = true;
    model.blocks[0]->up->add_forward_hook(
        [&](nn::ModuleBase&, nn::TensorList) { TESSERA_CHECK(!fails, "not this time"); });
    EXPECT_THROW(local_loss(model, batch(4, 0), rank), Error);
    fails = false;
    {
      const c10::AutoGradMode no_grad(false);
      for (const auto& [name, slot] : model.named_slots()) local_tensor(slot->persistent()).zero_();
    }
    EXPECT_EQ(local_loss(model, batch(4, 0), rank).item<double>(), 0.0);
  });
}

TEST(FullyShard, ShardsAModelOnTheMetaDevice) {
  RunRanks(3, [](Rank& rank) {
    SmallModel reference(5, 7, 2);
    testing::fill(reference);
    std::shared_ptr<SmallModel> model;
    {
      const nn::MetaDevice meta;
      model = std::make_shared<SmallModel>(5, 7, 2);
    }
    shard(*model, rank.mesh({3}, {"dp"}));
    nn::to_empty(*model, c10::kCPU);
    testing::fill(*model);
    EXPECT_TRUE((*model)(batch(5, 0)).allclose(reference(batch(5, 0))));
  });
}

TEST(FullyShard, NamesParametersLeftOnTheMetaDevice) {
  RunRanks(1, [](Rank& rank) {
    std::shared_ptr<SmallModel> model;
    {
      const nn::MetaDevice meta;
      model = std::make_shared<SmallModel>(5, 7, 2, 1);
    }
    shard(*model, rank.mesh({1}, {"dp"}));
    try {
      (*model)(batch(5, 0));
      FAIL() << "expected an error";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("'head.weight'"), std::string::npos) << error.what();
    }
  });
}

TEST(FullyShard, KeepsTiedWeightsTied) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(4, 6, 4);
    SmallModel alone(4, 6, 4);
    for (SmallModel* m : {&model, &alone}) {
      m->register_module("other", std::make_shared<nn::Linear>(4, 4))
          ->tie_slot("weight", m->head->slot("weight"));
      m->add_forward_hook([m](nn::ModuleBase&, nn::TensorList outputs) {
        *outputs[0] = outputs[0]->matmul(*m->head->weight);
      });
      testing::fill(*m);
    }
    shard(model, rank.mesh({2}, {"dp"}));
    EXPECT_TRUE(model(batch(4, 0)).allclose(alone(batch(4, 0))));
  });
}

TEST(FullyShard, RefusesAParameterSharedWithAnotherUnit) {
  RunRanks(1, [](Rank& rank) {
    SmallModel model(4, 6, 4);
    model.blocks[0]->up->tie_slot("weight", model.blocks[1]->up->slot("weight"));
    EXPECT_THROW(fully_shard(*model.blocks[0], rank.mesh({1}, {"dp"})), Error);
    EXPECT_FALSE(tessera::is_distributed(model.blocks[0]->up->weight));
  });
}

TEST(FullyShard, RefusesASecondCall) {
  RunRanks(1, [](Rank& rank) {
    nn::Linear linear(2, 2);
    const DeviceMesh mesh = rank.mesh({1}, {"dp"});
    fully_shard(linear, mesh);
    EXPECT_TRUE(is_fully_sharded(linear));
    EXPECT_THROW(fully_shard(linear, mesh), Error);
  });
}

TEST(FullyShard, RefusesAMeshOfThreeDimensions) {
  RunRanks(2, [](Rank& rank) {
    nn::Linear linear(2, 2);
    EXPECT_THROW(fully_shard(linear, rank.mesh({1, 2, 1}, {"a", "b", "c"})), Error);
    EXPECT_FALSE(is_fully_sharded(linear));
  });
}

TEST(FullyShard, RefusesAListOfModules) {
  RunRanks(1, [](Rank& rank) {
    nn::ModuleList list;
    list.push_back(std::make_shared<nn::Linear>(2, 2));
    EXPECT_THROW(fully_shard(list, rank.mesh({1}, {"dp"})), Error);
  });
}

TEST(FullyShard, EndsAllRanksWhenOneFails) {
  const std::vector<std::string> errors = ErrorsOfRanks(3, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    testing::fill(model);
    shard(model, rank.mesh({3}, {"dp"}));
    model.blocks[1]->add_forward_hook([&](nn::ModuleBase&, nn::TensorList) {
      TESSERA_CHECK(rank.rank() != 1, "rank 1 stops here");
    });
    local_loss(model, batch(4, 0), rank).backward();
  });
  EXPECT_EQ(errors[1], "rank 1 stops here");
  EXPECT_FALSE(errors[0].empty());
  EXPECT_FALSE(errors[2].empty());
}

TEST(FullyShard, UnshardsAndReshardsByHand) {
  RunRanks(2, [](Rank& rank) {
    nn::Linear linear(3, 5);
    testing::fill(linear);
    const at::Tensor before = linear.weight->detach().clone();
    fully_shard(linear, rank.mesh({2}, {"dp"}));
    unshard(linear);
    EXPECT_TRUE(linear.weight->detach().equal(before));
    reshard(linear);
    EXPECT_TRUE(tessera::is_distributed(linear.weight));
  });
}

}  // namespace
}  // namespace tessera::fsdp
