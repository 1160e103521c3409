// The example in tessera/optim/slot_optimizer.h: an optimizer of one's own.
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_sign.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "tessera/nn/linear.h"
#include "tessera/optim/slot_optimizer.h"

namespace tessera {
namespace {

struct SignSgdOptions {
  double lr = 1e-3;
};

class SignSgd final : public optim::GroupedOptimizer<SignSgdOptions> {
 public:
  SignSgd(const nn::ModuleBase& module, SignSgdOptions options)
      : GroupedOptimizer({{optim::slots_of(module), options}}, /*state_names=*/{},
                         /*counts_steps=*/false) {}

 private:
  void update_batch(const optim::Batch& batch, std::size_t group) override {
    at::_foreach_sign_(batch.gradients);
    at::_foreach_add_(batch.parameters, batch.gradients, -lr(group));
  }
};

TEST(OptimizerExample, StepsByTheSignOfTheGradient) {
  nn::Linear linear(2, 3);
  for (const auto& [name, slot] : linear.named_slots()) {
    slot->get().detach().zero_();
    slot->set_initialized(true);
    slot->get().mutable_grad() = at::full(slot->get().sizes(), -7.0);
  }
  SignSgd optimizer(linear, {.lr = 0.5});
  optimizer.step();
  EXPECT_TRUE(linear.weight->equal(at::full({3, 2}, 0.5)));
  EXPECT_TRUE(linear.bias->equal(at::full({3}, 0.5)));
}

}  // namespace
}  // namespace tessera
