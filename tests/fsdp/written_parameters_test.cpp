// Tests programs that write or assign a parameter while FSDP or autograd still uses the old value:
// between forward and backward, while a unit is gathered, and in forward.

#include <exception>

#include "fsdp/training/training.h"
#include "tessera/optim/adamw.h"

namespace tessera::fsdp::written {

/// No shard is empty: a test that writes to an empty shard would test nothing.
constexpr Sizes kSizes{.classes = 7};
constexpr auto kModified = "modified by an inplace operation";

TESSERA_ARRANGED(WrittenParameters, "OneRank", "Zero3", "Zero2", "Hpz", "Hsdp", "Offloaded");

// If backward needs the old value of a written parameter, backward must throw, as on one rank.
TEST_P(WrittenParameters, AreRefusedIfBackwardNeedsTheirOldValues) {
  const std::vector<at::Tensor> expected = gradients_alone(kSizes);
  const auto write = [](const nn::SlotPtr& slot) {
    const c10::AutoGradMode no_grad(false);
    slot->persistent().mul_(2);
  };
  RunArranged(GetParam(), kSizes, [&](Rank& rank, ShardedModel& model) {
    const at::Tensor of_bias = local_loss(model, rank);
    write(model.blocks[1]->up->slot("bias"));
    of_bias.backward();
    expect_gradients(model, expected);
  });
  RunArranged(GetParam(), kSizes, [&](Rank& rank, ShardedModel& model) {
    const at::Tensor loss = local_loss(model, rank);
    write(model.blocks[1]->up->slot("weight"));
    EXPECT_THROWN(std::exception, loss.backward(), kModified);
  });
  RunArranged(GetParam(), kSizes, [&](Rank&, ShardedModel& model) {
    optim::Sgd optimizer(model, {.lr = 1.0});
    const at::Tensor x = batch(kDim, 0).requires_grad_();
    const at::Tensor first = model(x).square().mean();
    model(x).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
    EXPECT_THROWN(std::exception, first.backward(), kModified);
  });
}

void halve(nn::ModuleBase& model) {
  const c10::AutoGradMode no_grad(false);
  for (const auto& [name, slot] : model.named_slots()) {
    local_tensor(slot->persistent()).mul_(0.5);
  }
}

TESSERA_ARRANGED(WriteWhileGathered, "OneRank", "Bf16OnOneRank", "Zero3", "Zero2", "Hpz", "Hsdp",
                 "Offloaded");

TEST_P(WriteWhileGathered, IsSeenByTheNextForward) {
  const at::Tensor x = batch(kDim, 0);
  Filled<SmallModel> alone(kDim, kHidden, kSizes.classes);
  halve(alone);
  const at::Tensor expected = alone(x);
  const auto close = [](const at::Tensor& found, const at::Tensor& wanted) {
    return found.to(at::kFloat).allclose(wanted, 2e-2, 2e-2);
  };
  const std::vector<std::pair<const char*, std::function<void(ShardedModel&)>>> acts{
      {"unshard",
       [](ShardedModel& model) {
         unshard(*model.blocks[0]);
         unshard(model);
         halve(model);
       }},
      {"start_unshard",
       [](ShardedModel& model) {
         UnshardHandle handle = start_unshard(model);
         halve(model);
         handle.wait();
       }},
      {"backward that leaves units gathered",
       [&](ShardedModel& model) {
         set_reshard_after_backward(model, false);
         model(x).sum().backward();
         halve(model);
       }},
      {"UnshardScope",
       [&](ShardedModel& model) {
         unshard(model);
         halve(model);
         const UnshardScope scope(model);
         const at::Tensor weight = model.head->weight;
         EXPECT_TRUE(close(weight, *alone.head->weight));
       }},
      {"call of a block alone", [&](ShardedModel& model) {
         model(x).sum().backward();
         unshard(*model.blocks[0]);
         {
           const c10::AutoGradMode no_grad(false);
           for (const at::Tensor& parameter : parameters_of(*model.blocks[0])) {
             at::Tensor(parameter).zero_();
           }
           EXPECT_TRUE(close((*model.blocks[0])(x), x));
         }
         testing::fill(model);
         halve(model);
       }}};
  for (const auto& [name, act] : acts) {
    SCOPED_TRACE(name);
    RunArranged(GetParam(), kSizes, [&, &act = act](Rank&, ShardedModel& model) {
      act(model);
      EXPECT_TRUE(close(model(x), expected));
    });
  }
}

TEST_SHARDED(WrittenParameter, OnOneRankIsSeenByAllRanks, 2) {
  const at::Tensor x = batch(kDim, 0);
  const at::Tensor before = model(x).detach();
  unshard(model);
  if (rank.rank() == 1) {
    const c10::AutoGradMode no_grad(false);
    local_tensor(model.head->slot("weight")->persistent()).mul_(2);
  }
  EXPECT_FALSE(model(x).allclose(before));
}

TEST_SHARDED(WrittenParameter, IsRefusedByAUnitGatheredForBackward, 2,
             {.reshard_after_forward = false}) {
  const at::Tensor x = batch(kDim, 0);
  const at::Tensor unused = model(x);
  halve(model);
  EXPECT_ERROR((*model.blocks[0])(x), "forward of unit 'block0'", "fsdp::reshard");
  reshard(*model.blocks[0]);
  (*model.blocks[0])(x);
}

struct Shrinking : nn::Module<Shrinking> {
  at::Tensor forward(const at::Tensor& x) {
    {
      const c10::AutoGradMode no_grad(false);
      linear->weight->mul_(0.5);
    }
    return (*linear)(x);
  }
  nn::Child<nn::Linear> linear{*this, "linear", 3, 3};
};

TEST(WrittenParameter, IsRefusedInForwardIfTheWriteWouldBeLost) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    Filled<Shrinking> model;
    fully_shard(model, mesh);
    EXPECT_ERROR(model(at::ones({2, 3})), "forward of the root unit", "'linear.weight'",
                 "slot->persistent()");
  });
  RunOnMesh({1}, {"dp"}, [](const DeviceMesh& mesh) {
    Filled<Shrinking> model;
    const at::Tensor before = model.linear->weight->detach().clone();
    fully_shard(model, mesh);
    model(at::ones({2, 3}));
    EXPECT_TRUE(full_tensor(model.linear->slot("weight")->persistent()).equal(before / 2));
  });
}

