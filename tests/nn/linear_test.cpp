// Products of Linears and their gradients, compared with libtorch's bit by bit.

#include "tessera/nn/detail/linear_product.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <thread>

#include "nn/graphs.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/lora.h"
#include "testing/added_terms.h"
#include "testing/distributed.h"
#include "testing/memory.h"
#include "testing/module_values.h"

namespace tessera::nn {
namespace {

using detail::linear_product;
using testing::expect_close;
using testing::expect_equal_bits;
using testing::leaves_of;
using testing::libtorchs;
using testing::normal_values;
using testing::results_of;

using Tensors = std::vector<at::Tensor>;

TEST(LinearProduct, HasLibtorchsBits) {
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

TEST(LinearProduct, MayBeWrittenTo) {
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
  expect_close(results_of(second(linear_product), values), results_of(second(libtorchs), values));
}

TEST(LinearProduct, KeepsNoInputOfAFrozenWeight) {
  const at::Tensor weight = normal_values({6, 6}, 1);
  const at::Tensor x = normal_values({50, 6}, 2).requires_grad_();
  linear_product(x.mul(2), weight, {});
  const testing::AllocatedBytes memory;
  const at::Tensor y = linear_product(x.mul(2), weight, {});
  // A factor that mul() keeps is a number.
  EXPECT_LT(memory.now(), 2 * 4 * x.numel());
  y.sum().backward();
  EXPECT_CLOSE(x.grad(), weight.sum(0).mul(2).expand_as(x));
}

// Several products of one input.

using testing::AddedTerms;
using testing::full_tensor;

/// Query, key and value of different sizes.
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

void zero_gradients(ModuleBase& module) {
  for (const auto& [name, slot] : module.named_slots()) {
    slot->get().mutable_grad() = at::Tensor();
  }
}

/// The result, then the gradients of x and of the parameters.
Tensors results_of(Model& model, const at::Tensor& input, bool together) {
  model.together = together;
  zero_gradients(model);
  const at::Tensor x = input.detach().clone().requires_grad_();
  const at::Tensor y = model(x);
  y.backward(normal_values(y.sizes(), 99).to(y.scalar_type()));
  Tensors results{y.detach(), x.grad()};
  for (const auto& [name, slot] : model.named_slots()) {
    results.push_back(slot->get().grad());
  }
  return results;
}

/// All but the gradient of x have the same bits.
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

/// Terms that were added as they were computed, in one backward.
int added_products(Model& model, const at::Tensor& input = normal_values({5, 6}, 1)) {
  AddedTerms::reset();
  const AddedTerms counted;
  results_of(model, input, true);
  return AddedTerms::products();
}

TEST(LinearProducts, AreThoseOfEachCall) {
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

TEST(LinearProducts, MayHaveFrozenWeights) {
  Model model;
  model.k->weight->requires_grad_(false);
  expect_that_of_calls(model, normal_values({5, 6}, 1));
  EXPECT_EQ(added_products(model), 2);
  model.q->weight->requires_grad_(false);
  model.v->weight->requires_grad_(false);
  expect_that_of_calls(model, normal_values({5, 6}, 1));
}

TEST(LinearProducts, MayBeUsedInPart) {
  Model model;
  const at::Tensor x = normal_values({5, 6}, 1).requires_grad_();
  const Tensors y = linear_products(x, {*model.q, *model.k, *model.v});
  (y[2] * 2).sum().backward();
  EXPECT_CLOSE(x.grad(), 2 * model.v->weight->detach().expand({5, 6}));
  EXPECT_FALSE(model.q->weight->grad().defined());
}

TEST(LinearProducts, ServeSeveralBackwards) {
  Model model;
  const at::Tensor x = normal_values({5, 6}, 1).requires_grad_();
  const at::Tensor loss = model(x).square().sum();
  loss.backward({}, /*retain_graph=*/true);
  const at::Tensor once = x.grad().clone();
  loss.backward();
  EXPECT_CLOSE(x.grad(), 2 * once, 1e-5, 1e-5);
  EXPECT_THROWN(std::exception, loss.backward(), "backward through the graph a second time");
}

TEST(LinearProducts, ServeBackwardsOfOneResultEach) {
  Model model;
  const at::Tensor x = normal_values({5, 6}, 1).requires_grad_();
  // Nothing else of the graph is used by both.
  const Tensors y = linear_products(x.view({5, 6}), {*model.q, *model.k});
  y[0].sum().backward();
  y[1].sum().backward();
  EXPECT_CLOSE(x.grad(),
               (model.q->weight->detach().sum(0) + model.k->weight->detach().sum(0)).expand({5, 6}),
               1e-5, 1e-5);
  EXPECT_THROWN(std::exception, y[1].sum().backward(), "backward through the graph a second time");
}

// The gradient of a bias is that of the result then, in another shape.
TEST(LinearProducts, OfOneRowMayAddToTheBiasTwice) {
  Model model(/*bias=*/true);
  const auto gradient_of_x = [&](bool together) {
    model.together = together;
    zero_gradients(model);
    const at::Tensor x = normal_values({1, 6}, 1).requires_grad_();
    const at::Tensor y = model(x);
    at::cat({model(x), y}).square().sum().backward();
    return x.grad();
  };
  EXPECT_CLOSE(gradient_of_x(true), gradient_of_x(false), 1e-5, 1e-5);
}

TEST(LinearProducts, ShowAHookTheWholeGradient) {
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
    zero_gradients(model);
    const at::Tensor x = normal_values({5, 6}, 1).requires_grad_();
    const at::Tensor loss = model(x).pow(3).sum();
    torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true)[0]
        .square()
        .sum()
        .backward();
    return Tensors{x.grad(), model.q->weight->grad(), model.v->weight->grad()};
  };
  const Tensors together = second(true), apart = second(false);
  for (std::size_t i = 0; i < apart.size(); ++i) {
    EXPECT_CLOSE(together[i], apart[i], 1e-4, 1e-4) << i;
  }
}

TEST(LinearProducts, RunTheHooksOfEach) {
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

TEST(LinearProducts, OfInputsThatHooksReplaceAreTheirs) {
  Model model;
  model.k->add_forward_pre_hook([](auto&, TensorList inputs) { *inputs[0] = inputs[0]->mul(3); });
  expect_that_of_calls(model, normal_values({5, 6}, 1));
}

TEST(LinearProducts, OfAnInputThatAHookWritesToAreOfItsValuesThen) {
  Model model;
  model.k->add_forward_pre_hook([](auto&, TensorList inputs) { inputs[0]->mul_(3); });
  // Nothing of x is saved, so that it may be written to.
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

TEST(LinearProducts, WithAnAdapterACheckpointOrAnotherProductAreCalledApart) {
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

TEST(LinearProducts, InACheckpointAreComputedAgainOnce) {
  Model model;
  RMSNorm norm(6);
  testing::fill(norm);
  const auto forward = [&](const at::Tensor& x) { return model(norm(x)); };
  const at::Tensor expected = normal_values({5, 6}, 1).requires_grad_();
  forward(expected).square().sum().backward();
  const at::Tensor of_q = model.q->weight->grad().clone();
  zero_gradients(model);
  const testing::Counted counted;
  const at::Tensor x = expected.detach().clone().requires_grad_();
  checkpoint(counted.options, forward, x).square().sum().backward();
  EXPECT_EQUAL(x.grad(), expected.grad());
  EXPECT_EQUAL(model.q->weight->grad(), of_q);
  EXPECT_EQ(counted->recomputations, 1);
}

TEST(LinearProducts, NameTheModuleThatDoesNotFit) {
  Projections model;
  Linear other(5, 4);
  testing::fill(model);
  testing::fill(other);
  EXPECT_THROWN(std::exception, linear_products(normal_values({5, 6}, 1), {*model.q, other}),
                "5x6 and 5x4");
}

/// How x and the weights are split.
struct Split {
  Placement x, weights;
  int added;  ///< terms that are added without communication
};

class DistributedLinearProducts : public ::testing::TestWithParam<Split> {};

TEST_P(DistributedLinearProducts, AreThoseOfOneRank) {
  for (const int ranks : {2, 3}) {
    AddedTerms::reset();
    RunOnMesh({ranks}, {"tp"}, [&](const DeviceMesh& mesh) {
      const auto& [x_placement, weight_placement, added] = GetParam();
      Model one;
      Model model;
      const at::Tensor input = normal_values({5, 6}, 1);
      const Tensors expected = results_of(one, input, false);
      for (const auto& [name, slot] : model.named_slots()) {
        slot->set(distribute_tensor(slot->get().detach(), mesh, {weight_placement})
                      .tensor()
                      .detach()
                      .requires_grad_());
      }
      const at::Tensor x =
          distribute_tensor(input, mesh, {x_placement}).tensor().detach().requires_grad_();
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
      EXPECT_CLOSE(x.grad(), expected[1], 1e-5, 1e-5);
      EXPECT_CLOSE(model.q->weight->grad(), expected[2], 1e-5, 1e-5);
      EXPECT_CLOSE(model.v->weight->grad(), expected[4], 1e-5, 1e-5);
    });
    EXPECT_EQ(AddedTerms::products(), GetParam().added * ranks);
  }
}

// With split columns the gradient of x is a sum of the ranks' terms, and each rank adds its own.
INSTANTIATE_TEST_SUITE_P(Placements, DistributedLinearProducts,
                         ::testing::Values(Split{Replicate{}, Shard{0}, 2},
                                           Split{Shard{0}, Replicate{}, 2},
                                           Split{Replicate{}, Replicate{}, 2},
                                           Split{Shard{1}, Shard{1}, 2}));

// Products that add to a gradient in place.

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
  EXPECT_CLOSE(first, term(weight, 2) + term(weight, 3), 1e-5, 1e-5);
}

TEST(AddedGradient, IsThatOfEachUseOfAWeight) {
  const at::Tensor weight = leaf();
  (loss_of(weight, 2) + loss_of(weight, 3)).backward();
  AddedTerms::reset();
  const AddedTerms counted;
  (loss_of(weight, 4) + loss_of(weight, 5) + weight.square().sum()).backward();
  EXPECT_EQ(AddedTerms::products(), 2);
  const at::Tensor sum = term(weight, 2) + term(weight, 3) + term(weight, 4) + term(weight, 5);
  EXPECT_CLOSE(weight.grad(), sum + 2 * weight.detach(), 1e-5, 1e-5);
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
  EXPECT_EQUAL(seen, term(weight, 3));
  EXPECT_CLOSE(weight.grad(), term(weight, 2) + 10 * term(weight, 3), 1e-5, 1e-4);
}

TEST(AddedGradient, IsReturnedToWhoAsksForIt) {
  const at::Tensor weight = leaf();
  loss_of(weight, 2).backward();
  const at::Tensor before = weight.grad().clone();
  EXPECT_EQUAL(torch::autograd::grad({loss_of(weight, 3)}, {weight})[0], term(weight, 3));
  EXPECT_EQUAL(weight.grad(), before);
}

TEST(AddedGradient, MayBeRecorded) {
  const at::Tensor weight = leaf();
  loss_of(weight, 2).backward();
  loss_of(weight, 3).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  EXPECT_TRUE(weight.grad().requires_grad());
  EXPECT_CLOSE(weight.grad().detach(), term(weight, 2) + term(weight, 3), 1e-5, 1e-5);
  // To a gradient with a graph it is not added in place.
  loss_of(weight, 4).backward();
  EXPECT_CLOSE(weight.grad().detach(), term(weight, 2) + term(weight, 3) + term(weight, 4), 1e-5,
               1e-5);
  weight.mutable_grad() = at::Tensor();
}

// As master gradients of weights of a narrower type.
TEST(AddedGradient, MayBeOfAnotherTypeThanTheSum) {
  const at::Tensor weight = leaf().detach().to(at::kBFloat16).requires_grad_();
  const at::Tensor sum = at::zeros({4, 6});
  weight.mutable_grad() = sum;
  loss_of(weight, 2).backward();
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
  EXPECT_CLOSE(weight.grad(), term(weight.detach().to(at::kFloat), 2), 0.05, 0.5);
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
  EXPECT_CLOSE(weight.grad(), sum, 1e-4, 1e-3);
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
    EXPECT_CLOSE(weight.grad(), sum, 1e-5, 1e-5);
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
