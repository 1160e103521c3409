// autograd::grad and a backward with inputs, of parameters of units.
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "fsdp/training/training.h"
#include "tessera/nn/initialization.h"
#include "testing/module_values.h"

namespace tessera::fsdp {
namespace requested_gradients {

using torch::autograd::grad;
using Tensors = std::vector<at::Tensor>;

struct Layout {
  const char* name;
  std::vector<std::int64_t> sizes;
  Options options{};
};

Tensors parameters_of(const SmallModel& model) {
  Tensors tensors;
  for (const auto& [name, slot] : model.named_slots()) {
    tensors.push_back(slot->persistent());
  }
  return tensors;
}

void expect_equal(const Tensors& gradients, const Tensors& expected) {
  ASSERT_EQ(gradients.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(gradients[i].defined()) << i;
    EXPECT_TRUE(full_tensor(gradients[i]).allclose(expected[i], 1e-4, 1e-6)) << i;
  }
}

void expect_no_gradient(const SmallModel& model) {
  for (const at::Tensor& parameter : parameters_of(model)) {
    EXPECT_FALSE(parameter.grad().defined());
  }
}

class RequestedGradients : public ::testing::TestWithParam<Layout> {
 protected:
  /// Runs `body` on the ranks of the layout.
  static void on_layout(
      const std::function<void(Rank&, ShardedModel&, const Tensors& parameters)>& body) {
    const Layout& layout = GetParam();
    RunRanks(testing::ranks_of(layout.sizes), [&](Rank& rank) {
      const std::vector<std::string> names = layout.sizes.size() == 1
                                                 ? std::vector<std::string>{"dp"}
                                                 : std::vector<std::string>{"replicate", "shard"};
      ShardedModel model(rank.mesh(layout.sizes, names), layout.options);
      body(rank, model, parameters_of(model));
    });
  }
};

TEST_P(RequestedGradients, AreThoseOfOneRank) {
  const Tensors first = gradients_alone({}, {0});
  const Tensors second = gradients_alone({}, {1});
  on_layout([&](Rank& rank, ShardedModel& model, const Tensors& parameters) {
    for (int step = 0; step < 2; ++step) {
      expect_equal(grad({local_loss(model, rank, 0)}, parameters), first);
      expect_no_gradient(model);
      // A whole backward comes between, and what it leaves in `.grad` stays.
      local_loss(model, rank, 1).backward();
      expect_equal(grad({local_loss(model, rank, 0)}, parameters), first);
      expect_gradients(model, second);
      model.zero_grad();
    }
  });
}

TEST_P(RequestedGradients, ForSomeParametersLeaveTheOthersUnchanged) {
  const Tensors expected = gradients_alone({}, {0});
  on_layout([&](Rank& rank, ShardedModel& model, const Tensors& parameters) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const std::size_t j = (i + 5) % parameters.size();
      expect_equal(grad({local_loss(model, rank, 0)}, {parameters[i], parameters[j]}),
                   {expected[i], expected[j]});
      expect_no_gradient(model);
    }
  });
}

