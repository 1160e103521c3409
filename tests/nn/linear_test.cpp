// Tests products of Linears and their gradients against libtorch, bit for bit; fp8 products; and
// LoRA adapters.

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <thread>

#include "nn/graphs.h"
#include "tessera/kernels/detail/fused.h"
#include "tessera/nn/detail/linear_product.h"
#include "tessera/nn/detail/lora.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "testing/added_terms.h"
#include "testing/memory.h"
#include "testing/module_values.h"

namespace tessera::nn {
namespace {

using detail::linear_product;
using testing::expect_equal_bits;
using testing::leaves_of;
using testing::libtorchs;
using testing::results_of;

using Tensors = std::vector<at::Tensor>;

TEST(LinearProduct, MatchesLibtorchExactly) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const std::vector<std::int64_t>& sizes :
         {std::vector<std::int64_t>{7, 12}, {2, 5, 12}, {1, 12}, {0, 12}, {2, 3, 4, 12}, {12}}) {
      const Tensors values{normal_values(sizes, 1).to(type), normal_values({9, 12}, 2).to(type),
                           normal_values({9}, 3).to(type)};
      expect_equal_bits([](const Tensors& v) { return linear_product(v[0], v[1], v[2]); },
                        [](const Tensors& v) { return libtorchs(v[0], v[1], v[2]); }, values);
      expect_equal_bits([](const Tensors& v) { return linear_product(v[0], v[1], {}); },
                        [](const Tensors& v) { return libtorchs(v[0], v[1]); },
                        {values[0], values[1]});
    }
  }
}

TEST(LinearProduct, IsCastByAutocast) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor weight = normal_values({4, 6}, 2).requires_grad_();
  const at::Tensor y = linear_product(normal_values({3, 6}, 1), weight, {});
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  y.sum().backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST(LinearProduct, SupportsInPlaceChangesOfTheResult) {
  const auto doubled = [](auto product) {
    return [product](const Tensors& v) { return product(v[0], v[1], v[2]).mul_(2); };
  };
  expect_equal_bits(doubled(linear_product), doubled(libtorchs),
                    {normal_values({2, 5, 6}, 1), normal_values({4, 6}, 2), normal_values({4}, 3)});
}

TEST(LinearProduct, IsDifferentiableTwice) {
  const auto second = [](auto product) {
    return [product](const Tensors& v) {
      const at::Tensor y = product(v[0], v[1], v[2]).square().sum();
      return torch::autograd::grad({y}, {v[0]}, {}, /*retain_graph=*/true,
                                   /*create_graph=*/true)[0]
          .square();
    };
  };
  const Tensors values{normal_values({5, 6}, 1), normal_values({4, 6}, 2), normal_values({4}, 3)};
  EXPECT_EACH(results_of(second(linear_product), values), results_of(second(libtorchs), values),
              1e-5, 1e-5);
}

TEST(LinearProduct, SavesNoInputForAFrozenWeight) {
  const at::Tensor weight = normal_values({6, 6}, 1);
  const at::Tensor x = normal_values({50, 6}, 2).requires_grad_();
  linear_product(x.mul(2), weight, {});
  const testing::AllocatedBytes memory;
  const at::Tensor y = linear_product(x.mul(2), weight, {});
  EXPECT_LT(memory.now(), 2 * 4 * x.numel());
  y.sum().backward();
  EXPECT_CLOSE(x.grad(), weight.sum(0).mul(2).expand_as(x));
}

using testing::AddedTerms;

struct Projections : Module<Projections> {
  explicit Projections(bool bias = false)
      : q(*this, "q", 6, 9, LinearOptions{bias}),
        k(*this, "k", 6, 4, LinearOptions{bias}),
        v(*this, "v", 6, 1, LinearOptions{bias}) {}

  at::Tensor forward(const at::Tensor& x) {
    const Tensors results = together ? linear_products(x, {*q, *k, *v}) : Tensors{q(x), k(x), v(x)};
    return at::cat(results, -1);
  }

  bool together = true;
  Child<Linear> q, k, v;
};

using Model = testing::Filled<Projections>;

