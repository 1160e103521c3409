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

template <class Optimizer, class Options>
void expect_same_training(const Options& options) {
  const auto expected = train<Optimizer>(nullptr, options);
  RunOnMesh({2, 2}, {"a", "b"}, [&](const DeviceMesh& mesh) {
    const auto found = train<Optimizer>(&mesh, options);
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::allclose(DistributedTensor(found[i]).full_tensor().detach(), expected[i]));
    }
  });
}

TEST(Optimizer, LibtorchsAdamWRuns) {
  expect_same_training<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1).weight_decay(0.1));
}

TEST(Optimizer, LibtorchsSgdWithMomentumRuns) {
  expect_same_training<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
}

std::vector<at::Tensor> steps(const DeviceMesh* mesh, bool fused) {
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
  if (fused) {
    at::_fused_adamw_(p, gradients, averages, squares, {}, counts, 0.1, 0.9, 0.95, 0.1, 1e-8, false,
                      false);
    return p;
  }
  at::_foreach_mul_(p, 0.9);
  at::_foreach_add_(p, gradients, 0.1);
  at::_foreach_addcmul_(squares, gradients, gradients, 0.5);
  at::_foreach_sqrt_(squares);
  at::_foreach_lerp_(averages, gradients, 0.3);
  at::_foreach_addcdiv_(p, averages, at::_foreach_add(squares, 1), 1.0);
  return p;
}

void expect_same_step(bool fused) {
  const auto expected = steps(nullptr, fused);
  RunOnMesh({2, 2}, {"a", "b"}, [&](const DeviceMesh& mesh) {
    const auto found = steps(&mesh, fused);
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::allclose(DistributedTensor(found[i]).full_tensor().detach(), expected[i]));
    }
  });
}

TEST(Optimizer, ForeachOperatorsRunOnLists) {
  expect_same_step(false);
}
TEST(Optimizer, FusedAdamWRunsOnLists) {
  expect_same_step(true);
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

TEST(Optimizer, ForeachOperatorsReachPartialTensors) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const std::vector<at::Tensor> list{distribute_tensor(values({5}, 0), mesh, {Partial{}})};
    at::_foreach_add_(list, 1.0);
    at::_foreach_mul_(list, 2.0);
    EXPECT_TRUE(at::allclose(DistributedTensor(list[0]).full_tensor(), (values({5}, 0) + 1) * 2));
  });
}

}  // namespace
}  // namespace tessera
