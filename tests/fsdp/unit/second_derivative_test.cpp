// Backward through gradients (create_graph), as a gradient penalty does.
#include <torch/csrc/autograd/autograd.h>

#include "fsdp/training/training.h"

namespace tessera::fsdp {
namespace {

/// The loss and the squared norm of its gradient with respect to the input.
void penalised_backward(SmallModel& model) {
  const at::Tensor x = testing::uniform_values({3, kDim}, 5).requires_grad_();
  const at::Tensor loss = model(x).square().sum();
  const auto gradient = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true,
                                              /*create_graph=*/true);
  (loss + gradient[0].square().sum()).backward();
}

struct Splitting {
  const char* name;
  std::vector<std::int64_t> sizes;
  std::vector<std::string> names;
  Options options{};
};

class SecondDerivative : public ::testing::TestWithParam<Splitting> {};

TEST_P(SecondDerivative, ReadsParametersThatWereFreed) {
  const Splitting& split = GetParam();
  Filled<SmallModel> alone(kDim, testing::kHidden, testing::kClasses);
  penalised_backward(alone);
  const std::vector<at::Tensor> expected = testing::gradients_of(alone);
  RunRanks(static_cast<int>(c10::multiply_integers(split.sizes)), [&](Rank& rank) {
    ShardedModel model(rank.mesh(split.sizes, split.names), split.options);
    penalised_backward(model);
    testing::expect_gradients(model, expected);
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_TRUE(tessera::is_distributed(slot->get())) << name;
    }
    penalised_backward(model);
    testing::expect_gradients(model, expected, 2);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Splits, SecondDerivative,
    ::testing::Values(Splitting{"one rank", {1}, {"dp"}}, Splitting{"ZeRO-3", {3}, {"dp"}},
                      Splitting{"ZeRO-2", {2}, {"dp"}, {.reshard_after_forward = false}},
                      Splitting{"HSDP", {2, 2}, {"replicate", "shard"}},
                      Splitting{"hpZ", {4}, {"dp"}, {.post_forward_mesh_size = 2}},
                      Splitting{"may be unused", {2}, {"dp"}, {.may_be_unused = true}}),
    [](const auto& info) { return "Splitting" + std::to_string(info.index); });

}  // namespace
}  // namespace tessera::fsdp