Tensors results_of(Model& model, const at::Tensor& input, bool together) {
  model.together = together;
  model.zero_grad();
  const at::Tensor x = input.detach().clone().requires_grad_();
  const at::Tensor y = model(x);
  y.backward(normal_values(y.sizes(), 99).to(y.scalar_type()));
  Tensors results{y.detach(), x.grad()};
  std::ranges::copy(testing::gradients_of(model), std::back_inserter(results));
  return results;
}

/// Compares linear_products() with separate calls: bit for bit, but x.grad within `bound`.
void expect_that_of_calls(Model& model, const at::Tensor& input, double bound = 1e-5) {
  const Tensors together = results_of(model, input, true);
  const Tensors apart = results_of(model, input, false);
  for (std::size_t i = 0; i < apart.size(); ++i) {
    ASSERT_EQ(together[i].defined(), apart[i].defined()) << i;
    if (apart[i].defined()) {
      EXPECT_TRUE(i == 1 ? together[i].allclose(apart[i], bound, bound)
                         : together[i].equal(apart[i]))
          << i;
    }
  }
}

/// Returns how many matrix products one backward adds to a gradient in place (addmm_).
int added_products(Model& model, const at::Tensor& input = normal_values({5, 6}, 1)) {
  AddedTerms::reset();
  const AddedTerms counted;
  results_of(model, input, true);
  return AddedTerms::products();
}

TEST(LinearProducts, EqualSeparateCalls) {
  for (const bool bias : {false, true}) {
    Model model(bias);
    for (const std::vector<std::int64_t>& sizes :
         {std::vector<std::int64_t>{7, 6}, {2, 5, 6}, {1, 6}, {0, 6}, {2, 3, 4, 6}, {6}}) {
      expect_that_of_calls(model, normal_values(sizes, 1));
    }
    EXPECT_EQ(added_products(model), 2);
    EXPECT_EQ(added_products(model, normal_values({2, 3, 6}, 1)), 2);
    model.to(at::kBFloat16);
    expect_that_of_calls(model, normal_values({7, 6}, 1).to(at::kBFloat16), 0.02);
  }
}

TEST(LinearProducts, SupportFrozenWeights) {
  Model model;
  model.k->weight->requires_grad_(false);
  expect_that_of_calls(model, normal_values({5, 6}, 1));
  EXPECT_EQ(added_products(model), 2);
  model.q->weight->requires_grad_(false);
  model.v->weight->requires_grad_(false);
  expect_that_of_calls(model, normal_values({5, 6}, 1));
}

TEST(LinearProducts, SupportSeveralBackwards) {
  Model model;
  const at::Tensor x = normal_values({5, 6}, 1).requires_grad_();
  const at::Tensor loss = model(x).square().sum();
  loss.backward({}, /*retain_graph=*/true);
  const at::Tensor once = x.grad().clone();
  loss.backward();
  EXPECT_CLOSE(x.grad(), 2 * once, 1e-5, 1e-5);
  EXPECT_THROWN(std::exception, loss.backward(), "backward through the graph a second time");
}

TEST(LinearProducts, SupportSeparateBackwardsOfResults) {
  Model model;
  const at::Tensor x = normal_values({5, 6}, 1).requires_grad_();
  // The graphs of q and k share only the node of view(), so each result can run its own backward.
  const Tensors y = linear_products(x.view({5, 6}), {*model.q, *model.k});
  y[0].sum().backward();
  EXPECT_FALSE(model.k->weight->grad().defined());
  y[1].sum().backward();
  EXPECT_CLOSE(x.grad(),
               (model.q->weight->detach().sum(0) + model.k->weight->detach().sum(0)).expand({5, 6}),
               1e-5, 1e-5);
  EXPECT_THROWN(std::exception, y[1].sum().backward(), "backward through the graph a second time");
}

// With one row, the gradient of the bias is a view of the gradient of the result.
TEST(LinearProducts, OfOneRowAccumulateBiasGradients) {
  Model model(/*bias=*/true);
  const auto gradient_of_x = [&](bool together) {
    model.together = together;
    model.zero_grad();
    const at::Tensor x = normal_values({1, 6}, 1).requires_grad_();
    const at::Tensor y = model(x);
    at::cat({model(x), y}).square().sum().backward();
    return x.grad();
  };
  EXPECT_CLOSE(gradient_of_x(true), gradient_of_x(false), 1e-5, 1e-5);
}

