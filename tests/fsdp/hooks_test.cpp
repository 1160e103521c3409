// Tests hooks on parameter gradients, all-reduce hooks, autograd::grad, backward with the argument
// `inputs`, and second derivatives (create_graph).

#include <torch/csrc/autograd/autograd.h>

#include <iterator>

#include "fsdp/training/training.h"
#include "tessera/optim/adamw.h"

namespace tessera::fsdp::hooks {

void double_gradients(const nn::ModuleBase& model, int& calls) {
  for (const auto& [name, slot] : model.named_slots()) {
    slot->persistent().register_hook([&calls](const at::Tensor& gradient) {
      ++calls;
      return gradient * 2;
    });
  }
}

TESSERA_ARRANGED(ParameterHooks, "OneRank", "Zero3", "Uneven", "Hsdp", "Offloaded");

TEST_P(ParameterHooks, ChangeTheReducedGradient) {
  const Arrangement& c = GetParam();
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1});
  for (const bool before : {true, false}) {
    RunOnMesh(c.sizes, c.names, [&](Rank& rank, const DeviceMesh& mesh) {
      Filled<SmallModel> model(kDim, kHidden, kClasses);
      int calls = 0;
      if (before) {
        double_gradients(model, calls);
      }
      shard(model, mesh, c.options);
      if (!before) {
        double_gradients(model, calls);
      }
      local_loss(model, rank, 0).backward();
      local_loss(model, rank, 1).backward();
      EXPECT_EQ(calls, 2 * std::ssize(expected));
      expect_gradients(model, expected, 2);
    });
  }
}

TEST(ChangedLayout, IsRefusedInHooksGradientsAndShards) {
  const auto replicated = [](const at::Tensor& shard) {
    return DistributedTensor(shard).redistribute({Replicate{}}).tensor();
  };
  RunSharded(2, [](Rank& rank, ShardedModel& model) {
    model.head->slot("weight")->persistent().register_hook(
        [](const at::Tensor& gradient) { return DistributedTensor(gradient).full_tensor(); });
    EXPECT_ERROR(local_loss(model, rank).backward(), "hook", "'head.weight'", "plain");
  });
  RunSharded(2, [&](Rank& rank, ShardedModel& model) {
    const at::Tensor& weight = model.head->slot("weight")->persistent();
    weight.mutable_grad() = replicated(weight.detach());
    EXPECT_ERROR(local_loss(model, rank).backward(), "gradient", "'head.weight'", "redistribute");
  });
  RunSharded(2, [&](Rank& rank, ShardedModel& model) {
    at::Tensor weight = model.head->slot("weight")->persistent();
    const at::Tensor whole = replicated(weight.detach());
    EXPECT_ERROR(weight.set_data(whole), "set_data", "'head.weight'", "copy_");
    weight.requires_grad_(false);
    weight.set_data(whole);
    EXPECT_ERROR(local_loss(model, rank), "'head.weight'", "not laid out like its shard");
  });
}

/// Returns an optimizer for each parameter. In backward, the optimizer updates its parameter as
/// soon as the gradient is complete, and drops the gradient.
std::vector<std::unique_ptr<optim::Sgd>> step_in_backward(SmallModel& model, int& calls) {
  std::vector<std::unique_ptr<optim::Sgd>> optimizers;
  for (const auto& [name, slot] : model.named_slots()) {
    optim::Sgd& optimizer = *optimizers.emplace_back(
        std::make_unique<optim::Sgd>(std::vector{slot}, optim::SgdOptions{.lr = 0.1}));
    testing::after_accumulation(slot->persistent(), [&](const at::Tensor& parameter) {
      EXPECT_TRUE(tessera::is_distributed(parameter));
      EXPECT_TRUE(parameter.grad().defined());
      optimizer.step();
      optimizer.zero_grad();
      ++calls;
    });
  }
  return optimizers;
}

TESSERA_ARRANGED(OptimizerInBackward, "OneRank", "Zero3", "Zero2", "Hsdp", "Offloaded");

TEST_P(OptimizerInBackward, MatchesAStepAfterBackward) {
  const std::vector<at::Tensor> expected = fsdp::train_alone(3);
  RunArranged(GetParam(), [&](Rank& rank, ShardedModel& model) {
    int calls = 0;
    const auto optimizers = step_in_backward(model, calls);
    for (int step = 0; step < 3; ++step) {
      local_loss(model, rank, step).backward();
    }
    EXPECT_EACH(parameters_of(model), expected, 0, 1e-6);
    for (const at::Tensor& parameter : parameters_of(model)) {
      EXPECT_FALSE(parameter.grad().defined());
    }
    EXPECT_EQ(calls, 3 * std::ssize(expected));
  });
}

