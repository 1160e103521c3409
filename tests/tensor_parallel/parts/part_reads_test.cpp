// What plain operators compute along a dimension of which each rank has a part is refused; along
// others it is right.

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <ostream>
#include <vector>

#include "tensor_parallel/parts/between_linears.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/functional.h"
#include "tessera/nn/linear.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/errors.h"
#include "testing/full_tensor.h"
#include "testing/module_values.h"
#include "testing/ranks.h"

namespace tessera::tensor_parallel {
namespace {

using testing::fill;
using testing::full_tensor;
using testing::uniform_values;

class ReadsAcrossAPart : public ::testing::TestWithParam<PartCase> {};

TEST_P(ReadsAcrossAPart, AreRefused) {
  RunRanks(2, [](Rank& rank) {
    BetweenLinears model(GetParam().between, GetParam().features);
    fill(model);
    parallelize_module(model, rank.mesh({2}, {"tp"}), plan_between());
    for (int again = 0; again < 2; ++again) {
      EXPECT_ERROR(model(four_tokens()),
                   "'out_of' takes a plain tensor for a part, Shard(-1), but ", GetParam().message,
                   "fused_colwise_parallel(");
    }
  });
}

// On one rank nothing is split.
TEST_P(ReadsAcrossAPart, AreRightOnOneRank) {
  RunRanks(1, [](Rank& rank) {
    BetweenLinears model(GetParam().between, GetParam().features);
    fill(model);
    const at::Tensor expected = model(four_tokens());
    parallelize_module(model, rank.mesh({1}, {"tp"}), plan_between());
    EXPECT_TRUE(full_tensor(model(four_tokens())).allclose(expected));
  });
}

INSTANTIATE_TEST_SUITE_P(
    , ReadsAcrossAPart,
    ::testing::Values(
        PartCase{"softmax", [](const at::Tensor& x) { return x.softmax(-1); },
                 "softmax computed along dimension 1 of [4, 12], of which each rank has a share"},
        PartCase{"log_softmax", [](const at::Tensor& x) { return x.log_softmax(1); },
                 "log_softmax "},
        PartCase{"mean", [](const at::Tensor& x) { return x - x.mean(-1, true); }, "mean computed"},
        PartCase{"mean_of_all", [](const at::Tensor& x) { return x - x.mean(); }, "mean computed"},
        PartCase{"amax", [](const at::Tensor& x) { return x / x.abs().amax(1, true); }, "amax "},
        PartCase{"max", [](const at::Tensor& x) { return x - std::get<0>(x.max(1, true)); },
                 "max "},
        PartCase{"median", [](const at::Tensor& x) { return x - std::get<0>(x.median(1, true)); },
                 "median "},
        PartCase{"norm", [](const at::Tensor& x) { return x / x.norm(2, {1}, true); }, "norm "},
        PartCase{"variance", [](const at::Tensor& x) { return x / x.var(1, true, true); }, "var "},
        PartCase{"logsumexp", [](const at::Tensor& x) { return x - x.logsumexp({1}, true); },
                 "logsumexp "},
        PartCase{"cumsum", [](const at::Tensor& x) { return x.cumsum(1); }, "cumsum "},
        PartCase{"sort", [](const at::Tensor& x) { return std::get<0>(x.sort(1)); }, "sort "},
        PartCase{"roll", [](const at::Tensor& x) { return x.roll(1, 1) * x; }, "roll "},
        PartCase{"flip", [](const at::Tensor& x) { return x.flip({1}); }, "flip "},
        PartCase{"index_select",
                 [](const at::Tensor& x) {
                   return x.index_select(1, at::arange(x.size(1) - 1, -1, -1, at::kLong));
                 },
                 "index_select "},
        PartCase{"layer_norm", [](const at::Tensor& x) { return at::layer_norm(x, {x.size(1)}); },
                 "native_layer_norm computed along dimension 1"},
        PartCase{"rms_norm", [](const at::Tensor& x) { return at::rms_norm(x, {x.size(1)}); },
                 " computed along dimension 1"},
        PartCase{"own_rms_norm",
                 [](const at::Tensor& x) { return nn::rms_norm(x, at::ones({x.size(1)}), 1e-6); },
                 "rms_norm computed along dimension 1"},
        PartCase{"glu", [](const at::Tensor& x) { return at::glu(x, -1); }, "glu computed", 12},
        PartCase{"sum_of_halves",
                 [](const at::Tensor& x) { return x.view({4, 2, x.size(1) / 2}).sum(1); },
                 "sum computed along dimension 1 of [4, 2, 6]", 12},
        PartCase{"product_of_a_stack",
                 [](const at::Tensor& x) { return at::stack(x.chunk(2, -1)).prod(0); },
                 "prod computed along dimension 0 of [2, 4, 6]", 12},
        PartCase{"products_of_tokens_in_all_features",
                 [](const at::Tensor& x) { return x.mm(x.t()).softmax(-1).mm(x); }, "mm computed"},
        PartCase{"halves_turned",
                 [](const at::Tensor& x) {
                   const auto halves = at::silu(x).chunk(2, -1);
                   return at::cat({halves[1], halves[0]}, -1) * 2;
                 },
                 "in it pieces of one part were put together in another order: [4, 12] was cut"},
        PartCase{"half_alone", [](const at::Tensor& x) { return x.narrow(1, 0, x.size(1) / 2); },
                 "in it pieces of one part were used without the others", 12}),
    [](const auto& info) { return info.param.name; });

/// The sum over the ranks of a mesh, as a program writes it.
struct SumByHand : torch::autograd::Function<SumByHand> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x,
                            const DeviceMesh& mesh) {
    at::Tensor sum = x.clone();
    mesh.group().all_reduce(sum, ReduceOp::kSum)->wait();
    return sum;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0], at::Tensor()};
  }
};

