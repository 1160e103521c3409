// Plain tensors beside distributed ones: what may differ between ranks is refused, and what counts
// as replicated has the gradient of one rank.

#include <ATen/ATen.h>
#include <ATen/TensorIndexing.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>

#include <functional>
#include <vector>

#include "tessera/dtensor/detail/parameter_name.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/strict_scope.h"
#include "testing/environment.h"
#include "testing/errors.h"
#include "testing/ranks.h"
#include "testing/values.h"

namespace tessera {
namespace {

using testing::values;

/// A leaf of 5 rows, unevenly split.
at::Tensor leaf(const DeviceMesh& mesh, const Placement& placement = Shard{0}) {
  return distribute_tensor(values({5, 3}), mesh, {placement}).tensor().detach().requires_grad_();
}

TEST(PlainNumber, OfEachRankIsRefusedBesideADistributedOne) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor penalty = leaf(rank.mesh({2}, {"dp"})).square().sum();
    const at::Tensor loss = values({4}).mul(rank.rank() + 1).requires_grad_().mean();
    EXPECT_ERROR(loss + 0.01 * penalty, "aten::add.Tensor mixes",
                 "make the distributed one plain by DistributedTensor(x).full_tensor()",
                 "full_tensor(Placements{Partial{ReduceOp::kAvg}})");
    EXPECT_ERROR(penalty * loss.view({1}), "a plain number with a gradient may be another on each");
    EXPECT_NO_THROW((0.5 * penalty / at::full({}, 3.0) + 1).backward());
  });
}

TEST(PlainNumber, ThatTheProgramWritesIsNone) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor x = leaf(rank.mesh({2}, {"dp"})).detach();
    const std::vector<std::function<at::Tensor(at::Tensor)>> functions{
        [](auto t) { return 1 - t * 2.0; },
        [](auto t) { return at::where(t > 0.5, t, 0.25) + at::where(t > 0, -1.0, t); },
        [](auto t) { return at::where(t > 0.5, 1.0, 0.5); },
        [](auto t) { return at::pow(2.0, t.clamp(-0.5, 0.5)).masked_fill(t > 0, 3); },
        [](auto t) { return at::xlogy(t.abs(), 2.0).add_(at::copysign(t, -1.0)); },
        [](auto t) { return t.index_put_({0}, 1.5); },
    };
    for (std::size_t i = 0; i < functions.size(); ++i) {
      const at::Tensor found = functions[i](x.clone());
      EXPECT_TRUE(at::allclose(DistributedTensor(found).full_tensor(), functions[i](values({5, 3})),
                               1e-5, 1e-8, true))
          << i;
    }
  });
}

TEST(PlainNumber, WithoutAGradientIsComparedWhereChecksAreAskedFor) {
  const testing::DebugChecks debug("1");
  RunRanks(2, [](Rank& rank) {
    const at::Tensor penalty = leaf(rank.mesh({2}, {"dp"})).square().sum();
    EXPECT_ERROR(penalty - at::full({}, rank.rank(), at::kDouble),
                 "aten::sub.Tensor takes plain tensors for the same on every rank");
    EXPECT_NO_THROW((2 * penalty - at::full({}, 3.0)).backward());
  });
}

TEST(PlainNumber, MayBeAddedToTheWholeOfADistributedOne) {
  const at::Tensor alone = values({5, 3}).requires_grad_();
  at::square(alone).sum().mul(3).backward();
  RunRanks(2, [&](Rank& rank) {
    const at::Tensor weight = leaf(rank.mesh({2}, {"dp"}));
    const at::Tensor loss = values({4}).mul(rank.rank() + 1).requires_grad_().mean();
    const DistributedTensor penalty(weight.square().sum());
    // Losses of 1 and 3 on the ranks are 2 in the mean.
    const at::Tensor factor = at::full({}, 1.0 + 2 * rank.rank(), at::kDouble);
    (loss + penalty.full_tensor() +
     factor * penalty.full_tensor(Placements{Partial{ReduceOp::kAvg}}))
        .backward();
    EXPECT_TRUE(at::allclose(DistributedTensor(weight.grad()).full_tensor(), alone.grad()));
  });
}

TEST(PlainFactor, InAReplicationScopeHasAPlainAndWholeGradient) {
  RunRanks(3, [](Rank& rank) {
    const at::Tensor rows = leaf(rank.mesh({3}, {"dp"})).detach();
    const ReplicationScope same_on_every_rank;
    for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{}, {1}, {3}, {5, 1}}) {
      const at::Tensor factor = at::ones(sizes, at::kDouble).requires_grad_();
      const at::Tensor alone = at::ones(sizes, at::kDouble).requires_grad_();
      for (int step = 0; step < 2; ++step) {
        (factor * rows).square().sum().backward();
        (alone * values({5, 3})).square().sum().backward();
      }
      ASSERT_FALSE(tessera::is_distributed(factor.grad()));
      EXPECT_TRUE(at::allclose(factor.grad(), alone.grad()));
    }
  });
}

TEST(PlainTensor, ThatMetPlainAndDistributedOnesHasTheSumOfBothGradients) {
  const at::Tensor alone = values({5, 3}, 1).requires_grad_();
  (alone.sin() * values({5, 3})).sum().add(alone.sin().square().sum()).backward();
  RunRanks(2, [&](Rank& rank) {
    const at::Tensor rows = leaf(rank.mesh({2}, {"dp"}));
    const at::Tensor x = values({5, 3}, 1).requires_grad_();
    const at::Tensor y = x.sin();
    at::Tensor loss;
    {
      const ReplicationScope same_on_every_rank;
      loss = (y * rows).sum() + y.square().sum();
    }
    loss.backward();
    ASSERT_FALSE(tessera::is_distributed(x.grad()));
    EXPECT_TRUE(at::allclose(x.grad(), alone.grad()));
  });
}

TEST(Hook, MayNotMultiplyADistributedGradientByWhatDiffersBetweenRanks) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor x = leaf(rank.mesh({2}, {"dp"}));
    const at::Tensor y = x * 2;
    const at::Tensor mask = at::full({5, 3}, rank.rank(), at::kDouble);
    y.register_hook([=](const at::Tensor& gradient) { return gradient * mask; });
    EXPECT_ERROR(y.sum().backward(),
                 "aten::mul.Tensor takes plain tensors for the same on every rank",
                 "plain tensor 0");
  });
}

TEST(Hook, MayMultiplyADistributedGradientByWhatIsTheSameOnEveryRank) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor x = leaf(rank.mesh({2}, {"dp"}));
    const at::Tensor y = x * 2;
    for (const at::Tensor& tensor : {x, y}) {
      tensor.register_hook([](const at::Tensor& gradient) { return gradient * values({5, 3}, 1); });
    }
    y.sum().backward();
    EXPECT_TRUE(
        at::allclose(DistributedTensor(x.grad()).full_tensor(), 2 * values({5, 3}, 1).square()));
  });
}

TEST(Hook, ThatLooksOnLeavesTheFormulaOfItsNodeAsItIs) {
  const at::Tensor alone = values({5, 3}).requires_grad_();
  at::cumprod(alone, 0).sum().backward();
  RunRanks(2, [&](Rank& rank) {
    const at::Tensor x = leaf(rank.mesh({2}, {"dp"}));
    const at::Tensor y = at::cumprod(x, 0);
    int calls = 0;
    y.register_hook([&](const at::Tensor&) { ++calls; });
    y.sum().backward();
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(at::allclose(DistributedTensor(x.grad()).full_tensor(), alone.grad()));
  });
}

TEST(Hook, MaySayThatThePlainTensorIsTheSameOnEveryRank) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor x = leaf(rank.mesh({2}, {"dp"}));
    const at::Tensor y = x * 2;
    y.register_hook([](const at::Tensor& gradient) {
      const ReplicationScope same_on_every_rank;
      return gradient * values({5, 3}, 1);
    });
    y.sum().backward();
    EXPECT_TRUE(at::allclose(DistributedTensor(x.grad()).full_tensor(), 2 * values({5, 3}, 1)));
  });
}

TEST(FormulaOfAGradient, MayMakePlainTensorsOfItsOwn) {
  const at::Tensor alone = values({5, 3}).requires_grad_();
  at::cumprod(alone, 0).sum().backward();
  RunRanks(2, [&](Rank& rank) {
    const at::Tensor x = leaf(rank.mesh({2}, {"dp"}));
    at::cumprod(x, 0).sum().backward();
    EXPECT_TRUE(at::allclose(DistributedTensor(x.grad()).full_tensor(), alone.grad()));
  });
}

TEST(Initialiser, OfLibtorchSaysWhereItBelongsOnceAParameterIsSharded) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor w = leaf(rank.mesh({2}, {"dp"}));
    const char* const remedy = "initialised before they are sharded, or by nn::init_weights";
    detail::name_parameter(w, "layer.weight");
    EXPECT_ERROR(torch::nn::init::orthogonal_(w), remedy);
    EXPECT_ERROR(torch::nn::init::sparse_(w, 0.5), remedy);
  });
}

TEST(Initialiser, ThatWritesNumbersAloneWorksOnAShardedParameter) {
  RunRanks(2, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2}, {"dp"});
    const at::Tensor w = leaf(mesh);
    EXPECT_TRUE(at::equal(DistributedTensor(torch::nn::init::eye_(w)).full_tensor(),
                          at::eye(5, 3, at::kDouble)));
    EXPECT_TRUE(at::equal(DistributedTensor(torch::nn::init::constant_(w, 3)).full_tensor(),
                          at::full({5, 3}, 3.0, at::kDouble)));
    for (const auto fill :
         {+[](const at::Tensor& t) { return torch::nn::init::xavier_normal_(t); },
          +[](const at::Tensor& t) { return torch::nn::init::kaiming_uniform_(t); }}) {
      const at::Tensor whole = DistributedTensor(fill(w)).full_tensor();
      EXPECT_FALSE(at::equal(whole[0], whole[4]));
    }
    const at::Tensor kernel =
        distribute_tensor(at::zeros({4, 2, 3}, at::kDouble), mesh, {Shard{0}}).tensor().detach();
    const at::Tensor expected = torch::nn::init::dirac_(at::zeros({4, 2, 3}, at::kDouble));
    EXPECT_TRUE(
        at::equal(DistributedTensor(torch::nn::init::dirac_(kernel)).full_tensor(), expected));
  });
}

}  // namespace
}  // namespace tessera
