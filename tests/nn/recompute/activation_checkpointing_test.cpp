#include "tessera/nn/activation_checkpointing.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "checkpointed.h"
#include "tessera/core/error.h"
#include "tessera/nn/child.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"
#include "testing/errors.h"

namespace tessera::nn {
namespace {

using testing::Counted;
using testing::leaf;

struct Block : Module<Block> {
  at::Tensor forward(const at::Tensor& x) { return x + (*dropout)(at::gelu((*linear)(x))); }
  Child<Linear> linear{*this, "linear", 6, 6};
  Child<Dropout> dropout{*this, "dropout", 0.3};
};

class Stack : public Module<Stack> {
 public:
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
  std::vector<at::Tensor> found;
  for (const auto& [name, slot] : model.named_slots()) {
    found.push_back(slot->get().grad());
  }
  return found;
}

TEST(ActivationCheckpointing, ChangesNoBitOfTheGradients) {
  const auto plain = stack(3), checkpointed = stack(3);
  apply_activation_checkpointing(*checkpointed, {.select = of_class<Block>()});
  const auto expected = gradients(*plain), found = gradients(*checkpointed);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::equal(expected[i], found[i]));
  }
}

TEST(ActivationCheckpointing, TakesEveryNthModule) {
  Counted counted;
  const auto model = stack(5);
  const auto applied = apply_activation_checkpointing(
      *model, {.select = named("layers.*"), .every = 2, .options = counted.options});
  EXPECT_EQ(applied, (std::vector<std::string>{"layers.0", "layers.2", "layers.4"}));
  gradients(*model);
  EXPECT_EQ(counted->regions, 3);
  EXPECT_EQ(counted->recomputations, 3);
}

/// One block under two names.
class Twice : public Module<Twice> {
 public:
  Twice() {
    block = register_module("first", std::make_shared<Block>());
    register_module("second", block);
  }
  at::Tensor forward(const at::Tensor& x) { return (*block)((*block)(x)); }
  std::shared_ptr<Block> block;
};

TEST(ActivationCheckpointing, FindsASharedModuleByEachOfItsNames) {
  for (const std::string name : {"first", "second"}) {
    Twice model;
    EXPECT_EQ(apply_activation_checkpointing(model, {.select = named(name)}),
              std::vector<std::string>{name});
  }
}

TEST(ActivationCheckpointing, LeavesModulesAloneThatAreCheckpointed) {
  Counted counted;
  const auto model = stack(3);
  const ActivationCheckpointing what{.select = of_class<Block>(), .options = counted.options};
  apply_activation_checkpointing(*model, what);
  EXPECT_TRUE(apply_activation_checkpointing(*model, what).empty());
  gradients(*model);
  EXPECT_EQ(counted->regions, 3);
}

TEST(ActivationCheckpointing, RefusesToSelectNothing) {
  const auto model = stack(1);
  EXPECT_ERROR(apply_activation_checkpointing(*model, {.select = named("blocks.*")}),
               "selects no module");
}

TEST(ActivationCheckpointing, RefusesAModuleThatHasNoForwardOrIsCheckpointed) {
  const auto model = stack(1);
  EXPECT_ERROR(apply_activation_checkpointing(*model, {.select = of_class<ModuleList>()}),
               "no forward");
  model->layers[0]->checkpoint_calls({});
  EXPECT_ERROR(model->layers[0]->checkpoint_calls({}), "already");
}

TEST(ActivationCheckpointing, RepeatsTheHooksThatWereThereAndNotThoseThatCameLater) {
  int inner = 0, outer = 0;
  const auto model = stack(1);
  Block& block = *model->layers[0];
  block.add_forward_pre_hook([&](ModuleBase&, TensorList) { ++inner; });
  block.checkpoint_calls({});
  block.add_forward_pre_hook([&](ModuleBase&, TensorList) { ++outer; });
  block.add_always_hook([&] { outer += 10; });
  gradients(*model);
  EXPECT_EQ(inner, 2);
  EXPECT_EQ(outer, 11);
}

TEST(ActivationCheckpointing, RunsTheAlwaysHooksOfARecomputationThatStopsEarly) {
  int depth = 0;
  const auto model = stack(1);
  Block& block = *model->layers[0];
  block.add_forward_pre_hook([&](ModuleBase&, TensorList) { ++depth; });
  block.add_always_hook([&] { --depth; });
  block.checkpoint_calls({});
  gradients(*model);
  EXPECT_EQ(depth, 0);
}

TEST(ActivationCheckpointing, KeepsTheModuleAliveUntilBackward) {
  auto model = stack(1);
  apply_activation_checkpointing(*model, {.select = of_class<Block>()});
  const at::Tensor x = leaf({4, 6}, 1);
  const at::Tensor loss = (*model)(x).sum();
  const std::weak_ptr<Block> block = model->layers[0];
  model.reset();
  loss.backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_TRUE(block.expired());
}

}  // namespace
}  // namespace tessera::nn
