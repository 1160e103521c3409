// Parameters that are frozen and thawed.

#include "fsdp/training/training.h"
#include "tessera/nn/freeze.h"
#include "tessera/optim/adamw.h"

namespace tessera::fsdp {
namespace {

void freeze(SmallModel& model, bool frozen) {
  for (const auto& block : model.blocks) {
    block->up->slot("weight")->persistent().set_requires_grad(!frozen);
  }
}

TEST(Frozen, MayChangeBetweenSteps) {
  const std::vector<at::Tensor> expected = testing::gradients_alone();
  RunRanks(2, [&](Rank& rank) {
    for (const bool reshard : {true, false}) {
      testing::ShardedModel model(rank.mesh({2}, {"dp"}), {.reshard_after_forward = reshard});
      for (const bool frozen : {true, false, true, false}) {
        freeze(model, frozen);
        const comm::TrafficTable before = rank.world()->traffic().table();
        local_loss(model, rank).backward();
        const auto reduced =
            testing::traffic_of(rank.world()->traffic().since(before), "dp", "reduce_scatter");
        EXPECT_EQ(model.blocks[0]->up->slot("weight")->persistent().grad().defined(), !frozen);
        // On two ranks: of 10 rows 5, of 7 rows 4, of 3 rows 2.
        using testing::packed_numel;
        const std::int64_t block = packed_numel({frozen ? 0 : 5 * 7, 5, 4 * 10, 4});
        const std::int64_t head = packed_numel({2 * 7, 2});
        EXPECT_EQ(reduced.bytes, 2 * 4 * (3 * block + head));
        if (!frozen) {
          testing::expect_gradients(model, expected);
        }
        for (const auto& [name, slot] : model.named_slots()) {
          slot->persistent().mutable_grad().reset();
        }
      }
    }
  });
}

TEST(Frozen, FrozenFirstBlocksAreNotGatheredInBackward) {
  RunRanks(2, [](Rank& rank) {
    testing::ShardedModel model(rank.mesh({2}, {"dp"}), {});
    nn::freeze(model, {"block[01].**"});
    const comm::TrafficTable before = rank.world()->traffic().table();
    local_loss(model, rank).backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    const auto blocks = static_cast<std::int64_t>(model.blocks.size());
    // Forward: each block and the root; backward: the blocks behind the frozen ones.
    EXPECT_EQ(traffic.at({"dp", "all_gather"}).calls, blocks + 1 + blocks - 2);
    EXPECT_EQ(traffic.at({"dp", "reduce_scatter"}).calls, blocks - 2 + 1);
    // Two means and a counter of each parameter that is trained.
    optim::AdamW optimizer(model, {});
    EXPECT_EQ(optim::named_state(optimizer, model).size(),
              3u * (4 * static_cast<std::size_t>(blocks - 2) + 2));
  });
}

/// Frozen as a whole; called once with an input that needs a gradient and once with one that does
/// not.
struct Twice : nn::Module<Twice> {
  Twice() {
    for (const char* name : {"weight", "bias"}) {
      frozen->slot(name)->get().set_requires_grad(false);
    }
  }
  at::Tensor forward(const at::Tensor& x) { return (*frozen)((*trained)(x)) - (*frozen)(x); }

  nn::Child<nn::Linear> trained{*this, "trained", kDim, kDim}, frozen{*this, "frozen", kDim, kDim};
};

TEST(Frozen, UnitRunsWithAndWithoutAGradientToPass) {
  const at::Tensor x = testing::batch(kDim, 0);
  Filled<Twice> alone;
  alone(x).square().mean().backward();
  RunOnMesh({2}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Filled<Twice> model;
    fully_shard(*model.trained, mesh);
    fully_shard(*model.frozen, mesh);
    fully_shard(model, mesh);
    const comm::TrafficTable before = rank.world()->traffic().table();
    model(x.narrow(0, rank.rank() * 6, 6)).square().mean().backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    EXPECT_EQ(testing::traffic_of(traffic, "dp", "reduce_scatter").calls, 1);
    EXPECT_FALSE(model.frozen->slot("weight")->persistent().grad().defined());
    for (const char* name : {"weight", "bias"}) {
      EXPECT_TRUE(full_tensor(model.trained->slot(name)->persistent().grad())
                      .allclose(alone.trained->slot(name)->get().grad(), 1e-4, 1e-6));
      EXPECT_TRUE(tessera::is_distributed(model.frozen->slot(name)->get()));
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp
