// Tests activation checkpointing: the choice of modules, checkpoint(), and the recomputation.

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <stdexcept>

#include "nn/graphs.h"
#include "tessera/comm/trace.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/functional.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "testing/memory.h"
#include "testing/module_values.h"

namespace tessera::nn {
namespace {

using testing::Counted;
using testing::leaf;

struct Block : Module<Block> {
  at::Tensor forward(const at::Tensor& x) { return x + (*dropout)(at::gelu((*linear)(x))); }
  Child<Linear> linear{*this, "linear", 6, 6};
  Child<Dropout> dropout{*this, "dropout", 0.3};
};

struct Stack : Module<Stack> {
  explicit Stack(int depth) {
    auto list = register_module("layers", std::make_shared<ModuleList>());
    for (int i = 0; i < depth; ++i) {
      layers.push_back(list->push_back(std::make_shared<Block>()));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers) {
      x = (*layer)(x);
    }
    return x;
  }
  std::vector<std::shared_ptr<Block>> layers;
};

std::shared_ptr<Stack> stack(int depth) {
  auto made = std::make_shared<Stack>(depth);
  init_weights(*made, 7);
  return made;
}

std::vector<at::Tensor> gradients(Stack& model) {
  model(leaf({4, 6}, 1)).square().sum().backward();
  return testing::gradients_of(model);
}

TEST(ActivationCheckpointing, DoesNotChangeGradients) {
  const auto plain = stack(3), checkpointed = stack(3);
  apply_activation_checkpointing(*checkpointed, of_class<Block>());
  EXPECT_EACH(gradients(*checkpointed), gradients(*plain));
}

TEST(ActivationCheckpointing, SelectsModulesByPattern) {
  Counted counted;
  const auto model = stack(5);
  const auto applied =
      apply_activation_checkpointing(*model, named("layers.[024]"), counted.options);
  EXPECT_EQ(applied, (std::vector<std::string>{"layers.0", "layers.2", "layers.4"}));
  gradients(*model);
  EXPECT_EQ(counted->regions, 3);
  EXPECT_EQ(counted->recomputations, 3);
}

/// Calls one block twice. The block has two names in the module tree.
struct Twice : Module<Twice> {
  Twice() { register_module("second", block); }
  at::Tensor forward(const at::Tensor& x) { return (*block)((*block)(x)); }
  std::shared_ptr<Block> block = register_module("first", std::make_shared<Block>());
};

TEST(ActivationCheckpointing, FindsASharedModuleByAnyName) {
  for (const std::string name : {"first", "second"}) {
    Twice model;
    EXPECT_EQ(apply_activation_checkpointing(model, named(name)), std::vector<std::string>{name});
  }
}

TEST(ActivationCheckpointing, SkipsCheckpointedModules) {
  Counted counted;
  const auto model = stack(3);
  apply_activation_checkpointing(*model, of_class<Block>(), counted.options);
  EXPECT_TRUE(apply_activation_checkpointing(*model, of_class<Block>()).empty());
  gradients(*model);
  EXPECT_EQ(counted->regions, 3);
}

TEST(ActivationCheckpointing, RefusesInvalidCalls) {
  const auto model = stack(1);
  EXPECT_ERROR(apply_activation_checkpointing(*model, named("blocks.*")), "selects no module");
  {
    const auto model = stack(1);
    EXPECT_ERROR(apply_activation_checkpointing(*model, of_class<ModuleList>()), "no forward");
    model->layers[0]->checkpoint_calls({});
    EXPECT_ERROR(model->layers[0]->checkpoint_calls({}), "already");
  }
}

TEST(ActivationCheckpointing, RepeatsOnlyHooksAddedBefore) {
  int inner = 0, open = 0, outer = 0;
  const auto model = stack(1);
  Block& block = *model->layers[0];
  block.add_forward_pre_hook([&](ModuleBase&, TensorList) { ++inner; });
  block.add_forward_pre_hook([&](ModuleBase&, TensorList) { ++open; });
  block.add_always_hook([&] { --open; });
  block.checkpoint_calls({});
  block.add_forward_pre_hook([&](ModuleBase&, TensorList) { ++outer; });
  block.add_always_hook([&] { outer += 10; });
  gradients(*model);
  EXPECT_EQ(inner, 2);
  EXPECT_EQ(open, 0) << "a recomputation that stops early runs them too";
  EXPECT_EQ(outer, 11);
}

TEST(ActivationCheckpointing, KeepsTheModuleAliveUntilBackward) {
  auto model = stack(1);
  apply_activation_checkpointing(*model, of_class<Block>());
  const at::Tensor x = leaf({4, 6}, 1);
  const at::Tensor loss = (*model)(x).sum();
  const std::weak_ptr<Block> block = model->layers[0];
  model.reset();
  loss.backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_TRUE(block.expired());
}

using testing::message_of;

at::Tensor layer(const at::Tensor& x, const at::Tensor& weight) {
  return at::gelu(x.mm(weight)).tanh();
}

template <class Run, class Other>
void expect_same_gradients(const Run& run, const Other& other) {
  const at::Tensor x = leaf({5, 7}, 1), weight = leaf({7, 7}, 2);
  const at::Tensor y = leaf({5, 7}, 1), other_weight = leaf({7, 7}, 2);
  run(x, weight).square().sum().backward();
  other(y, other_weight).square().sum().backward();
  EXPECT_EQUAL(x.grad(), y.grad());
  EXPECT_EQUAL(weight.grad(), other_weight.grad());
}

TEST(Checkpoint, SupportsCapturesAndAnyArguments) {
  const at::Tensor x = leaf({3}, 1), y = leaf({3}, 2), weight = leaf({3}, 3);
  const auto fn = [weight](std::pair<at::Tensor, int> a, std::optional<at::Tensor> b) {
    return std::vector<at::Tensor>{(a.first * weight).exp() * a.second, *b * weight};
  };
  const auto results = checkpoint(fn, std::pair(x, 3), std::optional(y));
  (results[0].sum() + results[1].sum()).backward();
  const at::Tensor e = (x * weight).exp() * 3;
  EXPECT_CLOSE(weight.grad(), e * x + y);
  EXPECT_CLOSE(y.grad(), weight);
}

TEST(Checkpoint, RecomputesOncePerBackward) {
  Counted counted;
  const at::Tensor x = leaf({4}, 1);
  checkpoint(
      counted.options, [](const at::Tensor& t) { return t.exp().sin() * t; }, x)
      .sum()
      .backward();
  EXPECT_EQ(counted->regions, 1);
  EXPECT_EQ(counted->recomputations, 1);
  EXPECT_EQ(counted->packed, 4);
}

TEST(Checkpoint, StopsAfterTheLastSavedTensor) {
  int ends = 0;
  const auto fn = [&](const at::Tensor& t) {
    const at::Tensor y = t.exp();
    ++ends;
    return y + 1;
  };
  checkpoint(fn, leaf({4}, 1)).sum().backward();
  EXPECT_EQ(ends, 1);
}

TEST(Checkpoint, SupportsARetainedGraph) {
  Counted counted;
  const at::Tensor x = leaf({4}, 1);
  const at::Tensor y = checkpoint(counted.options, [](const at::Tensor& t) { return t.exp(); }, x);
  const at::Tensor loss = y.sum();
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
  EXPECT_EQUAL(x.grad(), x.exp() * 2);
  EXPECT_EQ(counted->recomputations, 2);
}

TEST(Checkpoint, SupportsSecondDerivatives) {
  const at::Tensor x = leaf({4}, 1);
  const at::Tensor y = checkpoint([](const at::Tensor& t) { return t.sin() * t; }, x).sum();
  const at::Tensor first = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
  first.sum().backward();
  EXPECT_CLOSE(x.grad(), x.cos() * 2 - x * x.sin());
}

/// An autograd function whose backward unpacks the saved tensor twice.
struct AsksTwice : torch::autograd::Function<AsksTwice> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const at::Tensor once = context->get_saved_variables()[0];
    return {grads[0] * (once + context->get_saved_variables()[0])};
  }
};

