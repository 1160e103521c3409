// Optimizers on distributed parameters against the same on plain ones.

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::values;

std::vector<at::Tensor> parameters(const DeviceMesh* mesh) {
  std::vector<at::Tensor> result;
  const std::vector<Placements> placements{
      {Shard{0}, Shard{0}}, {Replicate{}, Shard{1}}, {Shard{0}, Replicate{}}};
  for (int i = 0; i < 3; ++i) {
    auto value = values({7, 5}, i);
    if (mesh != nullptr) {
      value = distribute_tensor(value, *mesh, placements[static_cast<std::size_t>(i)])
                  .tensor()
                  .detach();
    }
    result.push_back(value.requires_grad_());
  }
  return result;
}

at::Tensor loss(const std::vector<at::Tensor>& p) {
  return (p[0] * p[1]).pow(2).sum() + (p[2] * p[2] * p[2]).sum();
}

template <class Optimizer, class Options>
std::vector<at::Tensor> train(const DeviceMesh* mesh, const Options& options) {
  auto p = parameters(mesh);
  Optimizer optimizer(p, options);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    loss(p).backward();
    optimizer.step();
  }
  return p;
}

/// `train` gives the same parameters on a mesh as without one.
void expect_same(const std::function<std::vector<at::Tensor>(const DeviceMesh*)>& train) {
  const auto expected = train(nullptr);
  RunOnMesh({2, 2}, {"a", "b"}, [&](const DeviceMesh& mesh) {
    const auto found = train(&mesh);
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::allclose(testing::full_tensor(found[i]), expected[i])) << i;
    }
  });
}

TEST(Optimizer, LibtorchsAdamWRuns) {
  expect_same([](const DeviceMesh* mesh) {
    return train<torch::optim::AdamW>(mesh, torch::optim::AdamWOptions(0.1).weight_decay(0.1));
  });
}

TEST(Optimizer, LibtorchsSgdWithMomentumRuns) {
  expect_same([](const DeviceMesh* mesh) {
    return train<torch::optim::SGD>(mesh, torch::optim::SGDOptions(0.1).momentum(0.9));
  });
}

std::vector<at::Tensor> fused_step(const DeviceMesh* mesh) {
  auto p = parameters(mesh);
  loss(p).backward();
  std::vector<at::Tensor> gradients, averages, squares, counts;
  at::NoGradGuard no_grad;
  for (auto& parameter : p) {
    gradients.push_back(parameter.grad());
    averages.push_back(at::zeros_like(parameter));
    squares.push_back(at::zeros_like(parameter));
    counts.push_back(at::ones({}, at::kFloat));
  }
  at::_fused_adamw_(p, gradients, averages, squares, {}, counts, 0.1, 0.9, 0.95, 0.1, 1e-8, false,
                    false);
  return p;
}

TEST(Optimizer, FusedAdamWRunsOnLists) {
  expect_same(&fused_step);
}

TEST(Optimizer, ForeachOperatorsOnMatchingListsMoveNothing) {
  RunOnMesh({2, 2}, {"a", "b"}, [](const DeviceMesh& mesh) {
    const auto p = parameters(&mesh), expected = parameters(nullptr);
    at::NoGradGuard no_grad;
    {
      StrictScope strict;
      at::_foreach_add_(p, p, 0.1);
      at::_foreach_mul_(p, 0.9);
    }
    for (std::size_t i = 0; i < p.size(); ++i) {
      EXPECT_TRUE(at::allclose(testing::full_tensor(p[i]), expected[i].mul(1.1 * 0.9))) << i;
    }
  });
}

}  // namespace
}  // namespace tessera
