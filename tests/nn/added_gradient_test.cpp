// Gradients of the weights of products that are added to earlier ones as they are computed.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <thread>

#include "tessera/nn/detail/linear_product.h"
#include "testing/added_terms.h"
#include "testing/distributed.h"

namespace tessera::nn {
namespace {

using detail::linear_product;
using testing::AddedTerms;
using testing::full_tensor;
using testing::normal_values;

at::Tensor loss_of(const at::Tensor& weight, std::uint64_t seed) {
  const at::Tensor x = normal_values({5, weight.size(1)}, seed).to(weight.scalar_type());
  return linear_product(x, weight, {}).square().sum();
}

at::Tensor leaf(std::uint64_t seed = 1) {
  return normal_values({4, 6}, seed).requires_grad_();
}

/// The gradient of one loss, as libtorch computes it.
at::Tensor term(const at::Tensor& weight, std::uint64_t seed) {
  const at::Tensor w = weight.detach().clone().requires_grad_();
  at::linear(normal_values({5, 6}, seed), w).square().sum().backward();
  return w.grad();
}

TEST(AddedGradient, IsTheSum) {
  const at::Tensor weight = leaf();
  AddedTerms::reset();
  const AddedTerms counted;
  loss_of(weight, 2).backward();
  EXPECT_EQ(AddedTerms::products(), 0);
  const at::Tensor first = weight.grad();
  loss_of(weight, 3).backward();
  EXPECT_EQ(AddedTerms::products(), 1);
  EXPECT_TRUE(weight.grad().is_same(first));
  EXPECT_TRUE(first.allclose(term(weight, 2) + term(weight, 3), 1e-5, 1e-5));
}

TEST(AddedGradient, IsThatOfEachUseOfAWeight) {
  const at::Tensor weight = leaf();
  (loss_of(weight, 2) + loss_of(weight, 3)).backward();
  AddedTerms::reset();
  const AddedTerms counted;
  (loss_of(weight, 4) + loss_of(weight, 5) + weight.square().sum()).backward();
  EXPECT_EQ(AddedTerms::products(), 2);
  const at::Tensor sum = term(weight, 2) + term(weight, 3) + term(weight, 4) + term(weight, 5);
  EXPECT_TRUE(weight.grad().allclose(sum + 2 * weight.detach(), 1e-5, 1e-5));
}

TEST(AddedGradient, ServesSeveralBackwards) {
  const at::Tensor weight = leaf();
  const at::Tensor loss = loss_of(weight, 2);
  for (const bool again : {true, true, false}) {
    loss.backward({}, again);
  }
  EXPECT_TRUE(weight.grad().allclose(3 * term(weight, 2), 1e-5, 1e-5));
}

// A hook of the program sees the term, and not the sum.
TEST(AddedGradient, IsLeftToAHook) {
  const at::Tensor weight = leaf();
  loss_of(weight, 2).backward();
  at::Tensor seen;
  weight.register_hook([&](const at::Tensor& gradient) {
    seen = gradient.clone();
    return gradient * 10;
  });
  loss_of(weight, 3).backward();
  EXPECT_TRUE(seen.equal(term(weight, 3)));
  EXPECT_TRUE(weight.grad().allclose(term(weight, 2) + 10 * term(weight, 3), 1e-5, 1e-4));
}

TEST(AddedGradient, IsReturnedToWhoAsksForIt) {
  const at::Tensor weight = leaf();
  loss_of(weight, 2).backward();
  const at::Tensor before = weight.grad().clone();
  EXPECT_TRUE(torch::autograd::grad({loss_of(weight, 3)}, {weight})[0].equal(term(weight, 3)));
  EXPECT_TRUE(weight.grad().equal(before));
}

TEST(AddedGradient, MayBeRecorded) {
  const at::Tensor weight = leaf();
  loss_of(weight, 2).backward();
  loss_of(weight, 3).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  EXPECT_TRUE(weight.grad().requires_grad());
  EXPECT_TRUE(weight.grad().detach().allclose(term(weight, 2) + term(weight, 3), 1e-5, 1e-5));
  // To a gradient with a graph it is not added in place.
  loss_of(weight, 4).backward();
  EXPECT_TRUE(weight.grad().detach().allclose(term(weight, 2) + term(weight, 3) + term(weight, 4),
                                              1e-5, 1e-5));
  weight.mutable_grad() = at::Tensor();
}

// As master gradients of weights of a narrower type.
TEST(AddedGradient, MayBeOfAnotherTypeThanTheSum) {
  const at::Tensor weight = leaf().detach().to(at::kBFloat16).requires_grad_();
  const at::Tensor sum = at::zeros({4, 6});
  weight.mutable_grad() = sum;
  loss_of(weight, 2).backward();
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
  EXPECT_TRUE(weight.grad().allclose(term(weight.detach().to(at::kFloat), 2), 0.05, 0.5));
}

// libtorch's node of the leaf takes a lock for each addition.
TEST(AddedGradient, MayComeOfSeveralThreads) {
  constexpr int kThreads = 4, kTimes = 20;
  const at::Tensor weight = leaf();
  loss_of(weight, 2).backward();
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < kTimes; ++k) {
        (loss_of(weight, 2) + weight.sum()).backward();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const at::Tensor sum = (1 + kThreads * kTimes) * term(weight, 2) + kThreads * kTimes;
  EXPECT_TRUE(weight.grad().allclose(sum, 1e-4, 1e-3));
}

/// A weight in `placement`, and a gradient of the product in `of_result`.
struct Spread {
  Placement weight, x, of_result;
};

class AddedDistributedGradient : public ::testing::TestWithParam<Spread> {};

TEST_P(AddedDistributedGradient, IsTheSum) {
  RunOnMesh({2}, {"tp"}, [&](const DeviceMesh& mesh) {
    const auto& [of_weight, of_x, of_result] = GetParam();
    const at::Tensor values = normal_values({4, 6}, 1);
    const at::Tensor weight =
        distribute_tensor(values, mesh, {of_weight}).tensor().detach().requires_grad_();
    const auto backward = [&, x_placement = of_x, y_placement = of_result](std::uint64_t seed) {
      const at::Tensor x =
          distribute_tensor(normal_values({6, 6}, seed), mesh, {x_placement}).tensor();
      const at::Tensor y = linear_product(x, weight, {});
      y.backward(distribute_tensor(normal_values({6, 4}, 10 * seed), mesh, {y_placement}).tensor());
    };
    backward(2);
    backward(3);
    at::Tensor sum = at::zeros({4, 6});
    for (const std::uint64_t seed : {2, 3}) {
      sum += normal_values({6, 4}, 10 * seed).t().mm(normal_values({6, 6}, seed));
    }
    EXPECT_TRUE(full_tensor(weight.grad()).allclose(sum, 1e-5, 1e-5));
    EXPECT_EQ(sharding_spec(weight.grad()), sharding_spec(weight));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Placements, AddedDistributedGradient,
    ::testing::Values(Spread{Shard{0}, Replicate{}, Shard{1}},
                      Spread{Shard{1}, Shard{1}, Replicate{}},
                      Spread{Replicate{}, Replicate{}, Replicate{}},
                      // Terms of a sum over the ranks: summed before they are added.
                      Spread{Replicate{}, Shard{0}, Shard{0}}));

}  // namespace
}  // namespace tessera::nn
