// Parameters and units that not all ranks use.

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>

#include "fsdp/state.h"
#include "fsdp/training/training.h"
#include "tessera/optim/adamw.h"
#include "testing/environment.h"

namespace tessera::fsdp {
namespace {

using testing::ErrorsOfRanks;
using testing::RanksOptions;

/// Two layers; a call uses one of them.
class Branches : public nn::Module<Branches> {
 public:
  explicit Branches(std::int64_t in = 3, std::int64_t out = 2) {
    left = register_module("left", std::make_shared<nn::Linear>(in, out));
    right = register_module("right", std::make_shared<nn::Linear>(in, out));
  }
  at::Tensor forward(const at::Tensor& x, bool go_left) { return (go_left ? *left : *right)(x); }

  std::shared_ptr<nn::Linear> left, right;
};

TEST(Unused, CountsAParameterThatARankDidNotUseAsZero) {
  RunRanks(2, [](Rank& rank) {
    Branches model;
    Branches alone;
    testing::fill(model);
    testing::fill(alone);
    fully_shard(model, rank.mesh({2}, {"dp"}));
    const at::Tensor x = testing::uniform_values({4, 3}, 9);
    // Squares, so that the gradients of the two differ.
    model(x, rank.rank() == 0).square().sum().backward();
    alone(x, true).square().sum().backward();
    alone(x, false).square().sum().backward();
    EXPECT_FALSE(alone.left->weight->grad().allclose(alone.right->weight->grad()));
    EXPECT_TRUE(full_tensor(model.left->slot("weight")->persistent().grad())
                    .allclose(alone.left->weight->grad().div(2)));
    EXPECT_TRUE(full_tensor(model.right->slot("weight")->persistent().grad())
                    .allclose(alone.right->weight->grad().div(2)));
  });
}

/// A unit that a call may leave out.
struct Optional : nn::Module<Optional> {
  at::Tensor forward(const at::Tensor& x, bool use_extra) {
    const at::Tensor y = (*base)(x);
    return use_extra ? (*extra)(y) : y;
  }

  nn::Child<nn::Linear> base{*this, "base", 3, 3}, extra{*this, "extra", 3, 3};
};

TEST(Unused, LetsRanksLeaveOutAUnitThatMayBeUnused) {
  const at::Tensor x = testing::uniform_values({4, 3}, 9);
  RunOnMesh({2}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Optional model;
    Optional alone;
    testing::fill(model);
    testing::fill(alone);
    fully_shard(*model.base, mesh);
    fully_shard(*model.extra, mesh, {.may_be_unused = true});
    fully_shard(model, mesh);
    for (int step = 0; step < 2; ++step) {
      model(x, rank.rank() == step).sum().backward();
      alone(x, true).sum().add(alone(x, false).sum()).div(2).backward();
    }
    testing::expect_gradients(model, testing::gradients_of(alone));
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_TRUE(tessera::is_distributed(slot->get())) << name;
    }
  });
}

/// first, extra or not, last.
struct Detour : nn::Module<Detour> {
  at::Tensor forward(const at::Tensor& x, bool use_extra) {
    const at::Tensor y = (*first)(x);
    return (*last)(use_extra ? (*extra)(y) : y);
  }

  nn::Child<nn::Linear> first{*this, "first", 3, 3}, extra{*this, "extra", 3, 3};
  nn::Child<nn::Linear> last{*this, "last", 3, 2};
};

// Backward of 'last' begins to gather 'first' on the ranks that ran 'extra' in between, too.
TEST(Unused, LetsRanksLeaveOutAUnitBetweenOthers) {
  const at::Tensor x = testing::uniform_values({4, 3}, 9);
  Filled<Detour> alone;
  (alone(x, true).sum() + 2 * alone(x, false).sum()).div(3).backward();
  RunOnMesh({3}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Filled<Detour> model;
    fully_shard(*model.first, mesh);
    fully_shard(*model.extra, mesh, {.may_be_unused = true});
    fully_shard(*model.last, mesh);
    fully_shard(model, mesh);
    model(x, rank.rank() == 1).sum().backward();
    testing::expect_gradients(model, testing::gradients_of(alone));
  });
}

/// A step in which the units are freed between a forward and its backward.
struct FreedBetween {
  const char* name;
  std::function<void(Detour& model, const at::Tensor& x, bool use_extra)> step;
};

at::Tensor detour_loss(Detour& model, const at::Tensor& x, bool use_extra) {
  return model(x, use_extra).square().mean();
}

void forward_without_gradients(Detour& model, const at::Tensor& x, bool use_extra) {
  const at::Tensor loss = detour_loss(model, x, use_extra);
  {
    const c10::NoGradGuard no_grad;
    model(x, use_extra);
  }
  loss.backward();
}

void backward_twice(Detour& model, const at::Tensor& x, bool use_extra) {
  const at::Tensor loss = detour_loss(model, x, use_extra);
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
}