TEST(ReductionsOfAPart, AreBelievedWhereAProgramReducesThemFurther) {
  RunRanks(2, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2}, {"tp"});
    BetweenLinears model(
        [&](const at::Tensor& x) { return x - SumByHand::apply(x.sum(1, true), mesh); }, 24);
    fill(model);
    parallelize_module(model, mesh, plan_between());
    EXPECT_EQ(model(four_tokens()).size(1), 6);
  });
}

class ReadsWithinAPart : public ::testing::TestWithParam<PartCase> {};

TEST_P(ReadsWithinAPart, AreRight) {
  const auto make = [] {
    auto model = std::make_shared<BetweenLinears>(GetParam().between, GetParam().features);
    fill(*model);
    return model;
  };
  const auto alone = make();
  const at::Tensor expected = (*alone)(four_tokens());
  expected.square().sum().backward();
  for (const int ranks : {1, 2, 3}) {
    RunRanks(ranks, [&](Rank& rank) {
      const auto model = make();
      parallelize_module(*model, rank.mesh({ranks}, {"tp"}), plan_between());
      const at::Tensor out = (*model)(four_tokens());
      EXPECT_TRUE(out.allclose(expected, 1e-4, 1e-5));
      out.square().sum().backward();
      EXPECT_TRUE(full_tensor(model->into->slot("weight")->persistent().grad())
                      .allclose(alone->into->weight->grad(), 1e-4, 1e-5));
    });
  }
}

/// (tokens, heads, 4) of a rank's features.
at::Tensor heads_of(const at::Tensor& x) {
  return x.view({4, -1, 4});
}

/// (1, heads, tokens, 4).
at::Tensor batch_of_heads(const at::Tensor& x) {
  return heads_of(x).transpose(0, 1).unsqueeze(0);
}

at::Tensor features_of(const at::Tensor& heads) {
  return heads.squeeze(0).transpose(0, 1).flatten(1);
}