void double_gathered(nn::Linear& linear) {
  const c10::AutoGradMode no_grad(false);
  linear.weight->mul_(2);
}

TEST(WrittenParameter, IsRefusedOnSeveralRanksAfterUnshard) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    Filled<nn::Linear> linear(3, 3);
    fully_shard(linear, mesh);
    const at::Tensor x = at::ones({2, 3});
    const at::Tensor before = linear(x).detach();
    unshard(linear);
    double_gathered(linear);
    EXPECT_ERROR(linear(x), "after unshard of the root unit", "'weight'", "slot->persistent()");
    EXPECT_ERROR(reshard(linear), "after unshard of the root unit", "'weight'");
    EXPECT_TRUE(linear(x).equal(before));
    unshard(linear);
    reshard(linear);
  });
  RunOnMesh({1}, {"dp"}, [](const DeviceMesh& mesh) {
    Filled<nn::Linear> linear(3, 3);
    const at::Tensor before = linear.weight->detach().clone();
    fully_shard(linear, mesh);
    unshard(linear);
    double_gathered(linear);
    reshard(linear);
    EXPECT_TRUE(full_tensor(linear.slot("weight")->persistent()).equal(2 * before));
  });
}

TEST_ON_MESH(WrittenParameter, CausesAWarningAtTheEndOfAScope, {2}, {"dp"}) {
  Filled<nn::Linear> linear(3, 3);
  fully_shard(linear, mesh);
  const Warnings warnings;
  { const UnshardScope scope(linear); }
  EXPECT_TRUE(warnings.messages().empty());
  {
    const UnshardScope scope(linear);
    double_gathered(linear);
  }
  ASSERT_EQ(warnings.messages().size(), 1);
  EXPECT_CONTAINS(warnings.messages()[0], "after unshard of", "'weight'", "slot->persistent()");
}

// ParameterSlot::set() can replace a parameter's shard, as loading a checkpoint does.
TEST_ON_MESH(AssignedShard, IsUsedByTheNextForward, {3}, {"dp"}) {
  Filled<nn::Linear> linear(3, 7, {.bias = false});
  fully_shard(linear, mesh);
  const at::Tensor x = at::ones({1, 3});
  linear(x).sum().backward();
  const at::Tensor other = uniform_values({7, 3}, 9);
  linear.slot("weight")->set(
      distribute_tensor(other, mesh, {Shard{0}}).tensor().detach().requires_grad_());
  const at::Tensor out = linear(x);
  EXPECT_TRUE(out.allclose(x.matmul(other.t())));
  out.sum().backward();
  EXPECT_TRUE(full_tensor(linear.slot("weight")->persistent()).equal(other));
  EXPECT_TRUE(full_grad(linear).equal(at::ones({7, 3})));
  linear.slot("weight")->set(distribute_tensor(other, mesh, {Shard{1}}).tensor());
  EXPECT_ERROR(linear(x), "'weight' was replaced");
}

// A unit can stay gathered after forward, but checkpoints and copies must still read the shards.
TEST_SHARDED(GatheredUnits, PersistAsShards, 3) {
  std::vector<at::Tensor> before;
  for (const at::Tensor& parameter : parameters_of(model)) {
    before.push_back(local_tensor(parameter).detach().clone());
  }
  const at::Tensor loss = local_loss(model, rank);
  EXPECT_TRUE(model.head->slot("weight")->role.gathered);
  std::size_t i = 0;
  for (const at::Tensor& parameter : parameters_of(model)) {
    EXPECT_TRUE(local_tensor(parameter).equal(before[i++]));
  }
  loss.backward();
}

}  // namespace tessera::fsdp::written