TEST(Checkpoint, SupportsNodesThatUnpackTwice) {
  Counted counted;
  const at::Tensor x = leaf({4}, 1);
  const auto fn = [](const at::Tensor& t) { return AsksTwice::apply(t * 3); };
  checkpoint(counted.options, fn, x).sum().backward();
  EXPECT_CLOSE(x.grad(), x * 18);
  EXPECT_EQ(counted->recomputations, 2);
}

TEST(Checkpoint, MayBeNested) {
  Counted inner, outer;
  const auto fn = [&inner](const at::Tensor& a, const at::Tensor& b) {
    const at::Tensor y = checkpoint(inner.options, layer, a.cos(), b);
    return checkpoint(inner.options, layer, y, b).exp();
  };
  expect_same_gradients(
      [](const at::Tensor& x, const at::Tensor& w) { return layer(layer(x.cos(), w), w).exp(); },
      [&](const at::Tensor& x, const at::Tensor& w) {
        return checkpoint(outer.options, fn, x, w);
      });
  EXPECT_EQ(outer->recomputations, 1);
  EXPECT_EQ(inner->regions, 4);
  EXPECT_EQ(inner->recomputations, 2);
}

TEST(Checkpoint, DoesNothingWithoutGradients) {
  Counted counted;
  const c10::AutoGradMode no_grad(false);
  checkpoint(counted.options, layer, leaf({2, 3}, 1), leaf({3, 3}, 2));
  EXPECT_EQ(counted->regions, 0);
}

