#include "tessera/nn/checkpoint.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <stdexcept>

#include "checkpointed.h"
#include "tessera/core/error.h"
#include "testing/errors.h"
#include "testing/memory/allocated_bytes.h"

namespace tessera::nn {
namespace {

using testing::Counted;
using testing::leaf;
using testing::message_of;

at::Tensor layer(const at::Tensor& x, const at::Tensor& weight) {
  return at::gelu(x.mm(weight)).tanh();
}

/// Gradients of x and weight, of `run`'s result.
template <class Run>
std::pair<at::Tensor, at::Tensor> gradients(Run run) {
  const at::Tensor x = leaf({5, 7}, 1), weight = leaf({7, 7}, 2);
  run(x, weight).square().sum().backward();
  return {x.grad(), weight.grad()};
}

TEST(Checkpoint, ChangesNoBitOfTheGradients) {
  const auto plain = gradients(layer);
  const auto again =
      gradients([](const at::Tensor& x, const at::Tensor& w) { return checkpoint(layer, x, w); });
  EXPECT_TRUE(at::equal(plain.first, again.first));
  EXPECT_TRUE(at::equal(plain.second, again.second));
}

TEST(Checkpoint, TakesWhatTheFunctionCapturesAndArgumentsOfAnyKind) {
  const at::Tensor x = leaf({3}, 1), y = leaf({3}, 2), weight = leaf({3}, 3);
  const auto fn = [weight](std::pair<at::Tensor, int> a, std::optional<at::Tensor> b) {
    return std::vector<at::Tensor>{(a.first * weight).exp() * a.second, *b * weight};
  };
  const auto results = checkpoint(fn, std::pair(x, 3), std::optional(y));
  (results[0].sum() + results[1].sum()).backward();
  const at::Tensor e = (x * weight).exp() * 3;
  EXPECT_TRUE(at::allclose(weight.grad(), e * x + y));
  EXPECT_TRUE(at::allclose(y.grad(), weight));
}

TEST(Checkpoint, RecomputesOnceABackward) {
  Counted counted;
  const at::Tensor x = leaf({4}, 1);
  checkpoint(
      counted.options, [](const at::Tensor& t) { return t.exp().sin() * t; }, x)
      .sum()
      .backward();
  EXPECT_EQ(counted->regions, 1);
  EXPECT_EQ(counted->recomputations, 1);
  EXPECT_EQ(counted->packed, 4);  // exp's result, sin's argument, both of the product
  EXPECT_EQ(counted->repacked, 4);
}

TEST(Checkpoint, StopsOnceTheLastTensorIsThere) {
  Counted counted;
  int ends = 0;
  const auto fn = [&](const at::Tensor& t) {
    const at::Tensor y = t.exp();
    ++ends;
    return y + 1;
  };
  checkpoint(counted.options, fn, leaf({4}, 1)).sum().backward();
  EXPECT_EQ(ends, 1);
  EXPECT_EQ(counted->early_stops, 1);
  counted.options.early_stop = false;
  checkpoint(counted.options, fn, leaf({4}, 1)).sum().backward();
  EXPECT_EQ(ends, 3);
  EXPECT_EQ(counted->early_stops, 1);
}

TEST(Checkpoint, ServesARetainedGraphAgain) {
  Counted counted;
  const at::Tensor x = leaf({4}, 1);
  const at::Tensor y = checkpoint(counted.options, [](const at::Tensor& t) { return t.exp(); }, x);
  const at::Tensor loss = y.sum();
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
  EXPECT_TRUE(at::equal(x.grad(), x.exp() * 2));
  EXPECT_EQ(counted->recomputations, 2);
}

TEST(Checkpoint, ServesAGradientOfAGradient) {
  const at::Tensor x = leaf({4}, 1);
  const at::Tensor y = checkpoint([](const at::Tensor& t) { return t.sin() * t; }, x).sum();
  const at::Tensor first = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
  first.sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), x.cos() * 2 - x * x.sin()));
}

/// Asks for its saved tensor more often than it need.
struct AsksTwice : torch::autograd::Function<AsksTwice> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const at::Tensor once = context->get_saved_variables()[0];
    return {grads[0] * (once + context->get_saved_variables()[0])};
  }
};

TEST(Checkpoint, RecomputesForANodeThatAsksTwice) {
  Counted counted;
  const at::Tensor x = leaf({4}, 1);
  const auto fn = [](const at::Tensor& t) { return AsksTwice::apply(t * 3); };
  checkpoint(counted.options, fn, x).sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), x * 18));
  EXPECT_EQ(counted->recomputations, 2);
}

