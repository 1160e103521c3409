// What fully_shard can be told, each held against one rank that trains with the whole batch.

#include <cmath>
#include <optional>
#include <sstream>

#include "fsdp/training/training.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/optimizer.h"
#include "testing/files.h"

namespace tessera::fsdp {
namespace {

TEST(Options, AreWrittenAsFarAsTheyAreNotTheDefault) {
  std::ostringstream out;
  out << fsdp::Options{};
  EXPECT_EQ(out.str(), "{}");
  EXPECT_EQ(to_string(fsdp::Options{
                .mp_policy = {.param_dtype = at::kBFloat16, .cast_forward_inputs = false},
                .offload_policy = OffloadPolicy{.pin_memory = false},
                .reshard_after_forward = false,
                .post_forward_mesh_size = 2,
                .may_be_unused = true}),
            "{.mp_policy = {.param_dtype = BFloat16, .cast_forward_inputs = false}, "
            ".offload_policy = {.pin_memory = false}, .reshard_after_forward = false, "
            ".post_forward_mesh_size = 2, .may_be_unused = true}");
  const auto nowhere = [](const std::string&, const at::Tensor&) {
    return std::optional<Placement>();
  };
  const nn::Linear linear(2, 2);
  EXPECT_EQ(to_string(fsdp::Options{.shard_placement = nowhere,
                                    .ignored = {linear.slot("bias")},
                                    .allow_mixed_frozen = true}),
            "{.shard_placement = a function, .ignored = 1 parameter, "
            ".allow_mixed_frozen = true}");
}

TEST(Options, ShardsTheRequestedDimension) {
  const std::vector<at::Tensor> expected = gradients_alone();
  RunRanks(4, [&](Rank& rank) {
    ShardedModel model(rank.mesh({4}, {"dp"}),
                       {.shard_placement = [](const std::string& name,
                                              const at::Tensor&) -> std::optional<Placement> {
                         if (name.ends_with("up.weight")) {
                           return Shard{1};
                         }
                         if (name.ends_with("down.weight")) {
                           return Shard{-1};
                         }
                         if (name.ends_with("down.bias")) {
                           return Replicate{};
                         }
                         return std::nullopt;
                       }});
    const auto lies = [](const nn::Linear& linear, const std::string& name) {
      return DistributedTensor(linear.slot(name)->persistent()).placements();
    };
    EXPECT_EQ(lies(*model.blocks[0]->up, "weight"), Placements{Shard{1}});
    EXPECT_EQ(lies(*model.blocks[0]->down, "weight"), Placements{Shard{1}});
    EXPECT_EQ(lies(*model.blocks[0]->down, "bias"), Placements{Replicate{}});
    EXPECT_EQ(lies(*model.blocks[0]->up, "bias"), Placements{Shard{0}});
    local_loss(model, rank).backward();
    expect_gradients(model, expected);
  });
}

TEST(Options, RefusesADimensionThatAParameterLacks) {
  RunRanks(1, [](Rank& rank) {
    nn::Linear linear(2, 2);
    const Options options{.shard_placement = [](const std::string&, const at::Tensor&) {
      return std::optional<Placement>(Shard{1});
    }};
    EXPECT_ERROR(fully_shard(linear, rank.mesh({1}, {"dp"}), options),
                 "Shard(1) was asked for parameter 'bias' of sizes [2]");
    EXPECT_FALSE(tessera::is_distributed(linear.weight));
  });
}

/// x * scale, whose parameter has no dimensions.
class Scale : public nn::Module<Scale> {
 public:
  Scale() { scale = register_slot("scale", at::ones({}).mul(3)); }
  at::Tensor forward(const at::Tensor& x) { return x.mul(*scale); }
  nn::Parameter scale;
};

TEST(Options, ReplicatesScalars) {
  RunRanks(3, [](Rank& rank) {
    Scale module;
    fully_shard(module, rank.mesh({3}, {"dp"}));
    module(at::ones({2}).mul(rank.rank())).sum().backward();
    EXPECT_EQ(full_tensor(module.slot("scale")->persistent()).item<float>(), 3);
    EXPECT_EQ(full_tensor(module.slot("scale")->persistent().grad()).item<float>(),
              (0 + 2 + 4) / 3.0f);
  });
}

TEST(Options, LeavesIgnoredParametersAlone) {
  RunRanks(2, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 4);
    fully_shard(linear, rank.mesh({2}, {"dp"}), {.ignored = {linear.slot("bias")}});
    EXPECT_FALSE(tessera::is_distributed(linear.bias));
    linear(at::ones({1, 3}).mul(rank.rank())).sum().backward();
    EXPECT_TRUE(linear.bias->grad().equal(at::ones({4})));
    EXPECT_TRUE(tessera::is_distributed(linear.slot("weight")->persistent().grad()));
  });
}

/// A layer in fp64 beside others in fp32.
TEST(Options, TakesParametersOfSeveralTypesInOneUnit) {
  RunRanks(2, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 4);
    linear.slot("bias")->set(linear.bias->detach().to(at::kDouble).requires_grad_());
    const at::Tensor bias = linear.bias->detach().clone();
    fully_shard(linear, rank.mesh({2}, {"dp"}));
    unshard(linear);
    EXPECT_EQ(linear.bias->scalar_type(), at::kDouble);
    EXPECT_TRUE(linear.bias->detach().equal(bias));
  });
}

TEST(Options, GathersForBackwardAmongNeighbours) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1});
  RunRanks(4, [&](Rank& rank) {
    ShardedModel model(rank.mesh({4}, {"dp"}), {.post_forward_mesh_size = 2});
    const comm::TrafficTable before = rank.world()->traffic().table();
    local_loss(model, rank, 0).backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    EXPECT_EQ(traffic_of(traffic, "dp", "all_gather").calls, 4);
    EXPECT_EQ(traffic_of(traffic, "dp/2", "all_gather").calls, 3);
    local_loss(model, rank, 1).backward();
    expect_gradients(model, expected);
  });
}

TEST(Options, GathersTheRootForBackwardAmongItsNeighbours) {
  const std::vector<at::Tensor> expected = gradients_alone();
  RunRanks(4, [&](Rank& rank) {
    Filled<testing::SmallModel> model(testing::kDim, testing::kHidden, testing::kClasses);
    fully_shard(model, rank.mesh({4}, {"dp"}), {.post_forward_mesh_size = 2});
    const comm::TrafficTable before = rank.world()->traffic().table();
    const at::Tensor loss = local_loss(model, rank);
    EXPECT_TRUE(tessera::is_distributed(model.head->slot("weight")->get()));
    loss.backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    EXPECT_EQ(traffic_of(traffic, "dp", "all_gather").calls, 1);
    EXPECT_EQ(traffic_of(traffic, "dp/2", "all_gather").calls, 1);
    expect_gradients(model, expected);
  });
}

TEST(Options, RefusesNeighboursThatDoNotDivideTheRanks) {
  RunRanks(4, [](Rank& rank) {
    nn::Linear linear(2, 2);
    EXPECT_ERROR(fully_shard(linear, rank.mesh({4}, {"dp"}), {.post_forward_mesh_size = 3}),
                 "= 3 does not divide the 4 ranks");
  });
}

TEST(Options, MakesSeveralModulesOneUnit) {
  const std::vector<at::Tensor> expected = gradients_alone();
  RunOnMesh({2}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Filled<testing::SmallModel> model(testing::kDim, testing::kHidden, testing::kClasses);
    fully_shard(*model.blocks[0], mesh);
    fully_shard({model.blocks[1].get(), model.blocks[2].get()}, mesh);
    fully_shard(model, mesh);
    const comm::TrafficTable before = rank.world()->traffic().table();
    local_loss(model, rank).backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    EXPECT_EQ(traffic_of(traffic, "dp", "all_gather").calls, 2 * 2 + 1);
    EXPECT_EQ(traffic_of(traffic, "dp", "reduce_scatter").calls, 3);
    expect_gradients(model, expected);
  });
}

/// linear(x) + experts(x): the experts' ranks are fewer.
struct Mixture : nn::Module<Mixture> {
  at::Tensor forward(const at::Tensor& x) { return (*dense)(x) + (*experts)(x); }

  nn::Child<nn::Linear> dense{*this, "dense", 3, 4}, experts{*this, "experts", 3, 4};
};

/// Over all of `mesh`, its experts over the dimension "efsdp" alone.
void shard_mixture(Mixture& model, const DeviceMesh& mesh) {
  const auto mesh_of_experts = [&](const std::string& name, const at::Tensor&) {
    return name.starts_with("experts") ? std::optional(mesh["efsdp"]) : std::nullopt;
  };
  fully_shard(model, mesh.flatten("dp"), {.parameter_mesh = mesh_of_experts});
}

TEST(Options, GivesParametersTheirMesh) {
  const at::Tensor x = testing::uniform_values({8, 3}, 1);
  Filled<Mixture> alone;
  alone(x).square().sum().backward();
  RunOnMesh({2, 2}, {"ep", "efsdp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Filled<Mixture> model;
    shard_mixture(model, mesh);
    // Both ranks of an efsdp group see what the ranks of the other one do.
    const at::Tensor rows = x.narrow(0, 2 * rank.rank(), 2);
    const comm::TrafficTable before = rank.world()->traffic().table();
    model(rows).square().sum().backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    EXPECT_EQ(traffic_of(traffic, "dp", "all_gather").calls, 1);
    EXPECT_EQ(traffic_of(traffic, "efsdp", "all_gather").calls, 1);
    EXPECT_TRUE(full_tensor(model.dense->slot("weight")->persistent().grad())
                    .allclose(alone.dense->weight->grad().div(4), 1e-4, 1e-5));
    // These too are of the mean over all four ranks.
    const at::Tensor experts =
        full_tensor(model.experts->slot("weight")->persistent().grad()).mul(4);
    mesh.group("ep").all_reduce(experts, ReduceOp::kSum)->wait();
    EXPECT_TRUE(experts.allclose(alone.experts->weight->grad(), 1e-4, 1e-5));
  });
}