TEST(LinearProducts, GiveHooksTheWholeGradient) {
  Model model;
  const at::Tensor input = normal_values({5, 6}, 1);
  const at::Tensor expected = results_of(model, input, false)[1];
  const at::Tensor x = input.clone().requires_grad_().mul(1);
  at::Tensor seen;
  x.register_hook([&](const at::Tensor& gradient) { seen = gradient.clone(); });
  const at::Tensor y = model(x);
  y.backward(normal_values(y.sizes(), 99));
  EXPECT_CLOSE(seen, expected, 1e-5, 1e-5);
}

TEST(LinearProducts, AreDifferentiableTwice) {
  Model model;
  const auto second = [&](bool together) {
    model.together = together;
    model.zero_grad();
    const at::Tensor x = normal_values({5, 6}, 1).requires_grad_();
    const at::Tensor loss = model(x).pow(3).sum();
    torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true)[0]
        .square()
        .sum()
        .backward();
    return Tensors{x.grad(), model.q->weight->grad(), model.v->weight->grad()};
  };
  EXPECT_EACH(second(true), second(false), 1e-4, 1e-4);
}

TEST(LinearProducts, RunTheHooksOfAllModules) {
  Model model;
  std::string order;
  const auto watch = [&](Linear& linear, const std::string& name, double factor) {
    linear.add_forward_pre_hook([&order, name](auto&, TensorList) { order += name; });
    linear.add_forward_hook([&order, name, factor](auto&, TensorList outputs) {
      order += name;
      *outputs[0] = *outputs[0] * factor;
    });
  };
  watch(*model.q, "q", 2);
  watch(*model.k, "k", 3);
  watch(*model.v, "v", 5);
  expect_that_of_calls(model, normal_values({5, 6}, 1));
  EXPECT_EQ(order, "qqkkvvqqkkvv");
  EXPECT_EQ(added_products(model), 2);
}

TEST(LinearProducts, UseInputsReplacedByHooks) {
  Model model;
  model.k->add_forward_pre_hook([](auto&, TensorList inputs) { *inputs[0] = inputs[0]->mul(3); });
  expect_that_of_calls(model, normal_values({5, 6}, 1));
}

TEST(LinearProducts, UseInputsChangedInPlaceByHooks) {
  Model model;
  model.k->add_forward_pre_hook([](auto&, TensorList inputs) { inputs[0]->mul_(3); });
  // A write to x is legal: q is frozen, so x is not saved for backward, and k has not run yet.
  model.q->weight->requires_grad_(false);
  const auto gradient_of_x = [&](bool together) {
    model.together = together;
    const at::Tensor x = normal_values({5, 6}, 1).requires_grad_();
    const at::Tensor y = model(x.mul(1));
    y.backward(normal_values(y.sizes(), 99));
    return x.grad();
  };
  EXPECT_CLOSE(gradient_of_x(true), gradient_of_x(false), 1e-5, 1e-5);
}

TEST(LinearProducts, AreSeparateForAdaptersCheckpointsAndCustomProducts) {
  const std::vector<std::function<void(Model&)>> changes{
      [](Model& model) {
        apply_lora(model, {.rank = 2, .targets = {"k"}});
        testing::fill(model);
      },
      [](Model& model) { model.q->checkpoint_calls({}); },
      [](Model& model) {
        model.v->set_product([](const at::Tensor& x, const at::Tensor& weight, const at::Tensor&) {
          return at::linear(x, weight).mul(2);
        });
      }};
  for (const auto& change : changes) {
    Model model;
    change(model);
    expect_that_of_calls(model, normal_values({5, 6}, 1));
    EXPECT_EQ(added_products(model), 0);
  }
}

TEST(LinearProducts, AreRecomputedOnceInACheckpoint) {
  Model model;
  RMSNorm norm(6);
  testing::fill(norm);
  const auto forward = [&](const at::Tensor& x) { return model(norm(x)); };
  const at::Tensor expected = normal_values({5, 6}, 1).requires_grad_();
  forward(expected).square().sum().backward();
  const at::Tensor of_q = model.q->weight->grad().clone();
  model.zero_grad();
  const testing::Counted counted;
  const at::Tensor x = expected.detach().clone().requires_grad_();
  checkpoint(counted.options, forward, x).square().sum().backward();
  EXPECT_EQUAL(x.grad(), expected.grad());
  EXPECT_EQUAL(model.q->weight->grad(), of_q);
  EXPECT_EQ(counted->recomputations, 1);
}

