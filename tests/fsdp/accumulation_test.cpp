// Tests gradient accumulation in which only the last micro-batch reduces gradients. In some tests
// the program resets gradients; in others backward adds matrix products to gradients in place.

#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/sgd.h>

#include <cmath>

#include "fsdp/recording_streams.h"
#include "fsdp/training/training.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/optimizer.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/added_terms.h"

namespace tessera::fsdp::accumulation {

struct Pair : nn::Module<Pair> {
  Pair() { testing::fill(*this); }
  at::Tensor forward(const at::Tensor& x, bool both) {
    const at::Tensor y = (*b)(x).square().sum();
    return both ? y + (*a)(x).square().sum() : y;
  }
  nn::Child<nn::Linear> a{*this, "a", 3, 5}, b{*this, "b", 3, 5};
};

TEST(AccumulatedGradients, AreReducedIfTheLastMicroBatchSkipsTheUnit) {
  const auto rows_of = [](int rank) { return uniform_values({2, 3}, rank); };
  Pair alone;
  for (const int rank : {0, 1, 2, 3}) {
    alone(rows_of(rank), true).add(alone(rows_of(rank), false)).div(4).backward();
  }
  RunRanks(4, [&](Rank& rank) {
    for (const bool hybrid : {false, true}) {
      Pair model;
      const DeviceMesh mesh =
          hybrid ? rank.mesh({2, 2}, {"replicate", "shard"}) : rank.mesh({4}, {"dp"});
      shard_units({&*model.a, &*model.b, &model}, mesh);
      const auto set = hybrid ? &set_requires_all_reduce : &set_requires_gradient_sync;
      set(model, false, true);
      model(rows_of(rank.rank()), true).backward();
      set(model, true, true);
      model(rows_of(rank.rank()), false).backward();
      expect_gradients(model, gradients_of(alone));
    }
  });
}

TEST(AccumulatedGradients, AreReducedForAParameterFrozenLater) {
  for (const bool hybrid : {false, true}) {
    RunOnMesh({hybrid ? 2 : 1, 2}, {"replicate", "shard"}, [&](const DeviceMesh& mesh) {
      Filled<nn::Linear> linear(3, 4, {.bias = false});
      fully_shard(linear, hybrid ? mesh : mesh["shard"]);
      const auto set = hybrid ? &set_requires_all_reduce : &set_requires_gradient_sync;
      const nn::SlotPtr slot = linear.slot("weight");
      const at::Tensor x = at::ones({1, 3}).requires_grad_();
      set(linear, false, true);
      linear(x).sum().backward();
      slot->persistent().set_requires_grad(false);
      set(linear, true, true);
      linear(x).sum().backward();
      ASSERT_TRUE(slot->persistent().grad().defined());
      EXPECT_TRUE(full_grad(linear).equal(at::ones({4, 3})));
    });
  }
}

TEST_SHARDED(EarlierBackward, ReturnsWithPendingReductions, 2) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1});
  const auto streams = record(model);
  set_is_last_backward(model, false);
  local_loss(model, rank, 0).backward();
  // Backward does not wait for the last reduction, which is the reduction of the root.
  EXPECT_ERROR(model.head->slot("weight")->persistent().grad().sum(), "is not reduced");
  EXPECT_TRUE(model.blocks[2]->up->slot("weight")->persistent().grad().defined());
  set_is_last_backward(model, true);
  local_loss(model, rank, 1).backward();
  expect_gradients(model, expected);
  EXPECT_EQ(std::ranges::count_if(
                streams->notes(),
                [](const std::string& note) { return note.starts_with("reduce_scatter"); }),
            8);
}

/// The input needs no gradient, so backward uses only the weight of `second`.
struct Scaled : nn::Module<Scaled> {
  at::Tensor forward(const at::Tensor& x) { return (*second)((*first)(x)); }
  nn::Child<nn::Linear> first{*this, "first", 3, 5}, second{*this, "second", 5, 5};
};

TEST(UnshardInBackward, SavesAGatherIfDisabled) {
  Filled<Scaled> alone;
  const at::Tensor x = uniform_values({4, 3}, 2);
  alone(x).square().sum().backward();
  const std::vector<at::Tensor> expected = gradients_of(alone);
  RunRanks(2, [&](Rank& rank) {
    for (const bool gather : {true, false}) {
      Filled<Scaled> model;
      const DeviceMesh mesh = rank.mesh({2}, {"dp"});
      shard_units({&*model.first, &*model.second, &model}, mesh);
      set_unshard_in_backward(*model.first, gather);
      const Sent sent(rank);
      model(x).square().sum().backward();
      EXPECT_EQ(sent.calls("dp", "all_gather"), gather ? 4 : 3);
      EXPECT_EQ(sent.calls("dp", "reduce_scatter"), 2);
      expect_gradients(model, expected);
    }
  });
}