TEST(Checkpoint, SavesMemory) {
  const at::Tensor weight = leaf({32, 32}, 1);
  const auto kept = [&](bool checkpointed) {
    at::Tensor x = leaf({64, 32}, 2);
    const testing::AllocatedBytes bytes;
    const auto fn = [](const at::Tensor& a, const at::Tensor& w) { return layer(layer(a, w), w); };
    const at::Tensor y = checkpointed ? checkpoint(fn, x, weight) : fn(x, weight);
    return bytes.now();
  };
  // Without checkpointing, autograd saves the results of mm and tanh in both layers.
  const std::int64_t tensor = 64 * 32 * 4;
  EXPECT_EQ(kept(false), 4 * tensor);
  EXPECT_LT(kept(true), tensor + 512);
}

TEST(Checkpoint, FreesRecomputedTensorsDuringBackward) {
  const at::Tensor x = leaf({64, 32}, 2);
  const testing::AllocatedBytes bytes;
  checkpoint([](const at::Tensor& t) { return t.exp().sin().exp().sin(); }, x).sum().backward();
  EXPECT_LT(bytes.now(), 64 * 32 * 4 + 512);
}

TEST(Checkpoint, FreesTheFunctionWithTheGraph) {
  const auto token = std::make_shared<int>(0);
  const auto fn = [token](const at::Tensor& t) { return t.exp(); };
  checkpoint(fn, leaf({4}, 1)).sum().backward();
  EXPECT_EQ(token.use_count(), 2);
  { const at::Tensor dropped = checkpoint(fn, leaf({4}, 1)); }
  EXPECT_EQ(token.use_count(), 2);
  {
    const auto failing = [fn](const at::Tensor& t) {
      const at::Tensor y = fn(t);
      if (y.defined()) {
        throw std::runtime_error("in forward");
      }
      return y;
    };
    EXPECT_THROWN(std::runtime_error, checkpoint(failing, leaf({4}, 1)), "in forward");
  }
  EXPECT_EQ(token.use_count(), 2);
}

TEST(Checkpoint, RethrowsErrorsOfTheRecomputationAndRecovers) {
  bool broken = false;
  const auto fn = [&](const at::Tensor& t) {
    const at::Tensor y = t.exp();
    if (broken) {
      throw std::runtime_error("no luck");
    }
    return y.sin();
  };
  const at::Tensor x = leaf({4}, 1);
  const at::Tensor loss = checkpoint(fn, x).sum();
  broken = true;
  EXPECT_EQ(message_of([&] { loss.backward({}, /*retain_graph=*/true); }), "no luck");
  EXPECT_FALSE(is_recomputing());
  broken = false;
  loss.backward();
  EXPECT_CLOSE(x.grad(), x.exp() * x.exp().cos());
}