TEST(LinearProducts, ReportTheMismatchedModule) {
  Projections model;
  Linear other(5, 4);
  testing::fill(model);
  testing::fill(other);
  EXPECT_THROWN(std::exception, linear_products(normal_values({5, 6}, 1), {*model.q, other}),
                "5x6 and 5x4");
}

struct Split {
  Placement x, weights;
  int added;  ///< number of in-place products on each rank
};

class DistributedLinearProducts : public ::testing::TestWithParam<Split> {};

TEST_P(DistributedLinearProducts, EqualProductsOfOneRank) {
  for (const int ranks : {2, 3}) {
    AddedTerms::reset();
    RunOnMesh({ranks}, {"tp"}, [&](const DeviceMesh& mesh) {
      const auto& [x_placement, weight_placement, added] = GetParam();
      Model one;
      Model model;
      const at::Tensor input = normal_values({5, 6}, 1);
      const Tensors expected = results_of(one, input, false);
      for (const auto& [name, slot] : model.named_slots()) {
        slot->set(testing::leaf_on(mesh, slot->get().detach(), {weight_placement}));
      }
      const at::Tensor x = testing::leaf_on(mesh, input, {x_placement});
      const AddedTerms counted;
      const Tensors y = linear_products(x, {*model.q, *model.k, *model.v});
      const at::Tensor weights = normal_values({5, 14}, 99);
      const Tensors factors = weights.split_with_sizes({9, 4, 1}, 1);
      Tensors gradients;
      for (std::size_t i = 0; i < y.size(); ++i) {
        const Placement of_y = DistributedTensor(y[i]).placements()[0];
        gradients.push_back(distribute_tensor(factors[i].contiguous(), mesh,
                                              {is_partial(of_y) ? Placement(Replicate{}) : of_y})
                                .tensor());
      }
      torch::autograd::backward(y, gradients);
      EXPECT_EACH({x.grad(), model.q->weight->grad(), model.v->weight->grad()},
                  {expected[1], expected[2], expected[4]}, 1e-5, 1e-5);
    });
    EXPECT_EQ(AddedTerms::products(), GetParam().added * ranks);
  }
}

// If the weights have Shard(0), x.grad is a sum over the ranks.
INSTANTIATE_TEST_SUITE_P(Placements, DistributedLinearProducts,
                         ::testing::Values(Split{Replicate{}, Shard{0}, 2},
                                           Split{Shard{0}, Replicate{}, 2},
                                           Split{Replicate{}, Replicate{}, 2},
                                           Split{Shard{1}, Shard{1}, 2}));

at::Tensor loss_of(const at::Tensor& weight, std::uint64_t seed) {
  const at::Tensor x = normal_values({5, weight.size(1)}, seed).to(weight.scalar_type());
  return linear_product(x, weight, {}).square().sum();
}

at::Tensor leaf(std::uint64_t seed = 1) {
  return normal_values({4, 6}, seed).requires_grad_();
}

/// Computes the gradient of loss_of(weight, seed) by libtorch's operators.
at::Tensor term(const at::Tensor& weight, std::uint64_t seed) {
  const at::Tensor w = weight.detach().clone().requires_grad_();
  at::linear(normal_values({5, 6}, seed), w).square().sum().backward();
  return w.grad();
}

TEST(AddedGradient, IsAddedInPlace) {
  const at::Tensor weight = leaf();
  AddedTerms::reset();
  const AddedTerms counted;
  loss_of(weight, 2).backward();
  EXPECT_EQ(AddedTerms::products(), 0);
  const at::Tensor first = weight.grad();
  loss_of(weight, 3).backward();
  EXPECT_EQ(AddedTerms::products(), 1);
  EXPECT_TRUE(weight.grad().is_same(first));
  EXPECT_CLOSE(first, term(weight, 2) + term(weight, 3), 1e-5, 1e-5);
}