// Experts as one tensor that is split over "ep" as well: norms count it once, and a checkpoint
// holds it as one rank would.
TEST(Options, ExpertsInOneTensorHaveTheNormsAndCheckpointsOfOneRank) {
  const testing::TemporaryFolder folder;
  Filled<Mixture> alone;
  for (const auto& [name, slot] : alone.named_slots()) {
    slot->get().mutable_grad() = testing::uniform_values(slot->get().sizes(), 5);
  }
  const double expected = optim::grad_norm(optim::slots_of(alone)).item<double>();
  RunOnMesh({2, 2}, {"ep", "efsdp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Filled<Mixture> model;
    for (const auto& [name, slot] : model.experts->slots()) {
      nn::distribute_parameter(*slot, mesh["ep"], {Shard{0}});
    }
    shard_mixture(model, mesh);
    checkpoint::save(*rank.world(), folder.path(), 1, {model});
    for (const auto& [name, slot] : model.named_slots()) {
      const ShardingSpec& spec = sharding_spec(slot->persistent());
      slot->persistent().mutable_grad() =
          distribute_tensor(testing::uniform_values(slot->persistent().sizes(), 5), spec.mesh,
                            DistributedTensor(slot->persistent()).placements())
              .tensor();
    }
    EXPECT_NEAR(optim::grad_norm(optim::slots_of(model)).item<double>(), expected, 1e-5);
  });
  RunRanks(1, [&](Rank& rank) {
    Mixture loaded;
    checkpoint::load(*rank.world(), folder.path(), {loaded});
    EXPECT_TRUE(loaded.experts->weight->equal(*alone.experts->weight));
    EXPECT_TRUE(loaded.dense->bias->equal(*alone.dense->bias));
  });
}

// Those of the other ranks are other parameters, not copies.
TEST(Options, CountsParametersOnAnotherMeshInNorms) {
  RunOnMesh({2, 2}, {"ep", "efsdp"}, [](Rank& rank, const DeviceMesh& mesh) {
    Filled<Mixture> model;
    shard_mixture(model, mesh);
    model(testing::uniform_values({2, 3}, rank.rank())).square().sum().backward();
    std::vector<nn::SlotPtr> slots;
    at::Tensor dense = at::zeros({}), experts = at::zeros({});
    for (const auto& [name, slot] : model.named_slots()) {
      slots.push_back(slot);
      (name.starts_with("experts") ? experts : dense)
          .add_(full_tensor(slot->persistent().grad()).square().sum());
    }
    mesh.group("ep").all_reduce(experts, ReduceOp::kSum)->wait();
    const double expected = std::sqrt((dense + experts).item<double>());
    EXPECT_NEAR(optim::grad_norm(slots).item<double>(), expected, 1e-5 * expected);
  });
}

TEST(Options, TakesParametersOfAnyStrides) {
  RunRanks(3, [](Rank& rank) {
    nn::Linear linear(5, 4), alone(5, 4);
    testing::fill(linear);
    testing::fill(alone);
    const at::Tensor transposed = linear.weight->detach().t().contiguous().t();
    ASSERT_FALSE(transposed.is_contiguous());
    linear.slot("weight")->set(transposed.requires_grad_());
    fully_shard(linear, rank.mesh({3}, {"dp"}));
    const at::Tensor x = testing::uniform_values({2, 5}, 1);
    linear(x).sum().backward();
    alone(x).sum().backward();
    EXPECT_TRUE(
        full_tensor(linear.slot("weight")->persistent().grad()).allclose(alone.weight->grad()));
  });
}

TEST(Options, TrainsParametersOfSeveralTypesInOneUnit) {
  RunRanks(2, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 4);
    linear.slot("weight")->set(linear.weight->detach().to(at::kBFloat16).requires_grad_());
    fully_shard(linear, rank.mesh({2}, {"dp"}), {.mp_policy = {.param_dtype = at::kFloat}});
    linear(at::ones({2, 3})).sum().backward();
    const at::Tensor gradient = linear.slot("weight")->persistent().grad();
    EXPECT_EQ(gradient.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(full_tensor(gradient).equal(at::ones({4, 3}, at::kBFloat16).mul(2)));
    EXPECT_EQ(linear.slot("bias")->persistent().grad().scalar_type(), at::kFloat);
  });
}

TEST(Options, SumsInHalfPrecisionWithoutOverflow) {
  RunRanks(4, [](Rank& rank) {
    Filled<nn::Linear> linear(1, 4, {.bias = false});
    fully_shard(linear, rank.mesh({4}, {"dp"}), {.mp_policy = {.reduce_dtype = at::kHalf}});
    linear(at::ones({1, 1}).mul(30000)).sum().backward();  // the sum would be 120000
    EXPECT_TRUE(
        full_tensor(linear.slot("weight")->persistent().grad()).equal(at::ones({4, 1}).mul(30000)));
  });
}

}  // namespace
}  // namespace tessera::fsdp
