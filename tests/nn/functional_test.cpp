// Tests the functions of tessera::nn on one rank and on distributed tensors.

#include "tessera/nn/functional.h"
#include "tessera/dtensor/detail/transfers.h"

#include <torch/csrc/autograd/autograd.h>

#include "testing/distributed.h"

namespace tessera::nn {
namespace {

using Tensors = std::vector<at::Tensor>;

struct Precision {
  at::ScalarType type;
  double tolerance;
};
const Precision kPrecisions[] = {{at::kFloat, 1e-5}, {at::kDouble, 1e-12}};

/// Compares the results and gradients of `function` and `oracle`; `oracle` calls at:: operators.
template <class Function, class Oracle>
void expect_same(const Tensors& inputs, const Function& function, const Oracle& oracle,
                 const Precision& precision) {
  Tensors a, b;
  for (const at::Tensor& input : inputs) {
    a.push_back(input.to(precision.type, false, /*copy=*/true).requires_grad_());
    b.push_back(input.to(precision.type, false, /*copy=*/true).requires_grad_());
  }
  const at::Tensor y = function(a);
  const at::Tensor expected = oracle(b);
  const at::Tensor grad = at::randn_like(expected);
  y.backward(grad);
  expected.backward(grad);
  EXPECT_CLOSE(y, expected, precision.tolerance, precision.tolerance);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_CLOSE(a[i].grad(), b[i].grad(), precision.tolerance, precision.tolerance)
        << "input " << i;
  }
}

at::Tensor turned(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto halves = x.chunk(2, -1);
  return x * cos.unsqueeze(1) + at::cat({-halves[1], halves[0]}, -1) * sin.unsqueeze(1);
}

TEST(Functions, AgreeWithCompositions) {
  const at::Tensor indices = at::randint(0, 9, {4, 5}, at::kLong);
  for (const Precision& precision : kPrecisions) {
    const at::Tensor cos = at::randn({6, 10}, precision.type);
    const at::Tensor sin = at::randn({6, 10}, precision.type);
    const auto compare = [&](const Tensors& inputs, const auto& function, const auto& oracle) {
      expect_same(inputs, function, oracle, precision);
    };
    compare(
        {at::randn({3, 5, 24}), at::randn({24})},
        [](const Tensors& v) { return rms_norm(v[0], v[1], 1e-5); },
        [](const Tensors& v) { return at::rms_norm(v[0], {24}, v[1], 1e-5); });
    compare(
        {at::randn({4, 9})}, [](const Tensors& v) { return rms_norm(v[0], {}, 1e-6); },
        [](const Tensors& v) { return at::rms_norm(v[0], {9}, {}, 1e-6); });
    compare(
        {at::randn({7, 11}) * 3, at::randn({7, 11})},
        [](const Tensors& v) { return silu_mul(v[0], v[1]); },
        [](const Tensors& v) { return at::silu(v[0]) * v[1]; });
    compare(
        {at::randn({2, 6, 3, 10})},
        [&](const Tensors& v) { return rotary_embedding(v[0], cos, sin); },
        [&](const Tensors& v) { return turned(v[0], cos, sin); });
    compare(
        {at::randn({2, 6, 4, 10}), at::randn({2, 6, 2, 10})},
        [&](const Tensors& v) {
          const auto [q, k] = rotary_embedding(v[0], v[1], cos, sin);
          return at::cat({q, k}, 2);
        },
        [&](const Tensors& v) {
          return at::cat({turned(v[0], cos, sin), turned(v[1], cos, sin)}, 2);
        });
    compare(
        {at::randn({9, 6})}, [&](const Tensors& v) { return nn::embedding(v[0], indices); },
        [&](const Tensors& v) { return at::embedding(v[0], indices); });
  }
}

/// The tested losses use only the norm, only the sum, or both results of add_rms_norm().
TEST(AddRmsNorm, AgreesWithComposition) {
  for (const Precision& precision : kPrecisions) {
    for (const auto& factors : {std::pair(1.0, 0.5), std::pair(1.0, 0.0), std::pair(0.0, 1.0)}) {
      const auto weigh = [&](const at::Tensor& normed, const at::Tensor& sum) {
        return factors.first == 0    ? sum
               : factors.second == 0 ? normed
                                     : normed + factors.second * sum;
      };
      expect_same(
          {at::randn({3, 5, 24}), at::randn({3, 5, 24}), at::randn({24})},
          [&](const Tensors& v) {
            const auto [normed, sum] = add_rms_norm(v[0], v[1], v[2], 1e-5);
            return weigh(normed, sum) + 0 * v[2];
          },
          [&](const Tensors& v) {
            const at::Tensor sum = v[0] + v[1];
            return weigh(at::rms_norm(sum, {24}, v[2], 1e-5), sum) + 0 * v[2];
          },
          precision);
    }
  }
}

TEST(AddRmsNorm, SupportsBroadcastAndMixedDtypes) {
  const at::Tensor x = at::randn({2, 3, 8}), weight = at::randn({8});
  for (const at::Tensor& residual : {at::randn({2, 3, 8}, at::kBFloat16), at::randn({8})}) {
    const auto [normed, sum] = add_rms_norm(x, residual, weight, 1e-5);
    EXPECT_EQUAL(sum, x + residual);
    EXPECT_EQUAL(normed, rms_norm(x + residual, weight, 1e-5));
  }
}

TEST(Functions, RefuseInvalidCalls) {
  const auto ones = [](at::IntArrayRef sizes) { return at::ones(sizes); };
  EXPECT_ERROR(rms_norm(ones({2, 3}), ones({4}), 1e-5), "sizes [2, 3]", "weight has sizes [4]");
  const at::Tensor x = at::randn({2, 3}).requires_grad_();
  const at::Tensor y = rms_norm(x, {}, 1e-5).sum();
  EXPECT_ERROR(torch::autograd::grad({y}, {x}, {}, std::nullopt, /*create_graph=*/true),
               "rms_norm cannot be differentiated twice");
  EXPECT_ERROR(silu_mul(ones({2, 3}), ones({3})), "gate has sizes [2, 3]", "up has sizes [3]");
  EXPECT_ERROR(rotary_embedding(ones({1, 4, 1, 2}), ones({3, 2}), ones({3, 2})),
               "a table has sizes [3, 2]");
  EXPECT_ERROR(rotary_embedding(ones({1, 4, 1, 3}), ones({4, 3}), ones({4, 3})),
               "rotary_embedding: the input has sizes [1, 4, 1, 3]");
  EXPECT_ERROR(rotary_embedding(ones({1, 2, 1, 4}), ones({2, 4}).requires_grad_(), ones({2, 4})),
               "must not require a gradient");
  EXPECT_ERROR(nn::embedding(ones({3, 2}), at::zeros({2}, at::kInt)),
               "the indices are of type Int");
}

TEST(RotaryEmbedding, OfTwoTensorsSupportsAnUnusedResult) {
  const at::Tensor cos = at::randn({6, 10}), sin = at::randn({6, 10});
  at::Tensor q = at::randn({2, 6, 4, 10}).requires_grad_(), k = q.detach().clone().requires_grad_();
  rotary_embedding(q, k, cos, sin).second.square().sum().backward();
  EXPECT_FALSE(q.grad().defined());
  const at::Tensor alone = k.detach().clone().requires_grad_();
  rotary_embedding(alone, cos, sin).square().sum().backward();
  EXPECT_EQUAL(k.grad(), alone.grad());
}

TEST(DropoutFunction, UsesOneMaskForValueAndGradient) {
  const at::Tensor x = at::ones({1000}).requires_grad_();
  const at::Tensor y = dropout(x, 0.4, {1, 2});
  y.sum().backward();
  EXPECT_EQUAL(x.grad(), y.detach());
  EXPECT_NEAR((y == 0).to(at::kFloat).mean().item<double>(), 0.4, 0.06);
}

TEST(DropoutFunction, OfABatchPartEqualsPartOfTheWhole) {
  const at::Tensor x = at::randn({8, 5});
  const at::Tensor whole = dropout(x, 0.5, {1, 2});
  const BatchPart part(3, 4);
  EXPECT_EQUAL(dropout(x.slice(0, 6, 8), 0.5, {1, 2}), whole.slice(0, 6, 8));
}

DistributedTensor spread(const at::Tensor& tensor, const DeviceMesh& mesh,
                         const Placements& placements) {
  return distribute_tensor(tensor.detach().clone(), mesh, placements);
}

TEST_ON_MESH(DistributedRmsNorm, RefusesMixedPlainAndDistributedTensors, {2}, {"tp"}) {
  const at::Tensor x = spread(normal_values({6, 4}, 1), mesh, {Shard{0}}).tensor();
  EXPECT_ERROR(rms_norm(x, at::ones({4}), 1e-5), "argument 1, [4], is plain");
  const at::Tensor weight = spread(at::ones({4}), mesh, {Replicate{}}).tensor();
  EXPECT_ERROR(rms_norm(at::ones({6, 4}), weight, 1e-5), "argument 0, [6, 4], is plain");
  const ReplicationScope same_on_every_rank;
  EXPECT_EQUAL(rms_norm(x, at::ones({4}), 1e-5),
               rms_norm(normal_values({6, 4}, 1), at::ones({4}), 1e-5));
}

TEST_ON_MESH(DistributedRmsNorm, AcceptsAReplicatedPlainResidual, {2}, {"tp"}) {
  const at::Tensor x0 = normal_values({6, 4}, 1).requires_grad_(),
                   residual0 = normal_values({6, 4}, 2).requires_grad_(),
                   w0 = normal_values({4}, 3).requires_grad_();
  const auto loss = [](const at::Tensor& x, const at::Tensor& residual, const at::Tensor& w) {
    const auto [normed, sum] = add_rms_norm(x, residual, w, 1e-5);
    return (normed * sum).sum();
  };
  loss(x0, residual0, w0).backward();
  const ReplicationScope same_on_every_rank;
  for (const Placement& placement : {Placement{Shard{0}}, Placement{Replicate{}}}) {
    const at::Tensor x = testing::leaf_on(mesh, x0.detach(), {placement});
    const at::Tensor w = testing::leaf_on(mesh, w0.detach(), {Replicate{}});
    const at::Tensor residual = residual0.detach().clone().requires_grad_();
    loss(x, residual, w).backward();
    EXPECT_FALSE(tessera::is_distributed(residual.grad()));
    EXPECT_EACH({x.grad(), residual.grad(), w.grad()}, {x0.grad(), residual0.grad(), w0.grad()},
                1e-4, 1e-5);
  }
}

struct Vocabulary {
  std::int64_t rows;
  Placement weight;
  Placement out;
};

// The vocabulary has uneven or empty shards, or the hidden dimension is sharded.
TEST(DistributedEmbedding, AgreesWithOneRank) {
  for (const Vocabulary& v :
       {Vocabulary{9, Shard{0}, Partial{}}, Vocabulary{2, Shard{0}, Partial{}},
        Vocabulary{9, Shard{1}, Shard{2}}}) {
    RunOnMesh({4}, {"tp"}, [&](const DeviceMesh& mesh) {
      const at::Tensor w0 = normal_values({v.rows, 6}, 1).requires_grad_();
      const at::Tensor indices = at::arange(10, at::kLong).remainder(v.rows).view({2, 5});
      const at::Tensor grad = normal_values({2, 5, 6}, 2);
      at::embedding(w0, indices).backward(grad);
      const at::Tensor w = testing::leaf_on(mesh, w0.detach(), {v.weight});
      EXPECT_ERROR(nn::embedding(w, indices), "argument 1, [2, 5], is plain",
                   "use a ReplicationScope");
      const ReplicationScope same_on_every_rank;
      const at::Tensor y = nn::embedding(w, indices);
      EXPECT_EQ(DistributedTensor(y).placements(), Placements{v.out});
      EXPECT_EQUAL(y, at::embedding(w0, indices).detach());
      const Placement grad_placement = is_partial(v.out) ? Placement{Replicate{}} : v.out;
      y.backward(spread(grad, mesh, {grad_placement}).tensor());
      EXPECT_EQ(DistributedTensor(w.grad()).placements(), Placements{v.weight});
      EXPECT_CLOSE(w.grad(), w0.grad(), 1e-6, 1e-6);
    });
  }
}

TEST_ON_MESH(DistributedEmbedding, LeavesTheTableGradientPending, {2}, {"dp"}) {
  const at::Tensor w = testing::leaf_on(mesh, normal_values({7, 6}, 1), {Replicate{}});
  leave_gradient_pending(w);
  const at::Tensor indices = distribute_tensor(at::arange(5, at::kLong), mesh, {Shard{0}}).tensor();
  const at::Tensor grad = spread(normal_values({5, 6}, 2), mesh, {Shard{0}}).tensor();
  const Sent sent(rank);
  nn::embedding(w, indices).backward(grad);
  EXPECT_EQ(sent.calls(), 0);
  EXPECT_EQ(DistributedTensor(w.grad()).placements(), Placements{Partial{}});
}

// Only one rank looks up an index that is out of range, but all ranks must throw.
TEST(DistributedEmbedding, NamesAnIndexOutOfRangeOnEveryRank) {
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2}, {"tp"});
    const at::Tensor w = spread(normal_values({7, 6}, 1), mesh, {Shard{0}}).tensor();
    const ReplicationScope same_on_every_rank;
    nn::embedding(w, at::tensor({0, 7}, at::kLong));
  });
  for (const std::string& error : errors) {
    EXPECT_CONTAINS(error, "index 7");
  }
}

}  // namespace
}  // namespace tessera::nn
