// Gradients that wait for a later reduction, and a program that drops them in between.
#include <torch/optim/sgd.h>

#include <cmath>

#include "fsdp/training/training.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"

namespace tessera::fsdp {
namespace {

/// A way to drop the gradients of a model.
struct Drop {
  const char* name;
  void (*act)(SmallModel& model);
};

std::vector<at::Tensor> tensors_of(const SmallModel& model) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, slot] : model.named_slots()) {
    tensors.push_back(slot->persistent());
  }
  return tensors;
}

const std::vector<Drop>& drops() {
  static const std::vector<Drop> all{
      {"OurOptimizer", [](SmallModel& model) { optim::Sgd(model, {.lr = 0.1}).zero_grad(); }},
      {"Module", [](SmallModel& model) { model.zero_grad(); }},
      {"ModuleToZeros", [](SmallModel& model) { model.zero_grad(/*set_to_none=*/false); }},
      {"StockOptimizer",
       [](SmallModel& model) { torch::optim::SGD(tensors_of(model), 0.1).zero_grad(); }},
      {"StockOptimizerToZeros",
       [](SmallModel& model) { torch::optim::SGD(tensors_of(model), 0.1).zero_grad(false); }},
      {"ByHand",
       [](SmallModel& model) {
         for (const at::Tensor& tensor : tensors_of(model)) {
           tensor.mutable_grad() = at::Tensor();
         }
       }},
  };
  return all;
}

/// A setting that leaves gradients incomplete while it is false.
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

class DroppedGradients : public ::testing::TestWithParam<std::tuple<Drop, Setting>> {};

TEST_P(DroppedGradients, DoNotComeBack) {
  const auto& [drop, setting] = GetParam();
  const std::vector<at::Tensor> expected = gradients_alone({}, {1});
  RunRanks(4, [&, &drop = drop, &setting = setting](Rank& rank) {
    for (const bool offload : {false, true}) {
      testing::ShardedModel model(
          rank.mesh({2, 2}, {"replicate", "shard"}),
          {.offload_policy = offload ? std::optional(OffloadPolicy{}) : std::nullopt});
      setting.set(model, false);
      local_loss(model, rank, 0).mul(std::nan("")).backward();
      drop.act(model);
      setting.set(model, true);
      local_loss(model, rank, 1).backward();
      expect_gradients(model, expected);
    }
  });
}

TEST_P(DroppedGradients, DoNotComeBackAfterAFurtherMicroBatch) {
  const auto& [drop, setting] = GetParam();
  const std::vector<at::Tensor> expected = gradients_alone({}, {1, 2});
  RunRanks(4, [&, &drop = drop, &setting = setting](Rank& rank) {
    testing::ShardedModel model(rank.mesh({2, 2}, {"replicate", "shard"}));
    local_loss(model, rank, 3).mul(std::nan("")).backward();
    setting.set(model, false);
    local_loss(model, rank, 0).mul(std::nan("")).backward();
    local_loss(model, rank, 0).mul(std::nan("")).backward();
    drop.act(model);
    local_loss(model, rank, 1).backward();
    setting.set(model, true);
    local_loss(model, rank, 2).backward();
    expect_gradients(model, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, DroppedGradients,
                         ::testing::Combine(::testing::ValuesIn(drops()),
                                            ::testing::ValuesIn(settings())),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + "Of" +
                                  std::get<1>(info.param).name;
                         });

TEST(WaitingGradients, AreAddedToThoseThatWereReducedBefore) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1, 2});
  for (const Setting& setting : settings()) {
    RunRanks(4, [&](Rank& rank) {
      testing::ShardedModel model(rank.mesh({2, 2}, {"replicate", "shard"}));
      local_loss(model, rank, 0).backward();
      setting.set(model, false);
      local_loss(model, rank, 1).backward();
      setting.set(model, true);
      local_loss(model, rank, 2).backward();
      expect_gradients(model, expected);
    });
  }
}

TEST(WaitingGradients, MayBeTakenAwayAndPutBack) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1});
  testing::RunSharded(2, [&](Rank& rank, testing::ShardedModel& model) {
    set_requires_gradient_sync(model, false);
    local_loss(model, rank, 0).backward();
    std::vector<at::Tensor> aside;
    for (const at::Tensor& tensor : tensors_of(model)) {
      aside.push_back(std::exchange(tensor.mutable_grad(), at::Tensor()));
    }
    local_loss(model, rank, 2).backward();
    for (std::size_t i = 0; i < aside.size(); ++i) {
      tensors_of(model)[i].mutable_grad() = aside[i];
    }
    set_requires_gradient_sync(model, true);
    local_loss(model, rank, 1).backward();
    expect_gradients(model, expected);
  });
}

/// The last unit's reduction is under way when backward ends.
TEST(WaitingGradients, AreNeitherReadNorRestoredDuringAReduction) {
  testing::RunSharded(2, [](Rank& rank, testing::ShardedModel& model) {
    const at::Tensor& head = model.head->slot("weight")->persistent();
    set_is_last_backward(model, false);
    local_loss(model, rank, 0).backward();
    EXPECT_ERROR(head.grad().add(1), "'head.weight'", "set_is_last_backward(false)");
    const at::Tensor aside = std::exchange(head.mutable_grad(), at::Tensor());
    local_loss(model, rank, 1).backward();
    head.mutable_grad() = aside;
    EXPECT_ERROR(local_loss(model, rank, 2).backward(), "'head.weight'", "put back");
  });
}

TEST(WaitingGradients, AreRefusedToAllWhoWouldReadThem) {
  testing::RunSharded(2, [](Rank& rank, testing::ShardedModel& model) {
    const std::vector<nn::SlotPtr> slots = optim::slots_of(model);
    optim::Sgd ours(model, {.lr = 0.1});
    torch::optim::SGD stock(tensors_of(model), 0.1);
    set_requires_gradient_sync(model, false);
    local_loss(model, rank, 0).backward();
    EXPECT_ERROR(ours.step(), "'block0.up.weight'", "is not reduced", "zero_grad");
    EXPECT_ERROR(stock.step(), "'block0.up.weight'", "is not reduced");
    EXPECT_ERROR(optim::clip_grad_norm_(slots, 1.0), "'block0.up.weight'", "is not reduced");
    EXPECT_ERROR(slots[0]->persistent().grad().add(1), "'block0.up.weight'", "is not reduced");
  });
}

/// Two units; a call uses one or both.
struct Branches : nn::Module<Branches> {
  Branches() { testing::fill(*this); }
  at::Tensor forward(const at::Tensor& x, bool both) {
    const at::Tensor y = (*b)(x).square().sum();
    return both ? y + (*a)(x).square().sum() : y;
  }
  nn::Child<nn::Linear> a{*this, "a", 3, 5}, b{*this, "b", 3, 5};
};

TEST(DroppedGradient, IsUndefinedForAParameterThatIsNotUsedAgain) {
  RunOnMesh({2}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    Branches model;
    fully_shard(*model.a, mesh, {.may_be_unused = true});
    fully_shard(model, mesh);
    const at::Tensor x = testing::uniform_values({2, 3}, rank.rank());
    set_is_last_backward(model, false);
    model(x, true).backward();
    model(x, true).backward();  // finishes the reductions of the one before
    model.zero_grad();
    set_is_last_backward(model, true);
    model(x, false).backward();
    EXPECT_FALSE(model.a->slot("weight")->persistent().grad().defined());
    EXPECT_TRUE(model.b->slot("weight")->persistent().grad().defined());
  });
}

}  // namespace
}  // namespace tessera::fsdp
