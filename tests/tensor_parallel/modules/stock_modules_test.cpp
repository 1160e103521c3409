// libtorch's own modules, held in nn::Hooked, under the styles: as nn's.

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/child.h"
#include "tessera/nn/hooked.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {

using testing::uniform_values;
using HookedLinear = nn::Hooked<torch::nn::Linear>;
using HookedEmbedding = nn::Hooked<torch::nn::Embedding>;
using HookedNorm = nn::Hooked<torch::nn::LayerNorm>;

/// Sizes that 2 and 3 ranks do not divide.
struct StockModel : nn::Module<StockModel> {
  StockModel() { testing::fill(*this); }
  at::Tensor forward(const at::Tensor& ids) {
    return (*down)(at::relu((*up)((*norm)((*embed)(ids)))));
  }

  nn::Child<HookedEmbedding> embed{*this, "embed", 11, 5};
  nn::Child<HookedNorm> norm{*this, "norm", torch::nn::LayerNormOptions({5})};
  nn::Child<HookedLinear> up{*this, "up", 5, 7}, down{*this, "down", 7, 5};
};

at::Tensor token_ids() {
  return at::arange(12, at::kLong).mul(5).remainder(11).view({2, 6});
}

void expect_as_alone(StockModel& model, StockModel& alone) {
  const at::Tensor out = model(token_ids());
  EXPECT_TRUE(testing::full_tensor(out).allclose(alone(token_ids()), 1e-5, 1e-5));
  out.square().sum().backward();
  testing::expect_gradients(model, testing::gradients_of(alone));
}

ParallelizePlan stock_plan(const StylePtr& embedding) {
  return {{"embed", embedding},
          {"norm", replicate_parallel()},
          {"up", colwise_parallel()},
          {"down", rowwise_parallel()}};
}

TEST(StockModules, TakeTheStylesOfLinearsAndEmbeddings) {
  StockModel alone;
  alone(token_ids()).square().sum().backward();
  for (const int ranks : {1, 2, 3}) {
    RunRanks(ranks, [&](Rank& rank) {
      for (const StylePtr& embedding :
           {rowwise_parallel(), colwise_parallel({.output_layouts = Replicate{}})}) {
        StockModel model;
        parallelize_module(model, rank.mesh({ranks}, {"tp"}), stock_plan(embedding));
        EXPECT_EQ(DistributedTensor(model.down->slot("weight")->get()).placements(),
                  Placements{Shard{1}});
        expect_as_alone(model, alone);
      }
    });
  }
}

// The norm on each rank's share of the 6 tokens of a sequence.
TEST(StockModules, TakeSequenceParallel) {
  StockModel alone;
  alone(token_ids()).square().sum().backward();
  for (const int ranks : {2, 3, 4}) {
    RunRanks(ranks, [&](Rank& rank) {
      StockModel model;
      parallelize_module(model, rank.mesh({ranks}, {"tp"}),
                         {{"embed", rowwise_parallel({.output_layouts = Shard{1}})},
                          {"norm", sequence_parallel()},
                          {"up", colwise_parallel()},
                          {"down", rowwise_parallel()}});
      expect_as_alone(model, alone);
    });
  }
}

TEST(StockModules, TakeTheStylesUnderFsdp) {
  StockModel alone;
  alone(token_ids()).square().sum().backward();
  RunOnMesh({2, 2}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
    StockModel model;
    parallelize_module(model, mesh["tp"], stock_plan(rowwise_parallel()));
    fsdp::fully_shard(*model.down, mesh["dp"]);
    fsdp::fully_shard(model, mesh["dp"]);
    // The ranks of dp have one batch, so that the mean of their gradients is the gradient.
    expect_as_alone(model, alone);
  });
}

/// A third of the bias, three times, would not be it; and the held module has it again afterwards.
TEST(StockModules, HaveTheirBiasAddedOnce) {
  RunRanks(3, [](Rank& rank) {
    HookedLinear linear(6, 2);
    linear.held().weight.detach().zero_();
    linear.held().bias.detach().fill_(0.1);
    parallelize_module(linear, rank.mesh({3}, {"tp"}), {{"", rowwise_parallel()}});
    EXPECT_TRUE(
        testing::full_tensor(linear(uniform_values({4, 6}, 1))).equal(at::full({4, 2}, 0.1F)));
    EXPECT_TRUE(linear.held().bias.defined());
    EXPECT_THROWN(std::exception, linear(uniform_values({4, 3}, 1)), "6 input features");
    EXPECT_TRUE(linear.held().bias.defined());
  });
}

TEST(StockModules, AreRefusedByNameForOtherKinds) {
  RunRanks(2, [](Rank& rank) {
    HookedNorm norm(torch::nn::LayerNormOptions({4}));
    EXPECT_ERROR(parallelize_module(norm, rank.mesh({2}, {"tp"}), {{"", colwise_parallel()}}),
                 "colwise_parallel is for Linear and Embedding", "LayerNorm");
  });
}

TEST(StockModules, AreRefusedWithSparseGradients) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    for (const StylePtr& style : {colwise_parallel(), rowwise_parallel()}) {
      struct Table : nn::Module<Table> {
        nn::Child<HookedEmbedding> rows{*this, "rows",
                                        torch::nn::EmbeddingOptions(4, 3).sparse(true)};
      } table;
      EXPECT_ERROR(parallelize_module(table, mesh, {{"rows", style}}), "'rows'", "Embedding",
                   "gets sparse gradients", "sparse(true)");
    }
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel
