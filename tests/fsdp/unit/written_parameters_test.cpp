// Parameters that are written between a forward and its backward: autograd refuses the backward on
// one rank, where it needs their old values.

#include "fsdp/training/training.h"
#include "tessera/optim/sgd.h"

namespace tessera::fsdp {
namespace {

using testing::Arrangement;

/// No rank has an empty shard: a write to one is not seen.
constexpr testing::Sizes kSizes{.classes = 7};
constexpr auto kModified = "modified by an inplace operation";

class WrittenParameters : public ::testing::TestWithParam<Arrangement> {};

TEST_P(WrittenParameters, AreRefusedInBackward) {
  const Arrangement& split = GetParam();
  RunRanks(static_cast<int>(c10::multiply_integers(split.sizes)), [&](Rank& rank) {
    testing::ShardedModel model(rank.mesh(split.sizes, split.names), split.options, kSizes);
    optim::Sgd optimizer(model, {.lr = 1.0});
    const at::Tensor x = testing::batch(kDim, 0).requires_grad_();
    const at::Tensor first = model(x).square().mean();
    model(x).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
    EXPECT_THROWN(std::exception, first.backward(), kModified);
  });
}

TEST_P(WrittenParameters, AreRefusedInBackwardIfWrittenThroughTheirTensor) {
  const Arrangement& split = GetParam();
  RunRanks(static_cast<int>(c10::multiply_integers(split.sizes)), [&](Rank& rank) {
    testing::ShardedModel model(rank.mesh(split.sizes, split.names), split.options, kSizes);
    const at::Tensor loss = local_loss(model, rank);
    {
      const c10::AutoGradMode no_grad(false);
      model.blocks[1]->up->slot("weight")->persistent().mul_(2);
    }
    EXPECT_THROWN(std::exception, loss.backward(), kModified);
  });
}

TEST_P(WrittenParameters, AreAcceptedIfBackwardNeedsNoValue) {
  const Arrangement& split = GetParam();
  const std::vector<at::Tensor> expected = gradients_alone(kSizes);
  RunRanks(static_cast<int>(c10::multiply_integers(split.sizes)), [&](Rank& rank) {
    testing::ShardedModel model(rank.mesh(split.sizes, split.names), split.options, kSizes);
    const at::Tensor loss = local_loss(model, rank);
    {
      const c10::AutoGradMode no_grad(false);
      model.blocks[1]->up->slot("bias")->persistent().mul_(2);
    }
    loss.backward();
    expect_gradients(model, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Splits, WrittenParameters,
    ::testing::Values(Arrangement{"one rank", {1}, {"dp"}}, Arrangement{"ZeRO-3", {3}, {"dp"}},
                      Arrangement{"ZeRO-2", {2}, {"dp"}, {.reshard_after_forward = false}},
                      Arrangement{"hpZ", {4}, {"dp"}, {.post_forward_mesh_size = 2}},
                      Arrangement{"HSDP", {2, 2}, {"replicate", "shard"}},
                      Arrangement{"offloaded", {2}, {"dp"}, {.offload_policy = OffloadPolicy{}}}),
    [](const auto& info) { return "Arrangement" + std::to_string(info.index); });

}  // namespace
}  // namespace tessera::fsdp