TEST(Checkpoint, Nests) {
  Counted inner, outer;
  const auto plain = gradients(
      [](const at::Tensor& x, const at::Tensor& w) { return layer(layer(x.cos(), w), w).exp(); });
  const auto nested = gradients([&](const at::Tensor& x, const at::Tensor& w) {
    const auto fn = [&inner](const at::Tensor& a, const at::Tensor& b) {
      const at::Tensor y = checkpoint(inner.options, layer, a.cos(), b);
      return checkpoint(inner.options, layer, y, b).exp();
    };
    return checkpoint(outer.options, fn, x, w);
  });
  EXPECT_TRUE(at::equal(plain.first, nested.first));
  EXPECT_TRUE(at::equal(plain.second, nested.second));
  EXPECT_EQ(outer->recomputations, 1);
  EXPECT_EQ(inner->regions, 4);  // two in forward, two in the outer recomputation
  EXPECT_EQ(inner->recomputations, 2);
}

TEST(Checkpoint, DoesNothingWithoutGradients) {
  Counted counted;
  const c10::AutoGradMode no_grad(false);
  checkpoint(counted.options, layer, leaf({2, 3}, 1), leaf({3, 3}, 2));
  EXPECT_EQ(counted->regions, 0);
}

TEST(Checkpoint, KeepsLess) {
  const at::Tensor weight = leaf({32, 32}, 1);
  const auto kept = [&](bool checkpointed) {
    at::Tensor x = leaf({64, 32}, 2);
    const testing::AllocatedBytes bytes;
    const auto fn = [](const at::Tensor& a, const at::Tensor& w) { return layer(layer(a, w), w); };
    const at::Tensor y = checkpointed ? checkpoint(fn, x, weight) : fn(x, weight);
    return bytes.now();
  };
  // Each of two layers saves mm's and tanh's results; the last one is the result itself.
  const std::int64_t tensor = 64 * 32 * 4;
  EXPECT_EQ(kept(false), 4 * tensor);
  EXPECT_LT(kept(true), tensor + 512);
}

TEST(Checkpoint, FreesRecomputedTensorsAsBackwardTakesThem) {
  const at::Tensor x = leaf({64, 32}, 2);
  const testing::AllocatedBytes bytes;
  checkpoint([](const at::Tensor& t) { return t.exp().sin().exp().sin(); }, x).sum().backward();
  EXPECT_LT(bytes.now(), 64 * 32 * 4 + 512);  // the gradient of x
}

TEST(Checkpoint, FreesTheFunctionWithTheGraph) {
  const auto token = std::make_shared<int>(0);
  const auto fn = [token](const at::Tensor& t) { return t.exp(); };
  checkpoint(fn, leaf({4}, 1)).sum().backward();
  EXPECT_EQ(token.use_count(), 2);
  { const at::Tensor dropped = checkpoint(fn, leaf({4}, 1)); }
  EXPECT_EQ(token.use_count(), 2);
  {
    const auto failing = [fn](const at::Tensor& t) {
      const at::Tensor y = fn(t);
      if (y.defined()) {
        throw std::runtime_error("in forward");
      }
      return y;
    };
    EXPECT_THROWN(std::runtime_error, checkpoint(failing, leaf({4}, 1)), "in forward");
  }
  EXPECT_EQ(token.use_count(), 2);
}

TEST(Checkpoint, PassesOnWhatTheRecomputationThrowsAndRecovers) {
  bool broken = false;
  const auto fn = [&](const at::Tensor& t) {
    const at::Tensor y = t.exp();
    if (broken) {
      throw std::runtime_error("no luck");
    }
    return y.sin();
  };
  const at::Tensor x = leaf({4}, 1);
  const at::Tensor loss = checkpoint(fn, x).sum();
  broken = true;
  EXPECT_EQ(message_of([&] { loss.backward({}, /*retain_graph=*/true); }), "no luck");
  EXPECT_FALSE(is_recomputing());
  broken = false;
  loss.backward();
  EXPECT_TRUE(at::allclose(x.grad(), x.exp() * x.exp().cos()));
}

TEST(Checkpoint, KnowsThatItRecomputes) {
  std::vector<bool> seen;
  const auto fn = [&](const at::Tensor& t) {
    seen.push_back(is_recomputing());
    return t.exp();
  };
  checkpoint(fn, leaf({4}, 1)).sum().backward();
  EXPECT_EQ(seen, (std::vector<bool>{false, true}));
}

TEST(CheckpointDeathTest, RefusesAProcessWithAnotherEngine) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  using torch::autograd::Engine;
  struct Other : Engine {
    ~Other() override { stop(); }
    static Engine& instance() {
      static Other engine;
      return engine;
    }
    Other() = default;
  };
  const auto run = [] {
    torch::autograd::set_default_engine_stub(&Other::instance);
    const auto fn = [](const at::Tensor& t) { return t.exp(); };
    std::cerr << message_of([&] { checkpoint(fn, leaf({4}, 1)); }) << std::endl;
    std::exit(0);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(0), "needs its own autograd engine");
}

}  // namespace
}  // namespace tessera::nn
