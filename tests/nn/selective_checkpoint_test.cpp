// A policy per operator: what is kept, what is computed again.

#include "nn/graphs.h"
#include "tessera/comm/trace.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/functional.h"
#include "testing/distributed.h"
#include "testing/memory.h"

namespace tessera::nn {
namespace {

using testing::Counted;
using testing::leaf;
using testing::message_of;

at::Tensor dense(const at::Tensor& x, const at::Tensor& weight) {
  return at::gelu(x.mm(weight)).tanh().mm(weight).sin();
}

Counted keeping(OperatorPolicy policy) {
  Counted counted;
  counted.options.policy = std::move(policy);
  return counted;
}

TEST(SelectiveCheckpoint, KeepsWhatThePolicySaysAndRecomputesTheRest) {
  const Counted counted = keeping(save_operators({"aten::mm"}));
  const at::Tensor x = leaf({5, 7}, 1), w = leaf({7, 7}, 2);
  const at::Tensor y = leaf({5, 7}, 1), v = leaf({7, 7}, 2);
  dense(x, w).sum().backward();
  checkpoint(counted.options, dense, y, v).sum().backward();
  EXPECT_EQUAL(x.grad(), y.grad());
  EXPECT_EQUAL(w.grad(), v.grad());
  EXPECT_EQ(counted->kept_operators, 2);
  EXPECT_EQ(counted->replayed_operators, 2);
  EXPECT_EQ(counted->recomputed_operators,
            2);  // gelu, tanh; sin comes after the last that is saved
}

TEST(SelectiveCheckpoint, TellsThePolicyWhichCallItIs) {
  std::vector<std::pair<std::string, std::size_t>> calls;
  const auto policy = [&](const OperatorCall& call) {
    calls.emplace_back(call.name, call.index);
    const bool second = call.name == "aten::mm" && call.index % 2 == 1;
    return second ? SavePolicy::kMustSave : SavePolicy::kPreferRecompute;
  };
  const Counted counted = keeping(policy);
  checkpoint(counted.options, dense, leaf({5, 7}, 1), leaf({7, 7}, 2)).sum().backward();
  using Call = std::pair<std::string, std::size_t>;
  EXPECT_EQ(calls, (std::vector<Call>{{"aten::mm", 0},
                                      {"aten::gelu", 0},
                                      {"aten::tanh", 0},
                                      {"aten::mm", 1},
                                      {"aten::sin", 0}}));
  EXPECT_EQ(counted->replayed_operators, 1);
  EXPECT_EQ(counted->recomputed_operators, 3);
}

TEST(SelectiveCheckpoint, KeepsResultsOfThisLibrarysOperators) {
  const auto gated = [](const at::Tensor& x, const at::Tensor& weight) {
    const at::Tensor y = rms_norm(x, weight, 1e-5);
    return silu_mul(y, x).sin();
  };
  const Counted counted = keeping(save_operators({"tessera::rms_norm", "tessera::silu_mul"}));
  const at::Tensor x = leaf({5, 7}, 1), w = leaf({7}, 2);
  const at::Tensor y = leaf({5, 7}, 1), v = leaf({7}, 2);
  gated(x, w).sum().backward();
  checkpoint(counted.options, gated, y, v).sum().backward();
  EXPECT_EQUAL(x.grad(), y.grad());
  EXPECT_EQUAL(w.grad(), v.grad());
  EXPECT_EQ(counted->kept_operators, 2);
  EXPECT_EQ(counted->replayed_operators, 2);
  EXPECT_EQ(counted->recomputed_operators, 0);
}

// What is kept is not exchanged again.
TEST_ON_MESH(SelectiveCheckpoint, KeepsLossesOfASplitVocabulary, {2}, {"tp"}) {
  const at::Tensor targets =
      distribute_tensor(at::arange(5, at::kLong), mesh, {Replicate{}}).tensor();
  const auto loss = [&](const at::Tensor& logits) {
    return tessera::detail::cross_entropy(logits.mul(2), targets).sin();
  };
  const auto split = [&] {
    const at::Tensor values = testing::uniform_values({5, 7}, 1);
    return distribute_tensor(values, mesh, {Shard{1}}).tensor().detach().requires_grad_();
  };
  const at::Tensor x = split(), y = split();
  loss(x).sum().backward();
  const Counted counted = keeping(save_operators({"tessera::cross_entropy"}));
  const comm::TrafficTable before = rank.world()->traffic().table();
  checkpoint(counted.options, loss, y).sum().backward();
  EXPECT_EQ(comm::total(rank.world()->traffic().since(before)).calls, 2);
  EXPECT_EQUAL(local_tensor(x.grad()), local_tensor(y.grad()));
  EXPECT_EQ(counted->kept_operators, 1);
  EXPECT_EQ(counted->replayed_operators, 1);
  EXPECT_EQ(counted->recomputed_operators, 1);
}

TEST(SelectiveCheckpoint, DoesNotAskOfViewsWritesAndFactories) {
  std::vector<std::string> names;
  const auto policy = [&](const OperatorCall& call) {
    names.emplace_back(call.name);
    return SavePolicy::kMustSave;
  };
  const auto fn = [](const at::Tensor& x) {
    const at::Tensor y = at::zeros({4}).add_(1).view({2, 2}).flatten();
    return x.exp().transpose(0, 0).mul(y);
  };
  const Counted counted = keeping(policy);
  checkpoint(counted.options, fn, leaf({4}, 1)).sum().backward();
  EXPECT_EQ(names, (std::vector<std::string>{"aten::exp", "aten::mul.Tensor"}));
}

// Its mask is memory that is filled after it was made.
TEST(SelectiveCheckpoint, KeepsEverythingOfAFunctionWithDropout) {
  const auto everything = [](const OperatorCall&) { return SavePolicy::kMustSave; };
  const auto fn = [](const at::Tensor& x) { return at::dropout(x.exp(), 0.5, true).sin(); };
  std::vector<at::Tensor> gradients;
  for (const bool checkpointed : {false, true}) {
    at::manual_seed(5);
    const at::Tensor x = leaf({4, 5}, 1);
    (checkpointed ? checkpoint(keeping(everything).options, fn, x) : fn(x)).sum().backward();
    gradients.push_back(x.grad());
  }
  EXPECT_EQUAL(gradients[0], gradients[1]);
}

TEST(SelectiveCheckpoint, ServesARetainedGraphAgain) {
  const Counted counted = keeping(save_matmuls_and_attention());
  const at::Tensor x = leaf({5, 7}, 1), w = leaf({7, 7}, 2);
  const at::Tensor loss = checkpoint(counted.options, dense, x, w).sum();
  loss.backward({}, /*retain_graph=*/true);
  const at::Tensor once = x.grad().clone();
  loss.backward();
  EXPECT_EQUAL(x.grad(), once + once);
  EXPECT_EQ(counted->replayed_operators, 4);
}

TEST(SelectiveCheckpoint, KeepsNothingThatIsNotReached) {
  const at::Tensor x = leaf({64, 32}, 1), w = leaf({32, 32}, 2);
  const auto bytes_kept = [&](OperatorPolicy policy) {
    const Counted counted = keeping(std::move(policy));
    const testing::AllocatedBytes bytes;
    const auto fn = [](const at::Tensor& a, const at::Tensor& b) { return a.mm(b).exp().mm(b); };
    const at::Tensor y = checkpoint(counted.options, fn, x, w);
    return bytes.now() - static_cast<std::int64_t>(y.nbytes());
  };
  const std::int64_t tensor = 64 * 32 * 4;
  const std::int64_t nothing = bytes_kept({});
  EXPECT_LT(nothing, 512);
  EXPECT_EQ(bytes_kept(save_operators({"aten::mm"})) - nothing, tensor);  // not the last one
}

TEST(SelectiveCheckpoint, FreesWhatItKeptAsBackwardUsesIt) {
  const at::Tensor x = leaf({64, 32}, 1), w = leaf({32, 32}, 2);
  const Counted counted = keeping(save_operators({"aten::mm"}));
  const testing::AllocatedBytes bytes;
  checkpoint(counted.options, dense, x, w).sum().backward();
  EXPECT_LT(bytes.now(), 64 * 32 * 4 + 32 * 32 * 4 + 512);  // the gradients
}

TEST(SelectiveCheckpoint, RecomputesInARegionInsideOne) {
  Counted inner;
  const Counted outer = keeping(save_operators({"aten::mm"}));
  const at::Tensor x = leaf({5, 7}, 1), w = leaf({7, 7}, 2);
  const at::Tensor y = leaf({5, 7}, 1), v = leaf({7, 7}, 2);
  dense(x.exp(), w).exp().sum().backward();
  const auto fn = [&](const at::Tensor& a, const at::Tensor& b) {
    return checkpoint(inner.options, dense, a.exp(), b).exp();
  };
  checkpoint(outer.options, fn, y, v).sum().backward();
  EXPECT_EQUAL(x.grad(), y.grad());
  EXPECT_EQUAL(w.grad(), v.grad());
  EXPECT_EQ(outer->replayed_operators, 2);  // while the outer region makes exp's argument again
  EXPECT_EQ(inner->recomputations, 1);
}

// PyTorch's selective checkpointing draws other numbers after a random operator that was kept.
TEST(SelectiveCheckpoint, DrawsTheNumbersOfForwardAfterARandomOperatorThatWasKept) {
  const auto fn = [](const at::Tensor& x) {
    const at::Tensor y = std::get<0>(at::native_dropout(x.exp(), 0.5, true));
    return at::dropout(y.square(), 0.5, true).square();
  };
  const auto run = [&](const Counted* counted) {
    at::manual_seed(3);
    const at::Tensor x = leaf({50}, 1);
    (counted ? checkpoint(counted->options, fn, x) : fn(x)).sum().backward();
    return x.grad();
  };
  const Counted counted = keeping(save_operators({"aten::native_dropout"}));
  EXPECT_EQUAL(run(&counted), run(nullptr));
  EXPECT_EQ(counted->replayed_operators, 1);
}

TEST(SelectiveCheckpoint, Refusals) {
  const Counted counted = keeping(save_operators({"aten::mm"}));
  const auto fn = [](const at::Tensor& a, const at::Tensor& b) { return a.mm(b).add_(1).sin(); };
  const at::Tensor loss = checkpoint(counted.options, fn, leaf({2, 2}, 1), leaf({2, 2}, 2)).sum();
  EXPECT_EQ(message_of([&] { loss.backward(); }),
            "checkpoint: the result of aten::mm, call 0 of its region, was saved and then modified "
            "in place; let the policy recompute it, or write to a copy");
  {
    // matmul makes (6, 2) of (2, 3, 2), and a view of the product with its own version.
    const Counted counted = keeping(save_operators({"aten::mm"}));
    const auto fn = [](const at::Tensor& a, const at::Tensor& b) {
      return a.matmul(b).add_(1).sin();
    };
    const at::Tensor loss =
        checkpoint(counted.options, fn, leaf({2, 3, 2}, 1), leaf({2, 2}, 2)).sum();
    EXPECT_CONTAINS(message_of([&] { loss.backward(); }),
                    "the result of aten::mm, call 0 of its region, was saved and then modified");
  }
}

TEST_ON_MESH(SelectiveCheckpoint, KeepsResultsOfDistributedTensors, {3}, {"dp"}) {
  const auto run = [&](const Counted* counted) {
    const at::Tensor x = distribute_tensor(leaf({5, 7}, 1).detach(), mesh, {Shard{0}});
    const at::Tensor w = distribute_tensor(leaf({7, 7}, 2).detach(), mesh, {Replicate{}});
    x.requires_grad_();
    w.requires_grad_();
    (counted ? checkpoint(counted->options, dense, x, w) : dense(x, w)).sum().backward();
    return std::pair(DistributedTensor(x.grad()).full_tensor(),
                     DistributedTensor(w.grad()).full_tensor());
  };
  const Counted counted = keeping(save_operators({"aten::mm"}));
  const auto plain = run(nullptr);
  const auto again = run(&counted);
  EXPECT_EQUAL(plain.first, again.first);
  EXPECT_EQUAL(plain.second, again.second);
  EXPECT_EQ(counted->replayed_operators, 2);
  EXPECT_EQ(counted->recomputed_operators, 2);
}

}  // namespace
}  // namespace tessera::nn