TEST(AddedGradient, CoversEachUseOfAWeight) {
  const at::Tensor weight = leaf();
  (loss_of(weight, 2) + loss_of(weight, 3)).backward();
  AddedTerms::reset();
  const AddedTerms counted;
  (loss_of(weight, 4) + loss_of(weight, 5) + weight.square().sum()).backward();
  EXPECT_EQ(AddedTerms::products(), 2);
  const at::Tensor sum = term(weight, 2) + term(weight, 3) + term(weight, 4) + term(weight, 5);
  EXPECT_CLOSE(weight.grad(), sum + 2 * weight.detach(), 1e-5, 1e-5);
}

// The hook must receive only the new gradient; addition in place would pass the sum to the hook.
TEST(AddedGradient, IsPassedToHooksUnadded) {
  const at::Tensor weight = leaf();
  loss_of(weight, 2).backward();
  at::Tensor seen;
  weight.register_hook([&](const at::Tensor& gradient) {
    seen = gradient.clone();
    return gradient * 10;
  });
  loss_of(weight, 3).backward();
  EXPECT_EQUAL(seen, term(weight, 3));
  EXPECT_CLOSE(weight.grad(), term(weight, 2) + 10 * term(weight, 3), 1e-5, 1e-4);
}

TEST(AddedGradient, IsReturnedByAutogradGrad) {
  const at::Tensor weight = leaf();
  loss_of(weight, 2).backward();
  const at::Tensor before = weight.grad().clone();
  EXPECT_EQUAL(torch::autograd::grad({loss_of(weight, 3)}, {weight})[0], term(weight, 3));
  EXPECT_EQUAL(weight.grad(), before);
}

TEST(AddedGradient, SupportsCreateGraph) {
  const at::Tensor weight = leaf();
  loss_of(weight, 2).backward();
  loss_of(weight, 3).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  EXPECT_TRUE(weight.grad().requires_grad());
  EXPECT_CLOSE(weight.grad().detach(), term(weight, 2) + term(weight, 3), 1e-5, 1e-5);
  // If `.grad` itself requires a gradient, backward must not change `.grad` in place.
  loss_of(weight, 4).backward();
  EXPECT_CLOSE(weight.grad().detach(), term(weight, 2) + term(weight, 3) + term(weight, 4), 1e-5,
               1e-5);
  weight.mutable_grad() = at::Tensor();
}

TEST(AddedGradient, MayDifferInDtypeFromTheSum) {
  const at::Tensor weight = leaf().detach().to(at::kBFloat16).requires_grad_();
  const at::Tensor sum = at::zeros({4, 6});
  weight.mutable_grad() = sum;
  loss_of(weight, 2).backward();
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
  EXPECT_CLOSE(weight.grad(), term(weight.detach().to(at::kFloat), 2), 0.05, 0.5);
}

// AccumulateGrad takes a lock, so several threads may add to one gradient.
TEST(AddedGradient, SupportsSeveralThreads) {
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
  EXPECT_CLOSE(weight.grad(), sum, 1e-4, 1e-3);
}

struct Spread {
  Placement weight, x, of_result;
};

class AddedDistributedGradient : public ::testing::TestWithParam<Spread> {};

TEST_P(AddedDistributedGradient, IsAddedCorrectly) {
  RunOnMesh({2}, {"tp"}, [&](const DeviceMesh& mesh) {
    const auto& [of_weight, of_x, of_result] = GetParam();
    const at::Tensor weight = testing::leaf_on(mesh, normal_values({4, 6}, 1), {of_weight});
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
    EXPECT_CLOSE(weight.grad(), sum, 1e-5, 1e-5);
    EXPECT_EQ(sharding_spec(weight.grad()), sharding_spec(weight));
  });
}

INSTANTIATE_TEST_SUITE_P(Placements, AddedDistributedGradient,
                         ::testing::Values(Spread{Shard{0}, Replicate{}, Shard{1}},
                                           Spread{Shard{1}, Shard{1}, Replicate{}},
                                           Spread{Replicate{}, Replicate{}, Replicate{}},
                                           Spread{Replicate{}, Shard{0}, Shard{0}}));

using Names = std::vector<std::string>;