struct Drop {
  const char* name;
  void (*act)(SmallModel& model);
};

const std::vector<Drop>& drops() {
  static const std::vector<Drop> all{
      {"OurOptimizer", [](SmallModel& model) { optim::Sgd(model, {.lr = 0.1}).zero_grad(); }},
      {"Module", [](SmallModel& model) { model.zero_grad(); }},
      {"ModuleToZeros", [](SmallModel& model) { model.zero_grad(/*set_to_none=*/false); }},
      {"StockOptimizer",
       [](SmallModel& model) { torch::optim::SGD(parameters_of(model), 0.1).zero_grad(); }},
      {"StockOptimizerToZeros",
       [](SmallModel& model) { torch::optim::SGD(parameters_of(model), 0.1).zero_grad(false); }},
      {"ByHand",
       [](SmallModel& model) {
         for (const at::Tensor& tensor : parameters_of(model)) {
           tensor.mutable_grad() = at::Tensor();
         }
       }},
  };
  return all;
}

struct Setting {
  const char* name;
  void (*set)(SmallModel& model, bool is_last);
};

const std::vector<Setting>& settings() {
  static const std::vector<Setting> all{
      {"Sync", [](SmallModel& model, bool last) { set_requires_gradient_sync(model, last); }},
      {"AllReduce", [](SmallModel& model, bool last) { set_requires_all_reduce(model, last); }},
      {"LastBackward", [](SmallModel& model, bool last) { set_is_last_backward(model, last); }},
      {"AllReduceAndLastBackward",
       [](SmallModel& model, bool last) {
         set_requires_all_reduce(model, last);
         set_is_last_backward(model, last);
       }},
  };
  return all;
}

// Tests all ways to drop gradients, with each Setting. The dropped gradients are NaN, so a test
// fails if a dropped gradient is used.
TEST(DroppedGradients, DoNotAffectLaterGradients) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {1});
  const std::vector<at::Tensor> expected_of_two = gradients_alone({}, {1, 2});
  for (const Drop& drop : drops()) {
    for (const Setting& setting : settings()) {
      SCOPED_TRACE(std::string(drop.name) + " of " + setting.name);
      const auto run_nan = [](SmallModel& model, const Rank& rank, int step) {
        local_loss(model, rank, step).mul(std::nan("")).backward();
      };
      const auto run = [&](Rank& rank, ShardedModel& model) {
        setting.set(model, false);
        run_nan(model, rank, 0);
        drop.act(model);
        setting.set(model, true);
        local_loss(model, rank, 1).backward();
        expect_gradients(model, expected);
      };
      RunHybrid(run);
      RunHybrid({.offload_policy = OffloadPolicy{}}, run);
      RunHybrid([&](Rank& rank, ShardedModel& model) {
        run_nan(model, rank, 3);
        setting.set(model, false);
        run_nan(model, rank, 0);
        run_nan(model, rank, 0);
        drop.act(model);
        local_loss(model, rank, 1).backward();
        setting.set(model, true);
        local_loss(model, rank, 2).backward();
        expect_gradients(model, expected_of_two);
      });
    }
  }
}

TEST_SHARDED(PendingGradients, CannotBeReadOrPutBack, 2) {
  const at::Tensor& head = model.head->slot("weight")->persistent();
  set_is_last_backward(model, false);
  local_loss(model, rank, 0).backward();
  EXPECT_ERROR(head.grad().add(1), "'head.weight'", "set_is_last_backward(false)");
  const at::Tensor aside = std::exchange(head.mutable_grad(), at::Tensor());
  local_loss(model, rank, 1).backward();
  head.mutable_grad() = aside;
  EXPECT_ERROR(local_loss(model, rank, 2).backward(), "'head.weight'", "set again");
}

TEST_SHARDED(PendingGradients, CannotBeUsedByOptimizersOrNorms, 2) {
  const std::vector<nn::SlotPtr> slots = optim::slots_of(model);
  optim::Sgd ours(model, {.lr = 0.1});
  torch::optim::SGD stock(parameters_of(model), 0.1);
  set_requires_gradient_sync(model, false);
  local_loss(model, rank, 0).backward();
  EXPECT_ERROR(ours.step(), "'block0.up.weight'", "is not reduced", "zero_grad");
  EXPECT_ERROR(stock.step(), "'block0.up.weight'", "is not reduced");
  EXPECT_ERROR(optim::clip_grad_norm_(slots, 1.0), "'block0.up.weight'", "is not reduced");
  EXPECT_ERROR(slots[0]->persistent().grad().add(1), "'block0.up.weight'", "is not reduced");
}

TEST_ON_MESH(DroppedGradient, IsUndefinedIfTheParameterIsNotUsedAgain, {2}, {"dp"}) {
  Pair model;
  fully_shard(model, mesh);
  const at::Tensor x = uniform_values({2, 3}, rank.rank());
  set_is_last_backward(model, false);
  model(x, true).backward();
  model(x, true).backward();
  model.zero_grad();
  set_is_last_backward(model, true);
  model(x, false).backward();
  EXPECT_FALSE(model.a->slot("weight")->persistent().grad().defined());
  EXPECT_TRUE(model.b->slot("weight")->persistent().grad().defined());
}

// In the following tests, micro-batches 2 and 3 add matrix products to gradients in place.

using testing::AddedTerms;

constexpr int kWeights = 7;

/// AddedTerms counts 2-D additions. The input is 3-D, so only gradients of weights are 2-D.
at::Tensor loss_of_rows(SmallModel& model, const Rank& rank, int step) {
  const std::int64_t rows = kRows / rank.size();
  const at::Tensor x = batch(kDim, step).narrow(0, rank.rank() * rows, rows);
  return model(x.unsqueeze(0)).square().mean();
}

void accumulate(SmallModel& model, const Rank& rank) {
  for (int i = 0; i < 3; ++i) {
    set_requires_gradient_sync(model, i == 2);
    loss_of_rows(model, rank, i).backward();
  }
}

TESSERA_ARRANGED(InPlaceAdditionOnMeshes, "OneRank", "Zero3", "Zero2", "Hsdp", "Offloaded");

TEST_P(InPlaceAdditionOnMeshes, GivesTheGradientsOfOneRank) {
  const Arrangement& c = GetParam();
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1, 2});
  for (const bool checkpointed : {false, true}) {
    AddedTerms::reset();
    RunOnMesh(c.sizes, c.names, [&](Rank& rank, const DeviceMesh& mesh) {
      Filled<SmallModel> model(kDim, kHidden, kClasses);
      if (checkpointed) {
        nn::apply_activation_checkpointing(model, nn::of_class<Block>());
      }
      shard(model, mesh, c.options);
      {
        const AddedTerms counted;
        accumulate(model, rank);
      }
      expect_gradients(model, expected);
    });
    EXPECT_EQ(AddedTerms::products(), 2 * kWeights * testing::ranks_of(c.sizes));
    EXPECT_EQ(AddedTerms::additions(), 0);
  }
}

// Backward adds a matrix product to a gradient in place only if the product has reduce_dtype.
TEST(InPlaceAddition, RequiresProductsInTheReduceDtype) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1, 2});
  for (const at::ScalarType reduce : {at::kBFloat16, at::kFloat}) {
    AddedTerms::reset();
    RunSharded(2, {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = reduce}},
               [&](Rank& rank, ShardedModel& model) {
                 {
                   const AddedTerms counted;
                   accumulate(model, rank);
                 }
                 EXPECT_EACH(take_gradients(model), expected, 0.1, 0.02);
               });
    const int terms = 2 * 2 * kWeights;
    EXPECT_EQ(AddedTerms::products(), reduce == at::kFloat ? 0 : terms);
    EXPECT_EQ(AddedTerms::additions(), reduce == at::kFloat ? terms : 0);
  }
}

TEST(InPlaceAddition, AddsTensorParallelProductsToLocalGradients) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1, 2});
  AddedTerms::reset();
  RunOnMesh({2, 2}, {"dp", "tp"}, [&](Rank&, const DeviceMesh& mesh) {
    using namespace tensor_parallel;
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    parallelize_module(model, mesh["tp"],
                       {{"block*.up", colwise_parallel()}, {"block*.down", rowwise_parallel()}});
    shard(model, mesh["dp"]);
    const std::int64_t rows = kRows / 2;
    const std::int64_t first = mesh.local_rank("dp") * rows;
    {
      const AddedTerms counted;
      for (int i = 0; i < 3; ++i) {
        set_requires_gradient_sync(model, i == 2);
        fsdp::loss_of(model, batch(kDim, i), first, rows).backward();
      }
    }
    expect_gradients(model, expected);
  });
  // The head's gradient can be Partial over tp, so its matrix product is not added in place.
  EXPECT_EQ(AddedTerms::products(), 2 * (kWeights - 1) * 4);
}

struct Shared : nn::Module<Shared> {
  at::Tensor forward(const at::Tensor& x, bool twice) {
    const at::Tensor y = (*b)(x).square().sum();
    return twice ? y + (*b)(x.mul(2)).square().sum() : y + (*a)(x).square().sum();
  }
  nn::Child<nn::Linear> a{*this, "a", 3, 5}, b{*this, "b", 3, 5};
};

at::Tensor shared_rows(int rank, int step) {
  return uniform_values({1, 2, 3}, rank + 10 * step);
}

std::vector<at::Tensor> shared_alone(const std::vector<int>& steps) {
  Filled<Shared> alone;
  for (const int rank : {0, 1}) {
    for (const int step : steps) {
      alone(shared_rows(rank, step), step > 0).div(2).backward();
    }
  }
  return gradients_of(alone);
}

void run_shared(
    const std::function<void(Shared&, const std::function<at::Tensor(int)>& loss)>& body) {
  RunRanks(2, [&](Rank& rank) {
    Filled<Shared> model;
    fully_shard(model, rank.mesh({2}, {"dp"}));
    set_requires_gradient_sync(model, false);
    body(model, [&](int step) { return model(shared_rows(rank.rank(), step), step > 0); });
  });
}

TEST(InPlaceAddition, IncludesEachUseOfASharedWeight) {
  const std::vector<at::Tensor> expected = shared_alone({0, 1, 2});
  for (const bool recorded : {false, true}) {
    AddedTerms::reset();
    run_shared([&](Shared& model, const auto& loss) {
      const AddedTerms counted;
      loss(0).backward();
      loss(1).backward({}, /*keep_graph=*/recorded, /*create_graph=*/recorded);
      set_requires_gradient_sync(model, true);
      loss(2).backward();
      expect_gradients(model, expected);
    });
    if (!recorded) {
      EXPECT_EQ(AddedTerms::products(), 2 * 2 * 2);
      EXPECT_EQ(AddedTerms::additions(), 0);
    }
  }
}

TEST(InPlaceAddition, DoesNotChangeResultsOfAutogradGrad) {
  const std::vector<at::Tensor> expected = shared_alone({0, 2});
  const std::vector<at::Tensor> asked = shared_alone({1});
  run_shared([&](Shared& model, const auto& loss) {
    loss(0).backward();
    const at::Tensor weight = model.b->slot("weight")->persistent();
    set_requires_gradient_sync(model, true);
    const std::vector<at::Tensor> given = torch::autograd::grad({loss(1)}, {weight});
    EXPECT_TRUE(full_tensor(given[0]).allclose(asked[2], 1e-4, 1e-6));
    loss(2).backward();
    expect_gradients(model, expected);
  });
}

TEST(InPlaceAddition, ExcludesAFailedBackward) {
  // `drops`: whether the program drops the gradients of the first backward, which are NaN.
  for (const bool drops : {false, true}) {
    const std::vector<at::Tensor> expected =
        shared_alone(drops ? std::vector{0} : std::vector{0, 1});
    run_shared([&](Shared& model, const auto& loss) {
      (drops ? loss(0).mul(std::nan("")) : loss(0)).backward();
      const at::Tensor failing = loss(1);
      failing.register_hook([](const at::Tensor& gradient) -> at::Tensor {
        fail("no gradient of sizes ", gradient.sizes());
      });
      EXPECT_ERROR(failing.mul(2).backward(), "no gradient");
      if (drops) {
        drop_gradients(model);
      }
      set_requires_gradient_sync(model, true);
      loss(drops ? 0 : 1).backward();
      expect_gradients(model, expected);
    });
  }
}

TEST(InPlaceAddition, RefusesToDropGradientsDuringBackward) {
  run_shared([](Shared& model, const auto& loss) {
    loss(0).backward();
    const at::Tensor dropping = loss(1);
    dropping.register_hook([&](const at::Tensor& gradient) {
      drop_gradients(model);
      return gradient;
    });
    EXPECT_ERROR(dropping.backward(), "'a.weight'", "was dropped", "before or after");
  });
}

}  // namespace tessera::fsdp::accumulation
