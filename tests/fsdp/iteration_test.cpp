// Iterations: forwards and backwards in unusual orders, frozen parameters, settings that change
// between steps, and defects of PyTorch 2.11's FSDP2.

#include <c10/core/InferenceMode.h>

#include "fsdp/recording_streams.h"
#include "fsdp/training/training.h"
#include "fsdp/unit.h"
#include "tessera/nn/freeze.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/optimizer.h"

namespace tessera::fsdp::iterations {

// Training needs the tensors that inference has made. On one rank the gathered tensors are the
// shards.
TEST(Iteration, TrainsAfterAForwardInInferenceMode) {
  const std::vector<at::Tensor> expected = gradients_alone();
  for (const int ranks : {1, 3}) {
    RunSharded(ranks, [&](Rank& rank, ShardedModel& model) {
      {
        const c10::InferenceMode inference(true);
        local_loss(model, rank);
        const UnshardScope whole_block(*model.blocks[0]);
        start_unshard(*model.blocks[1]);
      }
      local_loss(model, rank).backward();
      expect_gradients(model, expected);
    });
  }
}

/// x times a weight that another unit returns.
struct Lending : nn::Module<Lending> {
  class Unit : public nn::Module<Unit> {
   public:
    Unit() { weight = register_slot("weight", uniform_values({5, 4}, 1)); }
    at::Tensor forward(const at::Tensor&) { return weight->t(); }

    nn::Parameter weight;
  };
  at::Tensor forward(const at::Tensor& x) { return x.mm((*unit)(x)); }
  nn::Child<Unit> unit{*this, "unit"};
};

TEST(Iteration, MayReturnViewsOfParametersThatForwardDoesNotFree) {
  const at::Tensor x = uniform_values({3, 4}, 2);
  Lending alone;
  alone(x).square().sum().backward();
  RunOnMesh({2}, {"dp"}, [&](const DeviceMesh& mesh) {
    Lending model;
    shard_units({&*model.unit, &model}, mesh);
    set_reshard_after_forward(*model.unit, false);
    for (int step = 1; step <= 2; ++step) {
      model(x).square().sum().backward();
      expect_gradients(model, {alone.unit->weight->grad()}, step);
    }
  });
}

TEST_SHARDED(Iteration, ForgetsAForwardThatNoBackwardFollowed, 2) {
  EXPECT_NE(local_loss(model, rank).item<double>(), 0.0);
  const c10::AutoGradMode no_grad(false);
  for (const at::Tensor& parameter : parameters_of(model)) {
    local_tensor(parameter).zero_();
  }
  {
    const c10::AutoGradMode grad(true);
    EXPECT_EQ(local_loss(model, rank).item<double>(), 0.0);
  }
  EXPECT_EQ(local_loss(model, rank).item<double>(), 0.0);
  expect_all_sharded(model);  // after a forward without gradients
}

TEST(Iteration, EndsAllRanksWhenOneFails) {
  const std::vector<std::string> errors = ErrorsOfRanks(3, [](Rank& rank) {
    ShardedModel model(rank.mesh({3}, {"dp"}));
    model.blocks[1]->add_forward_hook([&](nn::ModuleBase&, nn::TensorList) {
      TESSERA_CHECK(rank.rank() != 1, "rank 1 stops here");
    });
    local_loss(model, rank).backward();
  });
  EXPECT_CONTAINS(errors[1], "rank 1 stops here", "module 'block1'", "unit 'block1'");
  EXPECT_FALSE(errors[0].empty());
  EXPECT_FALSE(errors[2].empty());
}

TEST(Frozen, MayChangeBetweenSteps) {
  const std::vector<at::Tensor> expected = gradients_alone();
  for (const bool reshard : {true, false}) {
    const auto run = [&](Rank& rank, ShardedModel& model) {
      for (const bool frozen : {true, false, true, false}) {
        for (const auto& block : model.blocks) {
          block->up->slot("weight")->persistent().set_requires_grad(!frozen);
        }
        const Sent sent(rank);
        local_loss(model, rank).backward();
        EXPECT_EQ(model.blocks[0]->up->slot("weight")->persistent().grad().defined(), !frozen);
        // The shards on two ranks: 5 of 10 rows, 4 of 7 rows, 2 of 3 rows.
        using testing::packed_numel;
        const std::int64_t block = packed_numel({frozen ? 0 : 5 * 7, 5, 4 * 10, 4});
        const std::int64_t head = packed_numel({2 * 7, 2});
        EXPECT_EQ(sent.of("dp", "reduce_scatter").bytes, 2 * 4 * (3 * block + head));
        if (!frozen) {
          expect_gradients(model, expected);
        }
        drop_gradients(model);
      }
    };
    RunSharded(2, {.reshard_after_forward = reshard}, run);
  }
}

TEST_SHARDED(Frozen, FirstBlocksAreNotGatheredInBackward, 2) {
  nn::freeze(model, {"block[01].**"});
  const Sent sent(rank);
  local_loss(model, rank).backward();
  // Forward gathers three blocks and the root, backward the block behind the frozen ones.
  EXPECT_EQ(sent.calls("dp", "all_gather"), 3 + 1 + 1);
  EXPECT_EQ(sent.calls("dp", "reduce_scatter"), 2);
  // Two means and a counter of each parameter that is trained.
  optim::AdamW optimizer(model, {});
  EXPECT_EQ(optim::named_state(optimizer, model).size(), 3u * (4 + 2));
}

/// Calls a frozen unit once with an input that needs a gradient and once with an input that needs
/// none.
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
  const at::Tensor x = batch(kDim, 0);
  Filled<Twice> alone;
  alone(x).square().mean().backward();
  RunOnMesh({2}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Filled<Twice> model;
    shard_units({&*model.trained, &*model.frozen, &model}, mesh);
    const Sent sent(rank);
    model(x.narrow(0, rank.rank() * 6, 6)).square().mean().backward();
    EXPECT_EQ(sent.calls("dp", "reduce_scatter"), 1);
    EXPECT_FALSE(model.frozen->slot("weight")->persistent().grad().defined());
    for (const char* name : {"weight", "bias"}) {
      EXPECT_TRUE(full_grad(*model.trained, name)
                      .allclose(alone.trained->slot(name)->get().grad(), 1e-4, 1e-6));
      EXPECT_TRUE(tessera::is_distributed(model.frozen->slot(name)->get()));
    }
  });
}