void gradient_penalty(Detour& model, const at::Tensor& x, bool use_extra) {
  const at::Tensor input = x.clone().requires_grad_();
  const at::Tensor loss = detour_loss(model, input, use_extra);
  const auto gradients = torch::autograd::grad({loss}, {input}, {}, /*retain_graph=*/true,
                                               /*create_graph=*/true);
  (loss + gradients[0].square().sum()).backward();
}

void two_forwards(Detour& model, const at::Tensor& x, bool use_extra) {
  const at::Tensor first = detour_loss(model, x, use_extra);
  const at::Tensor second = detour_loss(model, 2 * x, !use_extra);
  first.backward();
  second.backward();
}

void freed_by_hand(Detour& model, const at::Tensor& x, bool use_extra) {
  const at::Tensor loss = detour_loss(model, x, use_extra);
  if (is_fully_sharded(*model.extra)) {
    reshard(*model.extra);
  }
  loss.backward();
}

class UnusedAndFreed : public ::testing::TestWithParam<FreedBetween> {};

TEST_P(UnusedAndFreed, IsGatheredByAllRanksInBackward) {
  const at::Tensor x = testing::uniform_values({4, 3}, 9);
  Filled<Detour> alone;
  GetParam().step(alone, x, true);
  GetParam().step(alone, x, false);
  for (const bool reshards : {true, false}) {
    RunOnMesh({2}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
      Filled<Detour> model;
      fully_shard(*model.first, mesh);
      fully_shard(*model.extra, mesh, {.reshard_after_forward = reshards, .may_be_unused = true});
      fully_shard(model, mesh);
      GetParam().step(model, x, rank.rank() == 1);
      testing::expect_gradients(model, testing::gradients_of(alone), 0.5);
      EXPECT_FALSE(model.extra->slot("weight")->gathered());
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Steps, UnusedAndFreed,
                         ::testing::Values(FreedBetween{"ForwardWithoutGradients",
                                                        forward_without_gradients},
                                           FreedBetween{"BackwardTwice", backward_twice},
                                           FreedBetween{"GradientPenalty", gradient_penalty},
                                           FreedBetween{"TwoForwards", two_forwards},
                                           FreedBetween{"ByHand", freed_by_hand}),
                         [](const auto& info) { return std::string(info.param.name); });

// It would be followed already.
TEST(Unused, IsNoAdviceForAUnitThatIsMarked) {
  Settings settings;
  settings.may_be_unused =
      std::make_shared<const std::vector<std::string>>(std::vector<std::string>{"unit 'extra'"});
  EXPECT_EQ(settings.hint_of_unused_units("rank 0 calls all_gather for unit 'extra'"), "");
  EXPECT_CONTAINS(settings.hint_of_unused_units("rank 0 calls all_gather for unit 'extra2'"),
                  "needs Options::may_be_unused");
}

TEST(Unused, FreesAUnitThatMayBeUnusedAfterAForwardWithoutGradients) {
  RunOnMesh({2}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    Filled<Optional> model;
    fully_shard(*model.extra, mesh, {.may_be_unused = true});
    fully_shard(model, mesh);
    const c10::AutoGradMode no_grad(false);
    model(testing::uniform_values({4, 3}, 9), rank.rank() == 0);
    EXPECT_TRUE(tessera::is_distributed(model.extra->weight));
  });
}

// Not marked: the ranks' collectives differ, which must show at once and by name.
std::vector<std::string> errors_of_unmarked() {
  return ErrorsOfRanks(4, [](Rank& rank) {
    Filled<Optional> model;
    const DeviceMesh mesh = rank.mesh({4}, {"dp"});
    fully_shard(*model.base, mesh);
    fully_shard(*model.extra, mesh);
    fully_shard(model, mesh);
    model(testing::uniform_values({4, 3}, 9), rank.rank() != 2).sum().backward();
  });
}

TEST(Unused, NamesAnUnmarkedUnitThatOneRankLeavesOut) {
  // Backward of rank 2 begins with 'base', which is as large as the 'extra' that the others gather.
  EXPECT_CONTAINS(errors_of_unmarked(), "unit 'extra'");
}

TEST(Unused, TellsWhatToDoAboutAnUnmarkedUnit) {
  const std::vector<std::string> errors = errors_of_unmarked();
  EXPECT_TRUE(std::ranges::any_of(errors, [](const std::string& error) {
    return bool(testing::Contains(error, {"may_be_unused", "rank 2 calls"}));
  })) << errors[0];
}

TEST(Unused, EndsWithinTheTimeOutWhereARankCallsNothing) {
  const RanksOptions options{.world = {.timeout = std::chrono::seconds(2)}};
  const std::vector<std::string> errors = ErrorsOfRanks(
      2,
      [](Rank& rank) {
        Filled<Optional> model;
        const DeviceMesh mesh = rank.mesh({2}, {"dp"});
        fully_shard(*model.extra, mesh);
        fully_shard(model, mesh);
        const c10::AutoGradMode no_grad(false);
        model(testing::uniform_values({4, 3}, 9), rank.rank() == 0);
      },
      options);
  EXPECT_CONTAINS(errors[0], "unit 'extra'");
  EXPECT_EQ(errors[1], "");
}

// Rows that divide are reduced from where autograd put them, or from zeros.
TEST(Unused, LosesNothingWhereRanksDisagreeOnGradients) {
  const at::Tensor x = testing::uniform_values({4, 4}, 2);
  RunRanks(2, [&](Rank& rank) {
    Branches model(4, 4), alone(4, 4);
    testing::fill(model);
    testing::fill(alone);
    fully_shard(model, rank.mesh({2}, {"dp"}));
    model(x, rank.rank() == 0).sum().backward();
    alone(x, true).sum().backward();
    for (const auto& layer : {model.left, model.right}) {
      EXPECT_TRUE(full_tensor(layer->slot("weight")->persistent().grad())
                      .allclose(alone.left->weight->grad().div(2)));
    }
  });
}

/// Which of the branches' weights have a gradient after the calls of `go_left`, one backward each.
std::string used_branches(Rank& rank, const DeviceMesh& mesh, const std::vector<bool>& go_left) {
  Filled<Branches> model;
  fully_shard(model, mesh);
  for (std::size_t i = 0; i < go_left.size(); ++i) {
    set_requires_gradient_sync(model, i + 1 == go_left.size());
    model(testing::uniform_values({4, 3}, rank.rank()), go_left[i]).sum().backward();
  }
  std::string used;
  if (model.left->slot("weight")->persistent().grad().defined()) {
    used += "left ";
  }
  if (model.right->slot("weight")->persistent().grad().defined()) {
    used += "right ";
  }
  return used;
}

TEST(Unused, LeavesAParameterThatNoRankUsedWithoutGradient) {
  for (const bool shared_memory : {true, false}) {
    const testing::SharedMemory setting(shared_memory);
    RunRanks(4, [](Rank& rank) {
      const bool first = rank.rank() == 0;
      for (const DeviceMesh& mesh :
           {rank.mesh({4}, {"dp"}), rank.mesh({2, 2}, {"replicas", "dp"})}) {
        EXPECT_EQ(used_branches(rank, mesh, {true}), "left ");
        EXPECT_EQ(used_branches(rank, mesh, {!first}), "left right ");
        EXPECT_EQ(used_branches(rank, mesh, {false, false}), "right ");
        EXPECT_EQ(used_branches(rank, mesh, {first, false}), "left right ");
      }
    });
  }
  RunRanks(1, [](Rank& rank) {
    EXPECT_EQ(used_branches(rank, rank.mesh({1}, {"dp"}), {true}), "left ");
  });
}

TEST(Unused, KeepsTheGradientOfAnEarlierBackward) {
  RunRanks(2, [](Rank& rank) {
    Branches model, alone;
    testing::fill(model);
    testing::fill(alone);
    fully_shard(model, rank.mesh({2}, {"dp"}));
    const at::Tensor x = testing::uniform_values({4, 3}, 9);
    for (const bool left : {true, false}) {
      model(x, left).sum().backward();
      alone(x, left).sum().backward();
    }
    testing::expect_gradients(model, testing::gradients_of(alone));
  });
}

// Momentum and decay apply to a parameter with a gradient of zeros, not to one without a gradient.
TEST(Unused, UpdatesNothingThatNoRankUsed) {
  const auto train = [](Branches& model) {
    optim::AdamW optimizer(model, {.lr = 0.1, .weight_decay = 0.5});
    for (const bool left : {true, false, true}) {
      optimizer.zero_grad();
      model(testing::uniform_values({4, 3}, 9), left).pow(2).sum().backward();
      optimizer.step();
    }
  };
  RunRanks(3, [&](Rank& rank) {
    Branches model, alone;
    testing::fill(model);
    testing::fill(alone);
    fully_shard(model, rank.mesh({3}, {"dp"}));
    train(model);
    train(alone);
    const auto expected = alone.named_slots();
    const auto trained = model.named_slots();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(full_tensor(trained[i].second->persistent())
                      .allclose(expected[i].second->get(), /*rtol=*/1e-5, /*atol=*/1e-6))
          << expected[i].first;
    }
  });
}

/// In evaluation no unit is reduced: one that is as large as another could be taken for it.
TEST(Unused, ShowsWhereTheCommunicatorDoesNotCompareCalls) {
  const testing::SharedMemory without_shared_memory(false);
  const std::vector<std::string> errors = ErrorsOfRanks(3, [](Rank& rank) {
    Filled<Branches> model(3, 3);
    const DeviceMesh mesh = rank.mesh({3}, {"dp"});
    fully_shard(*model.left, mesh);
    fully_shard(*model.right, mesh);
    fully_shard(model, mesh);
    const c10::AutoGradMode no_grad(false);
    model(testing::uniform_values({4, 3}, 9), rank.rank() != 1);
  });
  EXPECT_CONTAINS(errors, "unit 'left'", "unit 'right'");
}

}  // namespace
}  // namespace tessera::fsdp