struct Mlp : Module<Mlp> {
  at::Tensor forward(const at::Tensor& x) { return (*head)((*down)(at::tanh((*up)(x)))); }
  Child<Linear> up{*this, "up", 16, 32};
  Child<Linear> down{*this, "down", 32, 16, LinearOptions{.bias = false}};
  Child<Linear> odd{*this, "odd", 16, 24};
  Child<Linear> head{*this, "head", 16, 48};
};

TEST(Fp8, ConvertsLinearsByNameAndSize) {
  Mlp model;
  EXPECT_EQ(convert_to_fp8(model, {.exclude = {"h*d"}}), (Names{"up", "down"}));
  EXPECT_TRUE(is_fp8(*model.up));
  EXPECT_FALSE(is_fp8(*model.head));
  Mlp larger;
  EXPECT_EQ(convert_to_fp8(larger, {.multiple_of = 32}), Names{});
}

TEST(Fp8, SkipsATiedWeight) {
  Mlp model;
  const Linear other(16, 32);
  model.up->tie_slot("weight", other.slot("weight"));
  EXPECT_EQ(convert_to_fp8(model), (Names{"down", "head"}));
}

TEST(Fp8, ComputesAndDifferentiatesInEightBits) {
  testing::Filled<Mlp> model;
  convert_to_fp8(model);
  const at::Tensor x = uniform_values({2, 5, 16}, 1).requires_grad_();
  const at::Tensor y = (*model.up)(x);
  const at::Tensor weight = model.up->weight->detach();
  EXPECT_EQUAL(y, kernels::fp8_linear(x.detach(), weight).add(*model.up->bias));
  const at::Tensor gradient = uniform_values({2, 5, 32}, 2);
  y.backward(gradient);
  EXPECT_EQUAL(x.grad(), kernels::fp8_linear_input_grad(gradient, weight));
  EXPECT_EQUAL(model.up->weight->grad(), kernels::fp8_linear_weight_grad(gradient, x.detach()));
  EXPECT_CLOSE(model.up->bias->grad(), gradient.flatten(0, 1).sum(0));
}

TEST(Fp8, ConvertsAFusedLinear) {
  testing::Filled<FusedLinear> fused(16, std::vector<FusedPart>{{"gate", 16}, {"up", 16}},
                                     FusedLinearOptions{.bias = false});
  EXPECT_EQ(convert_to_fp8(fused), Names{""});
  const at::Tensor x = uniform_values({3, 16}, 1);
  EXPECT_EQUAL(fused.split(fused(x))[1],
               kernels::fp8_linear(x, fused.weight->detach().narrow(0, 16, 16)));
}

TEST(Fp8, KeepsTheDtypeOfAnAdapter) {
  testing::Filled<Linear> linear(16, 32, LinearOptions{.bias = false});
  convert_to_fp8(linear);
  apply_lora(linear, {.rank = 16, .alpha = 16, .targets = {""}});
  const auto branch = linear.attached<LoraBranch>();
  testing::fill(*branch->a);
  testing::fill(*branch->b);
  EXPECT_FALSE(is_fp8(*branch->a));
  const at::Tensor x = uniform_values({3, 16}, 1).requires_grad_();
  const at::Tensor y = linear(x);
  const at::Tensor term = at::linear(at::linear(x, *branch->a->weight), *branch->b->weight);
  EXPECT_EQUAL(y, kernels::fp8_linear(x.detach(), linear.weight->detach()).add(term));
  y.sum().backward();
  EXPECT_FALSE(linear.weight->grad().defined());
  EXPECT_TRUE(branch->b->weight->grad().defined());
}

TEST(Fp8, CountsInActivationCheckpointingPolicies) {
  testing::Filled<Mlp> model;
  convert_to_fp8(model);
  const auto counts = std::make_shared<CheckpointCounts>();
  apply_activation_checkpointing(model, named(""),
                                 {.policy = save_matmuls_and_attention(), .counts = counts});
  model(uniform_values({4, 16}, 1)).sum().backward();
  EXPECT_EQ(counts->kept_operators, 3);
}