TEST(CheckpointDeathTest, RefusesAProcessWithAnotherEngine) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  using torch::autograd::Engine;
  struct Other : Engine {
    ~Other() override { stop(); }
    static Engine& instance() {
      static Other engine;
      return engine;
    }
    Other() = default;
  };
  const auto run = [] {
    torch::autograd::set_default_engine_stub(&Other::instance);
    const auto fn = [](const at::Tensor& t) { return t.exp(); };
    std::cerr << message_of([&] { checkpoint(fn, leaf({4}, 1)); }) << std::endl;
    std::exit(0);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(0), "needs its own autograd engine");
}

/// Returns the gradient of x, then two random numbers that are drawn after backward.
template <class Run>
std::vector<at::Tensor> drawn(Run run) {
  at::manual_seed(5);
  const at::Tensor x = leaf({40}, 1);
  const at::Tensor y = run(x);
  at::rand({3});  // the recomputation must still draw the numbers of forward
  y.sum().backward();
  return {x.grad(), at::rand({2})};
}

TEST(CheckpointReplay, RepeatsRandomNumbers) {
  const auto fn = [](const at::Tensor& x) { return at::dropout(x.exp(), 0.5, true).square(); };
  EXPECT_EACH(drawn([&](const at::Tensor& x) { return checkpoint(fn, x); }), drawn(fn));
}

TEST(CheckpointReplay, CountsDropoutCallsOnceIfNested) {
  const auto run = [](bool checkpointed) {
    Dropout dropout(0.5);
    dropout.set_key({3, 4});
    const at::Tensor x = leaf({64}, 1);
    const auto half = [&](const at::Tensor& t) { return dropout(t.exp()).square(); };
    const auto whole = [&](const at::Tensor& t) {
      const at::Tensor y = dropout(dropout(t));
      return checkpointed ? checkpoint(half, y) : half(y);
    };
    const at::Tensor first = checkpointed ? checkpoint(whole, x) : whole(x);
    const at::Tensor second = checkpointed ? checkpoint(whole, x) : whole(x);
    (first.sum() + second.sum()).backward();
    return std::pair(x.grad(), dropout.calls());
  };
  EXPECT_EQUAL(run(true).first, run(false).first);
  EXPECT_EQ(run(true).second, 6u);
}

TEST(CheckpointReplay, RestoresTheBatchPart) {
  const auto fn = [](const at::Tensor& t) { return nn::dropout(t, 0.5, {1, 2}).square(); };
  const auto run = [&](bool checkpointed) {
    const at::Tensor x = leaf({64}, 1);
    const at::Tensor y = [&] {
      const BatchPart part(3, 4);
      return checkpointed ? checkpoint(fn, x) : fn(x);
    }();
    y.sum().backward();
    return x.grad();
  };
  EXPECT_EQUAL(run(true), run(false));
}