TEST_SHARDED(Settings, SwitchesBetweenZero2AndZero3, 2) {
  const auto gathers = [&] {
    const Sent sent(rank);
    local_loss(model, rank).backward();
    return sent.calls("dp", "all_gather");
  };
  EXPECT_EQ(gathers(), 7);
  set_reshard_after_forward(model, false);
  EXPECT_EQ(gathers(), 4);
  set_reshard_after_forward(*model.blocks[0], true);
  EXPECT_EQ(gathers(), 5);
}

TEST_SHARDED(Settings, GathersAheadAfterStartUnshard, 2) {
  const Sent sent(rank);
  start_unshard(*model.blocks[0]);
  const c10::AutoGradMode no_grad(false);
  local_loss(model, rank);
  EXPECT_EQ(sent.calls("dp", "all_gather"), 4);
}

// Defects of PyTorch 2.11's FSDP2, one test each.

TEST(PostForwardMesh, ShowsTheRightValuesOfUnevenRows) {
  const at::Tensor x = uniform_values({4, 3}, 5);
  for (const std::int64_t rows : {2, 3, 5, 6, 8}) {
    Filled<nn::Linear> alone(3, rows);
    alone(x).square().sum().backward();
    RunOnMesh({4}, {"dp"}, [&](const DeviceMesh& mesh) {
      Filled<nn::Linear> linear(3, rows);
      fully_shard(linear, mesh, {.reshard_after_forward = true, .post_forward_mesh_size = 2});
      const at::Tensor loss = linear(x).square().sum();
      EXPECT_TRUE(full_tensor(linear.slot("weight")->get()).equal(alone.weight->detach()));
      loss.backward();
      EXPECT_TRUE(full_grad(linear).allclose(alone.weight->grad(), 1e-4, 1e-5));
    });
  }
}

/// A struct that layers of a user's model pass to each other.
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

TEST_ON_MESH(Iteration, UnitsThatPassStructsReduceWithinBackward, {2}, {"dp"}) {
  Filled<StructModel> model;
  shard_units({&*model.first, &*model.second, &model}, mesh);
  const auto streams = testing::record(model);
  model(uniform_values({2, 4}, 1)).sum().backward();
  const std::vector<std::string>& notes = streams->notes();
  const auto reduced = std::ranges::find(notes, "reduce_scatter unit 'second'");
  ASSERT_NE(reduced, notes.end());
  EXPECT_NE(std::find(reduced, notes.end(), "unshard unit 'first'"), notes.end());
}

TEST_ON_RANKS(Iteration, OneRankCopiesNothing, 1) {
  Filled<nn::Linear> linear(3, 4);
  const void* memory = linear.weight->const_data_ptr();
  fully_shard(linear, rank.mesh({1}, {"dp"}));
  EXPECT_EQ(local_tensor(linear.weight).const_data_ptr(), memory);
  const Sent sent(rank);
  unshard(linear);
  EXPECT_EQ(linear.weight->const_data_ptr(), memory);
  linear(at::ones({1, 3})).sum().backward();
  EXPECT_TRUE(sent.table().empty());
  EXPECT_EQ(local_tensor(linear.weight).const_data_ptr(), memory);
}

}  // namespace tessera::fsdp::iterations