INSTANTIATE_TEST_SUITE_P(
    , ReadsWithinAPart,
    ::testing::Values(
        PartCase{"attention",
                 [](const at::Tensor& x) {
                   const at::Tensor q = batch_of_heads(x);
                   const at::Tensor scores = q.matmul(q.transpose(-2, -1)).softmax(-1);
                   return features_of(scores.matmul(q));
                 }},
        PartCase{"attention_by_einsum",
                 [](const at::Tensor& x) {
                   const at::Tensor q = heads_of(x);
                   const at::Tensor scores = at::einsum("shd,thd->hst", {q, q}).softmax(-1);
                   return at::einsum("hst,thd->shd", {scores, q}).flatten(1);
                 }},
        PartCase{"scaled_dot_product_attention",
                 [](const at::Tensor& x) {
                   const at::Tensor q = batch_of_heads(x);
                   return features_of(at::scaled_dot_product_attention(q, q, q, {}, 0.0, true));
                 }},
        PartCase{"norms_of_heads",
                 [](const at::Tensor& x) {
                   const at::Tensor heads = heads_of(x);
                   return (at::layer_norm(heads, {4}) + nn::rms_norm(heads, at::ones({4}), 1e-6) +
                           heads / heads.norm(2, {-1}, true))
                       .flatten(1);
                 }},
        PartCase{"softmax_of_tokens", [](const at::Tensor& x) { return x.softmax(0) - x.mean(0); }},
        PartCase{"rotated_halves_of_heads",
                 [](const at::Tensor& x) {
                   const auto halves = heads_of(x).chunk(2, -1);
                   return at::cat({-halves[1], halves[0]}, -1).flatten(1);
                 }},
        PartCase{"repeated_heads",
                 [](const at::Tensor& x) {
                   const at::Tensor heads = heads_of(x);
                   return heads.repeat_interleave(2, 1).view({4, -1, 2, 4}).sum(2).flatten(1);
                 }},
        PartCase{"gated_heads",
                 [](const at::Tensor& x) { return at::glu(heads_of(x), -1).flatten(1); }, "", 12},
        PartCase{"centred_head_by_head",
                 [](const at::Tensor& x) {
                   std::vector<at::Tensor> heads;
                   for (const at::Tensor& head : heads_of(x).unbind(1)) {
                     heads.push_back(head - head.mean(-1, true));
                   }
                   return at::stack(heads, 1).flatten(1);
                 }}),
    [](const auto& info) { return info.param.name; });

TEST(AnEmptyPart, MayBeReadAndViewed) {
  RunRanks(2, [](Rank& rank) {
    BetweenLinears model(
        [](const at::Tensor& x) { return x.view({0, 2, x.size(1) / 2}).softmax(0).flatten(1); },
        24);
    fill(model);
    parallelize_module(model, rank.mesh({2}, {"tp"}), plan_between());
    EXPECT_EQ(model(four_tokens().narrow(0, 0, 0)).size(0), 0);
  });
}

// Of a fused weight's result a rank has a share of each part.

ParallelizePlan plan_of_halves() {
  return {{"into", fused_colwise_parallel({.parts = 2})}, {"out_of", rowwise_parallel()}};
}

class ReadsWithinFusedParts : public ::testing::TestWithParam<PartCase> {};

TEST_P(ReadsWithinFusedParts, AreRight) {
  BetweenLinears alone(GetParam().between, 12);
  fill(alone);
  const at::Tensor expected = alone(four_tokens());
  expected.square().sum().backward();
  for (const int ranks : {2, 3}) {
    RunRanks(ranks, [&](Rank& rank) {
      BetweenLinears model(GetParam().between, 12);
      fill(model);
      parallelize_module(model, rank.mesh({ranks}, {"tp"}), plan_of_halves());
      const at::Tensor out = model(four_tokens());
      EXPECT_TRUE(out.allclose(expected, 1e-4, 1e-5));
      out.square().sum().backward();
      EXPECT_TRUE(full_tensor(model.into->slot("weight")->persistent().grad())
                      .allclose(alone.into->weight->grad(), 1e-4, 1e-5));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    , ReadsWithinFusedParts,
    ::testing::Values(
        PartCase{"glu", [](const at::Tensor& x) { return at::glu(x, -1); }},
        PartCase{"chunks",
                 [](const at::Tensor& x) {
                   const auto halves = x.chunk(2, -1);
                   return at::silu(halves[0]) * halves[1];
                 }},
        PartCase{"sum_of_views",
                 [](const at::Tensor& x) { return x.view({4, 2, x.size(1) / 2}).sum(1); }},
        PartCase{"product_of_a_stack",
                 [](const at::Tensor& x) { return at::stack(x.chunk(2, -1)).prod(0); }},
        PartCase{"one_of_them", [](const at::Tensor& x) { return x.narrow(1, 0, x.size(1) / 2); }}),
    [](const auto& info) { return info.param.name; });

TEST(ReadsAcrossFusedParts, AreRefused) {
  const auto refuses = [](const OfPart& between, const char* message) {
    RunRanks(2, [&](Rank& rank) {
      BetweenLinears model(between, 12);
      fill(model);
      parallelize_module(model, rank.mesh({2}, {"tp"}), plan_of_halves());
      EXPECT_ERROR(model(four_tokens()), message);
    });
  };
  refuses([](const at::Tensor& x) { return at::glu(x.softmax(-1), -1); }, "softmax computed");
  refuses([](const at::Tensor& x) { return x.chunk(2, -1)[0].softmax(-1); }, "softmax computed");
}

}  // namespace
}  // namespace tessera::tensor_parallel