TEST(CheckpointReplay, RestoresAutocast) {
  const auto fn = [](const at::Tensor& x, const at::Tensor& w) { return x.mm(w).to(at::kFloat); };
  const auto run = [&](bool checkpointed) {
    const at::Tensor x = leaf({4, 4}, 1), w = leaf({4, 4}, 2);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const at::Tensor y = checkpointed ? checkpoint(fn, x, w) : fn(x, w);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    y.square().sum().backward();
    return x.grad();
  };
  EXPECT_EQUAL(run(true), run(false));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

std::string error_of_change(std::function<at::Tensor(const at::Tensor&)> forward,
                            std::function<at::Tensor(const at::Tensor&)> again) {
  const at::Tensor x = leaf({4}, 1);
  const auto fn = [&](const at::Tensor& t) { return is_recomputing() ? again(t) : forward(t); };
  return message_of([&] { checkpoint(fn, x).sum().backward(); });
}

TEST(CheckpointReplay, RefusesADifferentRecomputation) {
  const auto exp = [](auto& t) { return t.exp(); };
  const auto exp_sin = [](auto& t) { return t.exp().sin(); };
  EXPECT_CONTAINS(error_of_change(exp, [](auto& t) { return t[0].exp(); }), "saved tensor 0",
                  "Float[] on cpu", "Float[4] on cpu", "must do the same both times");
  EXPECT_CONTAINS(error_of_change(exp, [](auto& t) { return t.to(at::kDouble).exp(); }),
                  "Double[4]", "Float[4]");
  EXPECT_CONTAINS(error_of_change(exp_sin, exp), "saved 1 tensors", "saved 2");
  EXPECT_EQ(error_of_change(exp, exp_sin), "");
  const at::Tensor x = leaf({4}, 1) * 2;
  const at::Tensor loss = checkpoint([](const at::Tensor& t) { return t.exp(); }, x).sum();
  {
    const c10::AutoGradMode no_grad(false);
    x.add_(1);
  }
  EXPECT_THROWN(std::exception, loss.backward(), "modified by an inplace operation");
  {
    const auto fn = [](const at::Tensor& t) {
      const at::Tensor y = t.exp();
      y.add_(1);
      return y.sin();
    };
    const at::Tensor loss = checkpoint(fn, leaf({4}, 1)).sum();
    EXPECT_THROWN(std::exception, loss.backward(), "modified in place after it was saved");
  }
}

TEST_ON_MESH(CheckpointReplay, RepeatsRandomNumbersOnDistributedTensors, {3}, {"tp"}) {
  const auto fn = [](const at::Tensor& x) { return at::dropout(x.exp(), 0.5, true).square(); };
  const auto run = [&](bool checkpointed) {
    manual_seed(2);
    const at::Tensor x = testing::leaf_on(mesh, uniform_values({10, 3}, 1), {Shard{0}});
    const at::Tensor loss = (checkpointed ? checkpoint(fn, x) : fn(x)).sum();
    at::dropout(x.detach(), 0.5, true);  // the recomputation must still draw the forward's mask
    loss.backward();
    EXPECT_EQ(random_state().calls, 2u);
    return DistributedTensor(x.grad()).full_tensor();
  };
  EXPECT_EQUAL(run(true), run(false));
}

at::Tensor dense(const at::Tensor& x, const at::Tensor& weight) {
  return at::gelu(x.mm(weight)).tanh().mm(weight).sin();
}

Counted keeping(OperatorPolicy policy) {
  Counted counted;
  counted.options.policy = std::move(policy);
  return counted;
}

TEST(SelectiveCheckpoint, SavesSelectedResultsAndRecomputesTheRest) {
  const Counted counted = keeping(save_operators({"aten::mm"}));
  expect_same_gradients(dense, [&](const at::Tensor& x, const at::Tensor& w) {
    return checkpoint(counted.options, dense, x, w);
  });
  EXPECT_EQ(counted->kept_operators, 2);
  EXPECT_EQ(counted->replayed_operators, 2);
  EXPECT_EQ(counted->recomputed_operators, 2);
}

TEST(SelectiveCheckpoint, GivesThePolicyTheCallIndex) {
  std::vector<std::pair<std::string, std::size_t>> calls;
  const auto policy = [&](const OperatorCall& call) {
    calls.emplace_back(call.name, call.index);
    return call.name == "aten::mm" && call.index % 2 == 1;
  };
  const Counted counted = keeping(policy);
  checkpoint(counted.options, dense, leaf({5, 7}, 1), leaf({7, 7}, 2)).sum().backward();
  using Call = std::pair<std::string, std::size_t>;
  EXPECT_EQ(calls, (std::vector<Call>{{"aten::mm", 0},
                                      {"aten::gelu", 0},
                                      {"aten::tanh", 0},
                                      {"aten::mm", 1},
                                      {"aten::sin", 0}}));
  EXPECT_EQ(counted->replayed_operators, 1);
  EXPECT_EQ(counted->recomputed_operators, 3);
}

TEST(SelectiveCheckpoint, SavesResultsOfTesseraOperators) {
  const auto gated = [](const at::Tensor& x, const at::Tensor& weight) {
    const at::Tensor y = rms_norm(x, weight, 1e-5);
    return silu_mul(y, x).sin();
  };
  const Counted counted = keeping(save_operators({"tessera::rms_norm", "tessera::silu_mul"}));
  const at::Tensor x = leaf({5, 7}, 1), w = leaf({7}, 2);
  const at::Tensor y = leaf({5, 7}, 1), v = leaf({7}, 2);
  gated(x, w).sum().backward();
  checkpoint(counted.options, gated, y, v).sum().backward();
  EXPECT_EQUAL(x.grad(), y.grad());
  EXPECT_EQUAL(w.grad(), v.grad());
  EXPECT_EQ(counted->kept_operators, 2);
  EXPECT_EQ(counted->replayed_operators, 2);
  EXPECT_EQ(counted->recomputed_operators, 0);
}

// If an operator's result is saved, backward must not repeat the operator's collectives.
TEST_ON_MESH(SelectiveCheckpoint, SavesLossesOfASplitVocabulary, {2}, {"tp"}) {
  const at::Tensor targets =
      distribute_tensor(at::arange(5, at::kLong), mesh, {Replicate{}}).tensor();
  const auto loss = [&](const at::Tensor& logits) {
    return tessera::detail::cross_entropy(logits.mul(2), targets).sin();
  };
  const auto split = [&] { return testing::leaf_on(mesh, uniform_values({5, 7}, 1), {Shard{1}}); };
  const at::Tensor x = split(), y = split();
  loss(x).sum().backward();
  const Counted counted = keeping(save_operators({"tessera::cross_entropy"}));
  const Sent sent(rank);
  checkpoint(counted.options, loss, y).sum().backward();
  EXPECT_EQ(sent.calls(), 2);
  EXPECT_EQUAL(local_tensor(x.grad()), local_tensor(y.grad()));
  EXPECT_EQ(counted->kept_operators, 1);
  EXPECT_EQ(counted->replayed_operators, 1);
  EXPECT_EQ(counted->recomputed_operators, 1);
}

TEST(SelectiveCheckpoint, NeverSavesViewsWritesAndFactories) {
  std::vector<std::string> names;
  const auto policy = [&](const OperatorCall& call) {
    names.emplace_back(call.name);
    return true;
  };
  const auto fn = [](const at::Tensor& x) {
    const at::Tensor y = at::zeros({4}).add_(1).view({2, 2}).flatten();
    return x.exp().transpose(0, 0).mul(y);
  };
  const Counted counted = keeping(policy);
  checkpoint(counted.options, fn, leaf({4}, 1)).sum().backward();
  EXPECT_EQ(names, (std::vector<std::string>{"aten::exp", "aten::mul.Tensor"}));
}

TEST(SelectiveCheckpoint, SupportsARetainedGraph) {
  const Counted counted = keeping(save_matmuls_and_attention());
  const at::Tensor x = leaf({5, 7}, 1), w = leaf({7, 7}, 2);
  const at::Tensor loss = checkpoint(counted.options, dense, x, w).sum();
  loss.backward({}, /*retain_graph=*/true);
  const at::Tensor once = x.grad().clone();
  loss.backward();
  EXPECT_EQUAL(x.grad(), once + once);
  EXPECT_EQ(counted->replayed_operators, 4);
}

TEST(SelectiveCheckpoint, SavesNoUnneededResults) {
  const at::Tensor x = leaf({64, 32}, 1), w = leaf({32, 32}, 2);
  const auto bytes_kept = [&](OperatorPolicy policy) {
    const Counted counted = keeping(std::move(policy));
    const testing::AllocatedBytes bytes;
    const auto fn = [](const at::Tensor& a, const at::Tensor& b) { return a.mm(b).exp().mm(b); };
    const at::Tensor y = checkpoint(counted.options, fn, x, w);
    return bytes.now() - static_cast<std::int64_t>(y.nbytes());
  };
  const std::int64_t tensor = 64 * 32 * 4;
  const std::int64_t nothing = bytes_kept({});
  EXPECT_LT(nothing, 512);
  EXPECT_EQ(bytes_kept(save_operators({"aten::mm"})) - nothing, tensor);  // the result of mm
}

TEST(SelectiveCheckpoint, FreesSavedResultsDuringBackward) {
  const at::Tensor x = leaf({64, 32}, 1), w = leaf({32, 32}, 2);
  const Counted counted = keeping(save_operators({"aten::mm"}));
  const testing::AllocatedBytes bytes;
  checkpoint(counted.options, dense, x, w).sum().backward();
  EXPECT_LT(bytes.now(), 64 * 32 * 4 + 32 * 32 * 4 + 512);
}

TEST(SelectiveCheckpoint, SupportsNestedCheckpoints) {
  Counted inner;
  const Counted outer = keeping(save_operators({"aten::mm"}));
  const auto fn = [&](const at::Tensor& a, const at::Tensor& b) {
    return checkpoint(inner.options, dense, a.exp(), b).exp();
  };
  expect_same_gradients(
      [](const at::Tensor& x, const at::Tensor& w) { return dense(x.exp(), w).exp(); },
      [&](const at::Tensor& x, const at::Tensor& w) {
        return checkpoint(outer.options, fn, x, w);
      });
  EXPECT_EQ(outer->replayed_operators, 2);
  EXPECT_EQ(inner->recomputations, 1);
}

// PyTorch draws different numbers in the recomputation if a random operator's result was saved.
TEST(SelectiveCheckpoint, RepeatsRandomNumbersAfterASavedOperator) {
  const auto fn = [](const at::Tensor& x) {
    const at::Tensor y = std::get<0>(at::native_dropout(x.exp(), 0.5, true));
    return at::dropout(y.square(), 0.5, true).square();
  };
  const auto run = [&](const Counted* counted) {
    at::manual_seed(3);
    const at::Tensor x = leaf({50}, 1);
    (counted ? checkpoint(counted->options, fn, x) : fn(x)).sum().backward();
    return x.grad();
  };
  const Counted counted = keeping(save_operators({"aten::native_dropout"}));
  EXPECT_EQUAL(run(&counted), run(nullptr));
  EXPECT_EQ(counted->replayed_operators, 1);
  // at::dropout calls two operators for its mask: one allocates, one fills the mask in place.
  const Counted all = keeping([](const OperatorCall&) { return true; });
  EXPECT_EQUAL(run(&all), run(nullptr));
}

TEST(SelectiveCheckpoint, RefusesSavedResultsChangedInPlace) {
  const Counted counted = keeping(save_operators({"aten::mm"}));
  const auto fn = [](const at::Tensor& a, const at::Tensor& b) { return a.mm(b).add_(1).sin(); };
  const at::Tensor loss = checkpoint(counted.options, fn, leaf({2, 2}, 1), leaf({2, 2}, 2)).sum();
  EXPECT_EQ(message_of([&] { loss.backward(); }),
            "checkpoint: the result of aten::mm, call 0 in the checkpointed region, was saved and "
            "then modified in place; let the policy recompute that operator, or write to a copy");
  {
    // For a 3-D tensor, matmul calls mm and returns a view of the result of mm.
    const Counted counted = keeping(save_operators({"aten::mm"}));
    const auto fn = [](const at::Tensor& a, const at::Tensor& b) {
      return a.matmul(b).add_(1).sin();
    };
    const at::Tensor loss =
        checkpoint(counted.options, fn, leaf({2, 3, 2}, 1), leaf({2, 2}, 2)).sum();
    EXPECT_CONTAINS(
        message_of([&] { loss.backward(); }),
        "the result of aten::mm, call 0 in the checkpointed region, was saved and then modified");
  }
}

TEST_ON_MESH(SelectiveCheckpoint, SavesResultsOfDistributedTensors, {3}, {"dp"}) {
  const auto run = [&](const Counted* counted) {
    const at::Tensor x = testing::leaf_on(mesh, uniform_values({5, 7}, 1), {Shard{0}});
    const at::Tensor w = testing::leaf_on(mesh, uniform_values({7, 7}, 2), {Replicate{}});
    (counted ? checkpoint(counted->options, dense, x, w) : dense(x, w)).sum().backward();
    return std::vector{x.grad(), w.grad()};
  };
  const Counted counted = keeping(save_operators({"aten::mm"}));
  EXPECT_EACH(run(&counted), run(nullptr));
  EXPECT_EQ(counted->replayed_operators, 2);
  EXPECT_EQ(counted->recomputed_operators, 2);
}

}  // namespace
}  // namespace tessera::nn