TEST_SHARDED(PostAccumulateHook, IsCalledOnlyForReducedGradients, 2) {
  int calls = 0;
  const auto optimizers = step_in_backward(model, calls);
  set_requires_gradient_sync(model, false);
  local_loss(model, rank, 0).backward();
  EXPECT_EQ(calls, 0);
  set_requires_gradient_sync(model, true);
  local_loss(model, rank, 1).backward();
  EXPECT_EQ(calls, static_cast<int>(model.named_slots().size()));
}

struct Repeated : nn::Module<Repeated> {
  at::Tensor forward(at::Tensor x, int calls) {
    for (int i = 0; i < calls; ++i) {
      x = at::tanh((*inner)(x));
    }
    return x.square().sum();
  }
  nn::Child<nn::Linear> inner{*this, "inner", 5, 5};
};

TEST(RepeatedUnit, CallsAHookOnceAndReducesOnce) {
  const auto run = [](int ranks, int calls, bool input_needs_gradient) {
    const at::Tensor x = uniform_values({6, 5}, 3).requires_grad_(input_needs_gradient);
    Filled<Repeated> alone;
    const auto normalize = [](const at::Tensor& g) { return g / g.norm(); };
    alone.inner->weight.slot()->get().register_hook(normalize);
    for (int i = 0; i < 2; ++i) {
      alone(x, calls).backward();
    }
    RunOnMesh({ranks}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
      Filled<Repeated> model;
      shard_units({&*model.inner, &model}, mesh);
      int hooks = 0;
      model.inner->weight.slot()->persistent().register_hook([&](const at::Tensor& g) {
        ++hooks;
        return g / DistributedTensor(g).full_tensor().norm();
      });
      const Sent sent(rank);
      for (int i = 0; i < 2; ++i) {
        const at::Tensor loss = model(x.detach().requires_grad_(input_needs_gradient), calls);
        loss.backward(/*gradient=*/{}, /*retain_graph=*/i == 1);
      }
      EXPECT_EQ(hooks, 2);
      EXPECT_EQ(sent.calls("dp", "reduce_scatter"), ranks == 1 ? 0 : 2);
      EXPECT_TRUE(full_grad(*model.inner).allclose(alone.inner->weight->grad(), 1e-4, 1e-5));
    });
  };
  for (const int ranks : {1, 2, 4}) {
    for (const int calls : {1, 2, 3}) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << calls << " calls");
      run(ranks, calls, false);
      run(ranks, calls, true);
    }
  }
}

TEST(RepeatedUnit, ReducesAtTheEndIfOneCallGetsNoGradient) {
  const at::Tensor x = uniform_values({6, 5}, 3);
  Filled<Repeated> alone;
  (*alone.inner)(x).sum().backward();
  RunOnMesh({2}, {"dp"}, [&](const DeviceMesh& mesh) {
    Filled<Repeated> model;
    shard_units({&*model.inner, &model}, mesh);
    const at::Tensor unused = model(x, 2);
    (*model.inner)(x).sum().backward();
    EXPECT_TRUE(full_grad(*model.inner).allclose(alone.inner->weight->grad(), 1e-4, 1e-5));
  });
}

TEST(AllReduceHook, SeesReducedGradientsBeforeDivision) {
  const std::vector<at::Tensor> expected = gradients_alone();
  for (const int ranks : {1, 3}) {
    RunSharded(ranks, [&](Rank& rank, ShardedModel& model) {
      set_all_reduce_hook(model, [](const at::Tensor& gradients) { gradients.mul_(3); });
      local_loss(model, rank).backward();
      expect_gradients(model, expected, 3);
    });
  }
}

TEST_ON_RANKS(AllReduceHook, RunsAfterTheReplicasAreSummed, 4) {
  Filled<nn::Linear> linear(3, 4, {.bias = false});
  fully_shard(linear, rank.mesh({2, 2}, {"replicate", "shard"}));
  double seen = 0;
  set_all_reduce_hook(linear,
                      [&](const at::Tensor& gradients) { seen = gradients.max().item<double>(); });
  linear(uniform_values({1, 3}, 0).mul(0).add(1)).sum().backward();
  EXPECT_EQ(seen, 4.0);
}

using torch::autograd::grad;
using Tensors = std::vector<at::Tensor>;

std::string defined_gradients(const Tensors& parameters) {
  std::string text;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    text += parameters[i].grad().defined() ? std::to_string(i) + " " : "";
  }
  return text;
}

TESSERA_ARRANGED(RequestedGradients, "OneRank", "Zero3", "Hsdp", "Zero2", "Offloaded",
                 "EmptyShards");