TEST_P(RequestedGradients, AreAddedByABackwardWithInputs) {
  const Tensors expected = gradients_alone({}, {0});
  on_layout([&](Rank& rank, ShardedModel& model, const Tensors& parameters) {
    const Tensors asked{parameters[1], parameters[6]};
    for (int i = 0; i < 2; ++i) {
      local_loss(model, rank, 0).backward({}, std::nullopt, false, asked);
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const bool is_asked = i == 1 || i == 6;
      ASSERT_EQ(parameters[i].grad().defined(), is_asked) << i;
      if (is_asked) {
        EXPECT_TRUE(full_tensor(parameters[i].grad()).allclose(expected[i] * 2, 1e-4, 1e-6));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, RequestedGradients,
    ::testing::Values(Layout{"OneRank", {1}}, Layout{"ThreeRanks", {3}}, Layout{"Hsdp", {2, 2}},
                      Layout{"Zero2", {2}, {.reshard_after_forward = false}},
                      Layout{"Offloaded", {2}, {.offload_policy = OffloadPolicy{}}},
                      Layout{"EmptyShards", {12}}),
    [](const auto& info) { return std::string(info.param.name); });

struct CountSteps final : torch::autograd::PostAccumulateGradHook {
  explicit CountSteps(int& count) : steps(count) {}
  void operator()(const torch::autograd::Variable&) override { ++steps; }
  int& steps;
};

/// Gradient surgery: two losses of one forward.
TEST(RequestedGradient, WorksForTwoLossesOfOneGraph) {
  Filled<SmallModel> alone(kDim, kHidden, kClasses);
  const auto losses_of = [](const at::Tensor& y) {
    return std::pair(y.square().mean(), y.sin().mean());
  };
  const at::Tensor x = testing::batch(kDim, 0);
  const auto [a, b] = losses_of(alone(x));
  const Tensors of_a = grad({a}, parameters_of(alone), {}, /*retain_graph=*/true);
  const Tensors of_b = grad({b}, parameters_of(alone));
  RunSharded(2, [&](Rank& rank, ShardedModel& model) {
    const auto [c, d] = losses_of(model(x.narrow(0, 6 * rank.rank(), 6)));
    expect_equal(grad({c}, parameters_of(model), {}, /*retain_graph=*/true), of_a);
    expect_equal(grad({d}, parameters_of(model)), of_b);
  });
}

TEST(RequestedGradient, WorksBesideThatOfAPlainLeaf) {
  Filled<SmallModel> alone(kDim, kHidden, kClasses);
  const at::Tensor x = testing::batch(kDim, 0).requires_grad_();
  const Tensors expected = grad({alone(x).square().sum()}, {x, *alone.head->weight});
  RunSharded(2, [&](Rank& rank, ShardedModel& model) {
    const at::Tensor rows = x.detach().narrow(0, 6 * rank.rank(), 6).clone().requires_grad_();
    rows.mutable_grad() = at::ones_like(rows);
    const Tensors found =
        grad({model(rows).square().sum()}, {rows, model.head->slot("weight")->persistent()});
    EXPECT_TRUE(found[0].allclose(expected[0].narrow(0, 6 * rank.rank(), 6), 1e-4, 1e-6));
    EXPECT_TRUE(rows.grad().equal(at::ones_like(rows)));
    EXPECT_TRUE(full_tensor(found[1]).mul(2).allclose(expected[1], 1e-4, 1e-6));
  });
}

TEST(RequestedGradient, CallsHooksAndNoOptimizerInBackward) {
  RunSharded(2, [](Rank& rank, ShardedModel& model) {
    const at::Tensor weight = model.head->slot("weight")->persistent();
    int hooks = 0;
    int steps = 0;
    weight.register_hook([&](const at::Tensor& gradient) {
      ++hooks;
      return gradient * 2;
    });
    torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<CountSteps>(steps));
    const Tensors once = grad({local_loss(model, rank, 0)}, {weight});
    EXPECT_EQ(hooks, 1);
    EXPECT_EQ(steps, 0);
    EXPECT_TRUE(full_tensor(once[0]).allclose(gradients_alone({}, {0}).at(12) * 2, 1e-4, 1e-6));
  });
}

TEST(RequestedGradient, WorksForAConvertedModelAndOneMadeWithoutValues) {
  const Tensors expected = gradients_alone({}, {0});
  SmallModel alone(kDim, kHidden, kClasses);
  nn::init_weights(alone, 3);
  const Tensors of_initial =
      grad({alone(testing::batch(kDim, 0)).square().mean()}, parameters_of(alone));
  RunSharded(2, [&](Rank& rank, ShardedModel& model) {
    local_loss(model, rank, 0).backward();
    model.zero_grad();
    model.to(at::kDouble);
    const at::Tensor x = testing::batch(kDim, 0).to(at::kDouble).narrow(0, 6 * rank.rank(), 6);
    const Tensors found = grad({model(x).square().mean()}, parameters_of(model));
    EXPECT_EQ(found[0].scalar_type(), at::kDouble);
    EXPECT_TRUE(full_tensor(found[0]).allclose(expected[0].to(at::kDouble), 1e-4, 1e-6));

    const auto empty = testing::made_on_meta<SmallModel>(kDim, kHidden, kClasses);
    shard(*empty, rank.mesh({2}, {"dp"}));
    nn::to_empty(*empty, at::kCPU);
    nn::init_weights(*empty, 3);
    expect_equal(grad({local_loss(*empty, rank, 0)}, parameters_of(*empty)), of_initial);
  });
}

/// Its second layer is gathered, and may not run.
struct MayStop : nn::Module<MayStop> {
  at::Tensor forward(const at::Tensor& x, bool stops) { return stops ? (*a)(x) : (*b)((*a)(x)); }

  nn::Child<nn::Linear> a{*this, "a", 3, 3}, b{*this, "b", 3, 3};
};

/// Which of `gradients` are defined: "1100".
std::string defined_of(const Tensors& gradients) {
  std::string text;
  for (const at::Tensor& gradient : gradients) {
    text += gradient.defined() ? "1" : "0";
  }
  return text;
}

TEST(RequestedGradient, MayBeOfAUnitThatWasGatheredAndDidNotRun) {
  for (const bool prefetched : {false, true}) {
    RunOnMesh({2}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
      Filled<MayStop> model;
      fully_shard(*model.b, mesh, {.may_be_unused = !prefetched});
      fully_shard(model, mesh);
      if (prefetched) {
        set_forward_prefetch(model, {&*model.b});
      }
      Tensors parameters;
      for (const auto& [name, slot] : model.named_slots()) {
        parameters.push_back(slot->persistent());
      }
      const auto loss = [&](bool stops) { return model(at::ones({2, 3}), stops).square().mean(); };
      EXPECT_EQ(defined_of(grad({loss(true)}, parameters, {}, std::nullopt, false, true)), "1100");
      loss(true).backward({}, std::nullopt, false, parameters);
      EXPECT_TRUE(parameters[0].grad().defined());
      EXPECT_FALSE(parameters[2].grad().defined());
      if (!prefetched) {
        EXPECT_EQ(defined_of(grad({loss(rank.rank() == 1)}, parameters, {}, std::nullopt, false,
                                  /*allow_unused=*/true)),
                  "1111");
      }
    });
  }
}

TEST(RequestedGradient, IsRefusedWhereItCannotBe) {
  RunSharded(2, [](Rank& rank, ShardedModel& model) {
    const Tensors parameters = parameters_of(model);
    EXPECT_ERROR(grad({local_loss(model, rank, 0)}, parameters, {}, true, /*create_graph=*/true),
                 "'block0.up.weight'", "create_graph");
    set_requires_gradient_sync(model, false);
    EXPECT_ERROR(grad({local_loss(model, rank, 0)}, parameters), "set_requires_gradient_sync");
    set_requires_gradient_sync(model, true);
    const at::Tensor loss = local_loss(model, rank, 0);
    const at::Tensor doubled = loss * 2;
    EXPECT_ERROR(grad({doubled}, {parameters[0], loss}), "result of operators");
    // Nothing was left behind.
    expect_equal(grad({doubled}, {parameters[0]}), {gradients_alone({}, {0})[0] * 2});
  });
}

TEST(RequestedGradient, APenaltyOnShardsIsLeftToAutograd) {
  RunSharded(2, [](Rank& rank, ShardedModel& model) {
    const at::Tensor weight = model.head->slot("weight")->persistent();
    local_loss(model, rank, 0).backward();
    model.zero_grad();
    const at::Tensor penalty = weight.pow(3).sum();
    const Tensors first = grad({penalty}, {weight}, {}, true, /*create_graph=*/true);
    const Tensors second = grad({first[0].sum()}, {weight});
    EXPECT_TRUE(full_tensor(second[0]).allclose(full_tensor(weight).detach() * 6, 1e-4, 1e-6));
    weight.pow(2).sum().backward();
    EXPECT_TRUE(full_tensor(weight.grad()).allclose(full_tensor(weight).detach() * 2, 1e-4, 1e-6));
  });
}

TEST(RequestedGradient, IsUndefinedForAParameterThatNoRankUses) {
  RunSharded(2, [](Rank&, ShardedModel& model) {
    const at::Tensor loss =
        (*model.blocks[0])(testing::batch(kDim, 0).narrow(0, 0, 3)).square().mean();
    const Tensors found = grad({loss},
                               {model.blocks[0]->up->slot("weight")->persistent(),
                                model.blocks[1]->up->slot("weight")->persistent()},
                               {}, false, false, /*allow_unused=*/true);
    EXPECT_TRUE(found[0].defined());
    EXPECT_FALSE(found[1].defined());
  });
}

}  // namespace requested_gradients
}  // namespace tessera::fsdp
