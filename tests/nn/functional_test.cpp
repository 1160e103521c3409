#include "tessera/nn/functional.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/core/error.h"
#include "testing/errors.h"

namespace tessera::nn {
namespace {

/// Compares function(inputs)'s value and gradients with those of an oracle made of at:: operators.
template <class Function, class Oracle>
void expect_same(const std::vector<at::Tensor>& inputs, const Function& function,
                 const Oracle& oracle, double rtol, double atol) {
  std::vector<at::Tensor> a, b;
  for (const at::Tensor& input : inputs) {
    a.push_back(input.clone().requires_grad_());
    b.push_back(input.clone().requires_grad_());
  }
  const at::Tensor y = function(a);
  const at::Tensor expected = oracle(b);
  const at::Tensor grad = at::randn_like(expected);
  y.backward(grad);
  expected.backward(grad);
  EXPECT_TRUE(y.allclose(expected, rtol, atol));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_TRUE(a[i].grad().allclose(b[i].grad(), rtol, atol)) << "input " << i;
  }
}

struct Precision {
  at::ScalarType type;
  double rtol, atol;
};
const Precision kPrecisions[] = {{at::kFloat, 1e-5, 1e-5}, {at::kDouble, 1e-12, 1e-12}};

TEST(RmsNorm, AgreesWithComposition) {
  for (const auto& [type, rtol, atol] : kPrecisions) {
    expect_same(
        {at::randn({3, 5, 24}, type), at::randn({24}, type)},
        [](const auto& v) { return rms_norm(v[0], v[1], 1e-5); },
        [](const auto& v) { return at::rms_norm(v[0], {24}, v[1], 1e-5); }, rtol, atol);
  }
}

TEST(RmsNorm, NeedsNoWeight) {
  expect_same(
      {at::randn({4, 9})}, [](const auto& v) { return rms_norm(v[0], {}, 1e-6); },
      [](const auto& v) { return at::rms_norm(v[0], {9}, {}, 1e-6); }, 1e-5, 1e-6);
}

/// Both results are used, or one of them.
TEST(RmsNorm, OfASumAgreesWithComposition) {
  for (const auto& [type, rtol, atol] : kPrecisions) {
    for (const auto& [of_norm, of_sum] :
         {std::pair(1.0, 0.5), std::pair(1.0, 0.0), std::pair(0.0, 1.0)}) {
      const auto weigh = [norm_factor = of_norm, sum_factor = of_sum](const at::Tensor& normed,
                                                                      const at::Tensor& sum) {
        return norm_factor == 0 ? sum : sum_factor == 0 ? normed : normed + sum_factor * sum;
      };
      expect_same(
          {at::randn({3, 5, 24}, type), at::randn({3, 5, 24}, type), at::randn({24}, type)},
          [&](const auto& v) {
            const auto [normed, sum] = add_rms_norm(v[0], v[1], v[2], 1e-5);
            return weigh(normed, sum) + 0 * v[2];
          },
          [&](const auto& v) {
            const at::Tensor sum = v[0] + v[1];
            return weigh(at::rms_norm(sum, {24}, v[2], 1e-5), sum) + 0 * v[2];
          },
          rtol, atol);
    }
  }
}

TEST(RmsNorm, OfASumTakesWhatAnAdditionTakes) {
  const at::Tensor x = at::randn({2, 3, 8}), weight = at::randn({8});
  for (const at::Tensor& residual : {at::randn({2, 3, 8}, at::kBFloat16), at::randn({8})}) {
    const auto [normed, sum] = add_rms_norm(x, residual, weight, 1e-5);
    EXPECT_TRUE(sum.equal(x + residual));
    EXPECT_TRUE(normed.equal(rms_norm(x + residual, weight, 1e-5)));
  }
}

TEST(RmsNorm, RefusesAWeightOfAnotherSize) {
  EXPECT_ERROR(rms_norm(at::ones({2, 3}), at::ones({4}), 1e-5),
               "sizes [2, 3] was asked for with a weight of sizes [4]");
}

TEST(RmsNorm, RefusesASecondDerivative) {
  const at::Tensor x = at::randn({2, 3}).requires_grad_();
  const at::Tensor y = rms_norm(x, {}, 1e-5).sum();
  EXPECT_ERROR(torch::autograd::grad({y}, {x}, {}, std::nullopt, /*create_graph=*/true),
               "rms_norm is differentiable once");
}

TEST(SiluMul, AgreesWithComposition) {
  for (const auto& [type, rtol, atol] : kPrecisions) {
    expect_same(
        {at::randn({7, 11}, type) * 3, at::randn({7, 11}, type)},
        [](const auto& v) { return silu_mul(v[0], v[1]); },
        [](const auto& v) { return at::silu(v[0]) * v[1]; }, rtol, atol);
  }
}

TEST(SiluMul, TakesViews) {
  const at::Tensor both = at::randn({5, 16});
  const auto halves = both.chunk(2, 1);
  EXPECT_TRUE(silu_mul(halves[0], halves[1]).allclose(at::silu(halves[0]) * halves[1], 1e-5, 1e-6));
}

TEST(SiluMul, RefusesOtherSizes) {
  EXPECT_ERROR(silu_mul(at::ones({2, 3}), at::ones({3})), "of sizes [2, 3] and [3]");
}

TEST(RotaryEmbedding, OfTwoIsThatOfEach) {
  for (const auto& [type, rtol, atol] : kPrecisions) {
    const at::Tensor cos = at::randn({6, 10}, type), sin = at::randn({6, 10}, type);
    expect_same(
        {at::randn({2, 6, 4, 10}, type), at::randn({2, 6, 2, 10}, type)},
        [&](const auto& v) {
          const auto [q, k] = rotary_embedding(v[0], v[1], cos, sin);
          return at::cat({q, k}, 2);
        },
        [&](const auto& v) {
          return at::cat({rotary_embedding(v[0], cos, sin), rotary_embedding(v[1], cos, sin)}, 2);
        },
        rtol, atol);
  }
}

TEST(RotaryEmbedding, OfTwoHasTheGradientOfOneThatIsUsed) {
  const at::Tensor cos = at::randn({6, 10}), sin = at::randn({6, 10});
  at::Tensor q = at::randn({2, 6, 4, 10}).requires_grad_(), k = q.detach().clone().requires_grad_();
  rotary_embedding(q, k, cos, sin).second.square().sum().backward();
  EXPECT_FALSE(q.grad().defined());
  const at::Tensor alone = k.detach().clone().requires_grad_();
  rotary_embedding(alone, cos, sin).square().sum().backward();
  EXPECT_TRUE(k.grad().equal(alone.grad()));
}

TEST(RotaryEmbedding, AgreesWithComposition) {
  for (const auto& [type, rtol, atol] : kPrecisions) {
    const at::Tensor cos = at::randn({6, 10}, type);
    const at::Tensor sin = at::randn({6, 10}, type);
    expect_same(
        {at::randn({2, 6, 3, 10}, type)},
        [&](const auto& v) { return rotary_embedding(v[0], cos, sin); },
        [&](const auto& v) {
          const auto halves = v[0].chunk(2, -1);
          const at::Tensor rotated = at::cat({-halves[1], halves[0]}, -1);
          return v[0] * cos.unsqueeze(1) + rotated * sin.unsqueeze(1);
        },
        rtol, atol);
  }
}

TEST(RotaryEmbedding, RefusesTablesOfAnotherLength) {
  EXPECT_ERROR(rotary_embedding(at::ones({1, 4, 1, 2}), at::ones({3, 2}), at::ones({3, 2})),
               "with a table of sizes [3, 2]");
  EXPECT_ERROR(rotary_embedding(at::ones({1, 4, 1, 3}), at::ones({4, 3}), at::ones({4, 3})),
               "rotary_embedding of sizes [1, 4, 1, 3]");
}

TEST(EmbeddingFunction, AgreesWithLibtorch) {
  const at::Tensor indices = at::randint(0, 9, {4, 5}, at::kLong);
  for (const auto& [type, rtol, atol] : kPrecisions) {
    expect_same(
        {at::randn({9, 6}, type)}, [&](const auto& v) { return nn::embedding(v[0], indices); },
        [&](const auto& v) { return at::embedding(v[0], indices); }, rtol, atol);
  }
}

TEST(EmbeddingFunction, RefusesIndicesOfAnotherType) {
  EXPECT_ERROR(nn::embedding(at::ones({3, 2}), at::zeros({2}, at::kInt)),
               "the indices are of type Int");
}

TEST(DropoutFunction, UsesOneMaskForValueAndGradient) {
  const at::Tensor x = at::ones({1000}).requires_grad_();
  const at::Tensor y = dropout(x, 0.4, {1, 2});
  y.sum().backward();
  EXPECT_TRUE(x.grad().equal(y.detach()));
  EXPECT_NEAR((y == 0).to(at::kFloat).mean().item<double>(), 0.4, 0.06);
}

TEST(DropoutFunction, APartOfTheBatchIsDrawnAsPartOfTheWhole) {
  const at::Tensor x = at::randn({8, 5});
  const at::Tensor whole = dropout(x, 0.5, {1, 2});
  const BatchPart part(3, 4);
  EXPECT_TRUE(dropout(x.slice(0, 6, 8), 0.5, {1, 2}).equal(whole.slice(0, 6, 8)));
}

}  // namespace
}  // namespace tessera::nn