TEST_P(RequestedGradients, EqualTheGradientsOfOneRank) {
  const Tensors first = gradients_alone({}, {0}), second = gradients_alone({}, {1});
  RunArranged(GetParam(), [&](Rank& rank, ShardedModel& model) {
    const Tensors parameters = parameters_of(model);
    for (int step = 0; step < 2; ++step) {
      EXPECT_EACH(grad({local_loss(model, rank, 0)}, parameters), first, 1e-4, 1e-6);
      EXPECT_EQ(defined_gradients(parameters), "");
      local_loss(model, rank, 1).backward();
      EXPECT_EACH(grad({local_loss(model, rank, 0)}, parameters), first, 1e-4, 1e-6);
      expect_gradients(model, second);
      model.zero_grad();
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const std::size_t j = (i + 5) % parameters.size();
      EXPECT_EACH(grad({local_loss(model, rank, 0)}, {parameters[i], parameters[j]}),
                  {first[i], first[j]}, 1e-4, 1e-6);
      EXPECT_EQ(defined_gradients(parameters), "");
    }
    // backward() with `inputs` adds only to the gradients of the parameters in `inputs`.
    for (int i = 0; i < 2; ++i) {
      local_loss(model, rank, 0)
          .backward({}, std::nullopt, false, Tensors{parameters[1], parameters[6]});
    }
    EXPECT_EQ(defined_gradients(parameters), "1 6 ");
    EXPECT_EACH({parameters[1].grad(), parameters[6].grad()}, {first[1] * 2, first[6] * 2}, 1e-4,
                1e-6);
  });
}

TEST(RequestedGradient, IsComputedTogetherWithPlainLeaves) {
  Filled<SmallModel> alone(kDim, kHidden, kClasses);
  const at::Tensor x = batch(kDim, 0).requires_grad_();
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

TEST_ON_MESH(RequestedGradient, IsUndefinedForAPrefetchedUnitThatDidNotRun, {2}, {"dp"}) {
  Filled<OptionalLayer> model;
  fully_shard(*model.extra, mesh);
  fully_shard(model, mesh);
  set_forward_prefetch(model, {&*model.extra});
  const Tensors parameters = parameters_of(model);
  const auto loss = [&] { return model(at::ones({2, 3}), false).square().mean(); };
  const Tensors found = grad({loss()}, parameters, {}, std::nullopt, false, /*allow_unused=*/true);
  EXPECT_TRUE(found[0].defined() && found[1].defined());
  EXPECT_FALSE(found[2].defined() || found[3].defined());
  loss().backward({}, std::nullopt, false, parameters);
  EXPECT_TRUE(parameters[0].grad().defined());
  EXPECT_FALSE(parameters[2].grad().defined());
}

TEST_SHARDED(RequestedGradient, IsRefusedInUnsupportedCases, 2) {
  const Tensors parameters = parameters_of(model);
  EXPECT_ERROR(grad({local_loss(model, rank, 0)}, parameters, {}, true, /*create_graph=*/true),
               "'block0.up.weight'", "create_graph");
  set_requires_gradient_sync(model, false);
  EXPECT_ERROR(grad({local_loss(model, rank, 0)}, parameters), "set_requires_gradient_sync");
  set_requires_gradient_sync(model, true);
  const at::Tensor loss = local_loss(model, rank, 0);
  const at::Tensor doubled = loss * 2;
  EXPECT_ERROR(grad({doubled}, {parameters[0], loss}), "retain_graph");
  EXPECT_EACH(grad({doubled}, {parameters[0]}), {gradients_alone({}, {0})[0] * 2}, 1e-4, 1e-6);
}

TEST_SHARDED(RequestedGradient, OfAPenaltyOnShardsIsComputedByAutograd, 2) {
  const at::Tensor weight = model.head->slot("weight")->persistent();
  local_loss(model, rank, 0).backward();
  model.zero_grad();
  const at::Tensor penalty = weight.pow(3).sum();
  const Tensors first = grad({penalty}, {weight}, {}, true, /*create_graph=*/true);
  const Tensors second = grad({first[0].sum()}, {weight});
  EXPECT_TRUE(full_tensor(second[0]).allclose(full_tensor(weight).detach() * 6, 1e-4, 1e-6));
  weight.pow(2).sum().backward();
  EXPECT_TRUE(full_tensor(weight.grad()).allclose(full_tensor(weight).detach() * 2, 1e-4, 1e-6));
}

/// Runs backward of the loss plus a gradient penalty: the squared norm of d loss / d input.
void penalised_backward(SmallModel& model) {
  const at::Tensor x = uniform_values({3, kDim}, 5).requires_grad_();
  const at::Tensor loss = model(x).square().sum();
  const Tensors gradient = grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
  (loss + gradient[0].square().sum()).backward();
}

TESSERA_ARRANGED(SecondDerivative, "OneRank", "Zero3", "Zero2", "Hsdp", "Hpz");

TEST_P(SecondDerivative, IsCorrectAfterParametersAreFreed) {
  Filled<SmallModel> alone(kDim, kHidden, kClasses);
  penalised_backward(alone);
  const std::vector<at::Tensor> expected = gradients_of(alone);
  RunArranged(GetParam(), [&](Rank&, ShardedModel& model) {
    for (const int times : {1, 2}) {
      penalised_backward(model);
      expect_gradients(model, expected, times);
      expect_all_sharded(model);
    }
  });
}

}  // namespace tessera::fsdp::hooks