TEST(Fp8, RefusesUnsupportedModules) {
  Mlp model;
  EXPECT_ERROR(convert_to_fp8(model, {.exclude = {"lm_head"}}), "'lm_head' matches no nn::Linear");
  EXPECT_ERROR(convert_to_fp8(model, {.multiple_of = 0}), "multiple_of is 0");
  EXPECT_FALSE(is_fp8(*model.up));
  convert_to_fp8(model);
  EXPECT_ERROR(convert_to_fp8(model), "'up' is already converted");
  Mlp adapted;
  apply_lora(adapted, {.rank = 2, .targets = {"up"}});
  EXPECT_ERROR(convert_to_fp8(adapted), "'up' has an adapter", "before apply_lora");
  testing::Filled<Linear> wide(16, 16);
  convert_to_fp8(wide);
  EXPECT_ERROR(wide(uniform_values({2, 16}, 1).to(at::kDouble)), "type Double", "Float");
}

struct AdaptedMlp final : Module<AdaptedMlp> {
  at::Tensor forward(const at::Tensor& x) { return (*down)(at::tanh((*norm)((*up)(x)))); }
  void reset_parameters(const InitContext& init) override {
    init.fill(*this, {{"**.weight", init::normal(0, 0.5)}});
  }
  Child<Linear> up{*this, "up", 5, 7};
  Child<RMSNorm> norm{*this, "norm", 7};
  Child<Linear> down{*this, "down", 7, 5};
};

TEST(Lora, InitiallyChangesNoResult) {
  AdaptedMlp plain, adapted;
  init_weights(plain, 3);
  apply_lora(adapted, {.rank = 2, .alpha = 6, .targets = {"up", "d*"}, .dropout = 0.1});
  init_weights(adapted, 3);
  const at::Tensor x = uniform_values({4, 5}, 0.5);
  EXPECT_EQUAL(adapted(x), plain(x));
  EXPECT_EQ(testing::names_of(lora_slots(adapted)),
            (std::vector<std::string>{"up.lora_A.weight", "up.lora_B.weight", "down.lora_A.weight",
                                      "down.lora_B.weight"}));
  const auto branch = adapted.up->attached<LoraBranch>();
  EXPECT_EQ(branch->a->weight->sizes(), (std::vector<std::int64_t>{2, 5}));
  EXPECT_EQ(branch->b->weight->sizes(), (std::vector<std::int64_t>{7, 2}));
  // Like PyTorch's Linear, lora_A has Kaiming-uniform initial values.
  const double largest = branch->a->weight->abs().max().item<double>();
  EXPECT_LE(largest, 1 / std::sqrt(5.0));
  EXPECT_GT(largest, 0.5 / std::sqrt(5.0));
  for (const auto& [name, slot] : adapted.named_slots()) {
    EXPECT_EQ(slot->get().requires_grad(), name.find("lora_") != name.npos) << name;
  }
}

TEST(Lora, AddsTheLowRankProductAndMerges) {
  Linear linear(5, 7);
  apply_lora(linear, {.rank = 2, .alpha = 3, .targets = {""}});
  testing::fill(linear);
  const at::Tensor x = uniform_values({4, 5}, 0.5);
  const auto branch = linear.attached<LoraBranch>();
  const at::Tensor weight =
      linear.weight->detach() + 1.5 * branch->b->weight->mm(branch->a->weight).detach();
  const at::Tensor y = linear(x).detach();
  EXPECT_CLOSE(y, at::linear(x, weight, *linear.bias), 1e-5, 1e-6);
  merge_lora(linear);
  EXPECT_TRUE(linear.weight->allclose(weight, 1e-5, 1e-6));
  EXPECT_CLOSE(linear(x), y, 1e-5, 1e-6);
  merge_lora(linear);
  EXPECT_TRUE(linear.weight->allclose(weight, 1e-5, 1e-6));
}

TEST(Lora, FollowsTheDeviceAndDtypeOfWeights) {
  const auto model = testing::made_on_meta<AdaptedMlp>();
  apply_lora(*model, {.targets = {"up"}});
  EXPECT_TRUE(model->up->attached<LoraBranch>()->a->weight->is_meta());
  Linear wide(5, 7);
  wide.to(at::kDouble);
  apply_lora(wide, {.targets = {""}});
  EXPECT_EQ(wide.attached<LoraBranch>()->b->weight->scalar_type(), at::kDouble);
}

