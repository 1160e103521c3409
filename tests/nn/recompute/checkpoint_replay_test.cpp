// What a recomputation must find as forward found it, and what it must refuse.
#include <ATen/autocast_mode.h>

#include "checkpointed.h"
#include "tessera/dtensor/manual_seed.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/functional.h"
#include "testing/distributed.h"

namespace tessera::nn {
namespace {

using testing::Counted;
using testing::leaf;
using testing::message_of;

/// The gradient of x, and two numbers drawn afterwards.
template <class Run>
std::pair<at::Tensor, at::Tensor> drawn(Run run) {
  at::manual_seed(5);
  const at::Tensor x = leaf({40}, 1);
  const at::Tensor y = run(x);
  at::rand({3});  // between forward and backward
  y.sum().backward();
  return {x.grad(), at::rand({2})};
}

TEST(CheckpointReplay, DrawsTheNumbersOfForward) {
  const auto fn = [](const at::Tensor& x) { return at::dropout(x.exp(), 0.5, true).square(); };
  const auto plain = drawn(fn);
  const auto again = drawn([&](const at::Tensor& x) { return checkpoint(fn, x); });
  EXPECT_TRUE(at::equal(plain.first, again.first));
  EXPECT_TRUE(at::equal(plain.second, again.second)) << "the generator was left elsewhere";
}

TEST(CheckpointReplay, DrawsOtherNumbersWithoutPreserveRngState) {
  const auto fn = [](const at::Tensor& x) { return at::dropout(x.exp(), 0.5, true).square(); };
  const auto plain = drawn(fn);
  const auto again =
      drawn([&](const at::Tensor& x) { return checkpoint({.preserve_rng_state = false}, fn, x); });
  EXPECT_FALSE(at::equal(plain.first, again.first));
}

TEST(CheckpointReplay, DrawsTheNumbersOfDropoutInAttention) {
  const auto fn = [](const at::Tensor& x) {
    const at::Tensor heads = x.view({1, 2, 5, 4});
    return at::scaled_dot_product_attention(heads, heads, heads, {}, 0.5, true).square();
  };
  const auto plain = drawn(fn);
  const auto again = drawn([&](const at::Tensor& x) { return checkpoint(fn, x); });
  EXPECT_TRUE(at::equal(plain.first, again.first));
}

TEST(CheckpointReplay, CountsTheCallsOfDropoutModulesOnce) {
  const auto run = [](bool checkpointed) {
    Dropout dropout(0.5);
    dropout.set_key({3, 4});
    const at::Tensor x = leaf({64}, 1);
    const auto fn = [&](const at::Tensor& t) {
      return dropout(dropout(t.exp()).square()).square();
    };
    const at::Tensor first = checkpointed ? checkpoint(fn, x) : fn(x);
    const at::Tensor second = checkpointed ? checkpoint(fn, x) : fn(x);
    (first.sum() + second.sum()).backward();
    return std::pair(x.grad(), dropout.calls());
  };
  const auto [plain, calls] = run(false);
  const auto [again, calls_again] = run(true);
  EXPECT_TRUE(at::equal(plain, again));
  EXPECT_EQ(calls_again, calls);
}

TEST(CheckpointReplay, CountsTheCallsOfDropoutModulesOnceWhenNested) {
  const auto run = [](bool checkpointed) {
    Dropout dropout(0.5);
    dropout.set_key({3, 4});
    const at::Tensor x = leaf({64}, 1);
    const auto half = [&](const at::Tensor& t) { return dropout(t.exp()).square(); };
    const auto whole = [&](const at::Tensor& t) {
      const at::Tensor y = dropout(t);
      return checkpointed ? checkpoint(half, y) : half(y);
    };
    (checkpointed ? checkpoint(whole, x) : whole(x)).sum().backward();
    return std::pair(x.grad(), dropout.calls());
  };
  EXPECT_TRUE(at::equal(run(true).first, run(false).first));
  EXPECT_EQ(run(true).second, 2u);
}

TEST(CheckpointReplay, TakesThePartOfTheBatchOfForward) {
  const auto fn = [](const at::Tensor& t) { return nn::dropout(t, 0.5, {1, 2}).square(); };
  const auto run = [&](bool checkpointed) {
    const at::Tensor x = leaf({64}, 1);
    const at::Tensor y = [&] {
      const BatchPart part(3, 4);
      return checkpointed ? checkpoint(fn, x) : fn(x);
    }();
    y.sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(at::equal(run(true), run(false)));
}

TEST(CheckpointReplay, CastsAsForwardDid) {
  const auto fn = [](const at::Tensor& x, const at::Tensor& w) { return x.mm(w).to(at::kFloat); };
  const auto run = [&](bool checkpointed) {
    const at::Tensor x = leaf({4, 4}, 1), w = leaf({4, 4}, 2);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const at::Tensor y = checkpointed ? checkpoint(fn, x, w) : fn(x, w);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    y.square().sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(at::equal(run(true), run(false)));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

/// Backward of a function that does `forward` first and `again` when it is recomputed.
std::string error_of_change(std::function<at::Tensor(const at::Tensor&)> forward,
                            std::function<at::Tensor(const at::Tensor&)> again,
                            const CheckpointOptions& options = {}) {
  const at::Tensor x = leaf({4}, 1);
  const auto fn = [&](const at::Tensor& t) { return is_recomputing() ? again(t) : forward(t); };
  return message_of([&] { checkpoint(options, fn, x).sum().backward(); });
}

TEST(CheckpointReplay, RefusesOtherSizes) {
  EXPECT_EQ(error_of_change([](auto& t) { return t.exp(); }, [](auto& t) { return t[0].exp(); }),
            "checkpoint: the recomputation saved tensor 0 for backward as Float[] on cpu, but the "
            "forward saved it as Float[4] on cpu; the checkpointed function must do the same both "
            "times: let it depend on its arguments, parameters and random numbers only");
}

TEST(CheckpointReplay, RefusesAnotherType) {
  const std::string error = error_of_change([](auto& t) { return t.exp(); },
                                            [](auto& t) { return t.to(at::kDouble).exp(); });
  EXPECT_CONTAINS(error, "as Double[4] on cpu, but the forward saved it as Float[4]");
}

TEST(CheckpointReplay, RefusesToSaveLess) {
  const std::string error =
      error_of_change([](auto& t) { return t.exp().sin(); }, [](auto& t) { return t.exp(); });
  EXPECT_CONTAINS(error, "saved 1 tensors for backward, but the forward saved 2");
}

TEST(CheckpointReplay, RefusesToSaveMoreWhereItRunsToTheEnd) {
  const auto less = [](auto& t) { return t.exp(); };
  const auto more = [](auto& t) { return t.exp().sin(); };
  EXPECT_EQ(error_of_change(less, more), "");
  const std::string error = error_of_change(less, more, {.early_stop = false});
  EXPECT_CONTAINS(error, "more tensors for backward than the forward, which saved 1");
}

TEST(CheckpointReplay, RefusesAnInputThatWasModifiedInPlace) {
  const at::Tensor x = leaf({4}, 1) * 2;
  const at::Tensor loss = checkpoint([](const at::Tensor& t) { return t.exp(); }, x).sum();
  {
    const c10::AutoGradMode no_grad(false);
    x.add_(1);
  }
  EXPECT_THROWN(std::exception, loss.backward(), "modified by an inplace operation");
}

TEST(CheckpointReplay, RefusesASavedTensorThatTheFunctionModifiesInPlace) {
  const auto fn = [](const at::Tensor& t) {
    const at::Tensor y = t.exp();  // backward needs it
    y.add_(1);
    return y.sin();
  };
  const at::Tensor loss = checkpoint(fn, leaf({4}, 1)).sum();
  EXPECT_THROWN(std::exception, loss.backward(), "modified in place after it was saved");
}

TEST(CheckpointReplay, RestoresTheStateOfDistributedRandomNumbers) {
  manual_seed(11);
  const at::Tensor x = leaf({4}, 1);
  std::vector<std::uint64_t> calls;
  const auto fn = [&](const at::Tensor& t) {
    calls.push_back(random_state().calls);
    return t.exp();
  };
  const at::Tensor loss = checkpoint(fn, x).sum();
  set_random_state({11, 7});
  loss.backward();
  EXPECT_EQ(calls, (std::vector<std::uint64_t>{0, 0}));
  EXPECT_EQ(random_state().calls, 7u);
}

TEST(CheckpointReplay, DrawsTheNumbersOfForwardOnDistributedTensors) {
  RunOnMesh({3}, {"tp"}, [](const DeviceMesh& mesh) {
    const auto fn = [](const at::Tensor& x) { return at::dropout(x.exp(), 0.5, true).square(); };
    const auto run = [&](bool checkpointed) {
      manual_seed(2);
      const at::Tensor x = distribute_tensor(leaf({10, 3}, 1).detach(), mesh, {Shard{0}});
      x.requires_grad_();
      const at::Tensor loss = (checkpointed ? checkpoint(fn, x) : fn(x)).sum();
      at::dropout(x.detach(), 0.5, true);  // between forward and backward
      loss.backward();
      EXPECT_EQ(random_state().calls, 2u);
      return DistributedTensor(x.grad()).full_tensor();
    };
    EXPECT_TRUE(at::equal(run(true), run(false)));
  });
}

}  // namespace
}  // namespace tessera::nn