TEST(Lora, IsInitializedIfMissingFromALoad) {
  AdaptedMlp model, fresh;
  testing::fill(model);
  const at::Tensor loaded = model.up->weight->detach().clone();
  apply_lora(model, {.rank = 2, .targets = {"up"}});
  init_unfilled(model, 3);
  apply_lora(fresh, {.rank = 2, .targets = {"up"}});
  init_weights(fresh, 3);
  EXPECT_EQUAL(*model.up->weight, loaded);
  const auto branch = model.up->attached<LoraBranch>();
  EXPECT_EQUAL(*branch->a->weight, *fresh.up->attached<LoraBranch>()->a->weight);
  EXPECT_EQ(branch->b->weight->abs().max().item<double>(), 0);
}

TEST(Lora, OfExpertsStartsWithTheValuesOfSeparateLinears) {
  MixtureOfExperts stacked(
      {.hidden = 5,
       .inner = 7,
       .experts = 2,
       .names = {.experts = "0", .mlp = {.gate = "0", .up = "1", .down = "2"}}});
  const auto expert = [] { return std::make_shared<Sequential>(std::make_shared<Linear>(5, 7)); };
  Sequential separate(std::make_shared<Sequential>(expert(), expert()));
  apply_lora(stacked, {.rank = 3, .targets = {"0.0"}});
  apply_lora(separate, {.rank = 3, .targets = {"0.*.0"}});
  init_weights(stacked, 3);
  init_weights(separate, 3);
  const NamedSlots of_stack = lora_slots(stacked), of_each = lora_slots(separate);
  for (std::size_t i = 0; i < of_each.size(); ++i) {
    EXPECT_EQUAL(of_stack[i % 2].second->get()[static_cast<std::int64_t>(i / 2)],
                 of_each[i].second->get());
  }
}

TEST(Lora, RefusesUnsupportedTargets) {
  AdaptedMlp model;
  EXPECT_ERROR(apply_lora(model, {.rank = 0, .targets = {"up"}}), "rank 0", "1 or more");
  EXPECT_ERROR(apply_lora(model, {.targets = {"up"}, .dropout = 1}), "dropout 1", "[0, 1)");
  EXPECT_ERROR(apply_lora(model, {}), "no targets", "**.q_proj");
  EXPECT_ERROR(apply_lora(model, {.targets = {"up", "norm"}}), "'norm'", "no nn::Linear",
               "AdaptedMlp");
  EXPECT_TRUE(lora_slots(model).empty());
  EXPECT_TRUE(model.norm->weight->requires_grad());
  EXPECT_ERROR(merge_lora(model), "no adapters", "apply_lora first");
  apply_lora(model, {.targets = {"up"}});
  EXPECT_ERROR(apply_lora(model, {.targets = {"*"}}), "'up'", "has an adapter");
  EXPECT_ERROR(merge_lora(model), "up.weight", "has no values");
  AdaptedMlp tied;
  tied.up->tie_slot("weight", std::make_shared<Linear>(5, 7)->slot("weight"));
  Linear other(5, 7);
  other.tie_slot("weight", tied.up->slot("weight"));
  EXPECT_ERROR(apply_lora(tied, {.targets = {"up"}}), "'up'", "tied");
}

TEST(Freeze, MatchesAnyNameOfAParameter) {
  AdaptedMlp model;
  freeze(model, {"norm.*", "down.bias"});
  for (const auto& [name, slot] : model.named_slots()) {
    EXPECT_EQ(slot->get().requires_grad(), name != "norm.weight" && name != "down.bias") << name;
  }
  auto same = std::make_shared<Linear>(5, 7);
  same->tie_slot("weight", model.up->slot("weight"));
  model.register_module("same", same);
  freeze(model, {"same.weight"});
  EXPECT_FALSE(model.up->weight->requires_grad());
  freeze(model, {"**"});
  for (const auto& [name, slot] : model.named_slots()) {
    EXPECT_FALSE(slot->get().requires_grad()) << name;
  }
}

TEST(Freeze, RefusesAPatternThatMatchesNothing) {
  AdaptedMlp model;
  EXPECT_ERROR(freeze(model, {"up.*", "layers.*"}), "'layers.*'", "5 parameters", "'up.weight'");
  EXPECT_TRUE(model.up->weight->requires_grad());
}

}  // namespace
}  // namespace tessera::nn
