// Modules of libtorch in nn::Hooked, and the modules inside of them, under plans and FSDP.

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/transformerlayer.h>

#include "tessera/dtensor/random.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/child.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/meta_device.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/models.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {
namespace adopted {

using Sizes = std::vector<std::int64_t>;
const std::vector<Sizes> kMeshes{{1, 1}, {2, 1}, {1, 2}, {2, 2}, {3, 1}, {1, 3}};

StylePtr placed(std::vector<std::pair<std::string, Placement>> placements) {
  return place_parameters({.placements = std::move(placements)});
}

/// What one rank computes with the module itself.
struct Expected {
  double loss = 0;
  std::vector<at::Tensor> gradients;
};

template <class M>
Expected of_libtorch(const std::shared_ptr<M>& module, const at::Tensor& x) {
  double seed = 0;
  for (at::Tensor& parameter : module->parameters()) {
    const c10::NoGradGuard no_grad;
    parameter.copy_(testing::uniform_values(parameter.sizes(), seed++, 0.3));
  }
  const at::Tensor loss = module->forward(x).square().mean();
  loss.backward();
  Expected expected{loss.template item<double>(), {}};
  for (const at::Tensor& parameter : module->parameters()) {
    expected.gradients.push_back(parameter.grad());
  }
  return expected;
}

/// `make` gives a module; `rows_dim` is the dimension of x whose rows dp splits.
template <class Make>
void expect_as_libtorch(const Make& make, const at::Tensor& x, std::int64_t rows_dim,
                        const ParallelizePlan& plan) {
  const Expected expected = of_libtorch(make(), x);
  for (const Sizes& sizes : kMeshes) {
    RunOnMesh(sizes, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
      SCOPED_TRACE(::testing::PrintToString(sizes));
      const auto model = nn::adopt(make());
      testing::fill(*model);
      parallelize_module(*model, mesh["tp"], plan);
      fsdp::fully_shard(*model, mesh["dp"]);
      const std::int64_t rows = x.size(rows_dim) / sizes[0];
      const at::Tensor loss =
          (*model)(x.narrow(rows_dim, mesh.local_rank("dp") * rows, rows)).square().mean();
      loss.backward();
      at::Tensor sum = testing::full_tensor(loss).clone();
      mesh["dp"].group().all_reduce(sum, ReduceOp::kSum)->wait();
      EXPECT_NEAR(sum.item<double>() / static_cast<double>(sizes[0]), expected.loss, 1e-5);
      testing::expect_gradients(*model, expected.gradients);
    });
  }
}

TEST(Adopted, AnMlpTrainsAsItDoesAlone) {
  expect_as_libtorch([] { return std::make_shared<testing::TorchMlp>(); },
                     testing::uniform_values({6, 5}, 1), 0,
                     {{"up", colwise_parallel()}, {"down", rowwise_parallel()}});
}

TEST(Adopted, AConvolutionalNetTrainsAsItDoesAlone) {
  expect_as_libtorch([] { return std::make_shared<testing::TorchConvNet>(); },
                     testing::uniform_values({6, 2, 6, 6}, 1), 0,
                     {{"first", placed({{"weight", Shard{0}}, {"bias", Shard{0}}})},
                      {"second", placed({{"weight", Shard{1}}})},
                      {"head", colwise_parallel()}});
}

TEST(Adopted, ASequentialTrainsAsItDoesAlone) {
  expect_as_libtorch([] { return testing::torch_sequential().ptr(); },
                     testing::uniform_values({6, 5}, 1), 0,
                     {{"0", colwise_parallel()}, {"2", rowwise_parallel()}});
}

TEST(Adopted, ATransformerEncoderTrainsAsItDoesAlone) {
  expect_as_libtorch(
      [] { return testing::torch_encoder().ptr(); }, testing::uniform_values({3, 6, 8}, 0.4), 1,
      {{"layers.*.linear1", colwise_parallel()}, {"layers.*.linear2", rowwise_parallel()}});
}

TEST(Adopted, AModelBeginsAlikeOnEveryMesh) {
  const auto values = [](Rank& rank, const Sizes& sizes) {
    const DeviceMesh mesh = rank.mesh(sizes, {"dp", "tp"});
    const auto model = [] {
      const nn::MetaDevice meta;
      return nn::adopt(testing::torch_encoder());
    }();
    parallelize_module(
        *model, mesh["tp"],
        {{"layers.*.linear1", colwise_parallel()}, {"layers.*.linear2", rowwise_parallel()}});
    fsdp::fully_shard(*model, mesh["dp"]);
    nn::to_empty(*model, at::kCPU);
    nn::init_weights(*model, 3);
    return testing::parameter_values(*model);
  };
  at::Tensor expected;
  RunRanks(1, [&](Rank& rank) { expected = values(rank, {1, 1}); });
  for (const Sizes& sizes : kMeshes) {
    RunRanks(testing::ranks_of(sizes),
             [&](Rank& rank) { EXPECT_TRUE(values(rank, sizes).equal(expected)); });
  }
}

TEST(Adopted, AnEmbeddingIsSplitByFeaturesOrByVocabulary) {
  const auto make = [] {
    return torch::nn::Sequential(torch::nn::Embedding(11, 5), torch::nn::Linear(5, 3)).ptr();
  };
  const at::Tensor ids = at::arange(12, at::kLong).mul(5).remainder(11).view({6, 2});
  expect_as_libtorch(make, ids, 0, {{"0", colwise_parallel()}});
  expect_as_libtorch(make, ids, 0, {{"0", rowwise_parallel()}});
}

TEST(Adopted, AParameterOfTheClassItselfTrainsOnceItsMemberIsNamed) {
  const auto expected =
      of_libtorch(std::make_shared<testing::TorchScaled>(), testing::uniform_values({6, 5}, 1));
  RunRanks(2, [&](Rank& rank) {
    const auto model = nn::adopt<testing::TorchScale>(std::make_shared<testing::TorchScaled>());
    testing::fill(*model);
    fsdp::fully_shard(*model, rank.mesh({2}, {"dp"}));
    (*model)(testing::uniform_values({6, 5}, 1).narrow(0, rank.rank() * 3, 3))
        .square()
        .mean()
        .backward();
    testing::expect_gradients(*model, expected.gradients);
  });
}

/// (rows, tokens, 8); libtorch's encoder takes the tokens first.
struct Transposed : torch::nn::Module {
  Transposed() {
    const auto layer = torch::nn::TransformerEncoderLayerOptions(8, 2).dropout(0.5);
    encoder = register_module(
        "encoder", torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(layer, 1)));
  }
  at::Tensor forward(const at::Tensor& x) { return encoder(x.transpose(0, 1)).mean(0); }
  torch::nn::TransformerEncoder encoder{nullptr};
};

TEST(Adopted, DropoutOfTokensThatComeFirstAsksWhichPartARankHas) {
  RunRanks(2, [](Rank& rank) {
    const auto model = nn::adopt(std::make_shared<Transposed>());
    testing::fill(*model);
    fsdp::fully_shard(*model, rank.mesh({2}, {"dp"}));
    const at::Tensor x = testing::uniform_values({3, 5, 8}, 1);
    EXPECT_ERROR((*model)(x), "BatchPart");
    const BatchPart part(rank.rank(), rank.size());
    const at::Tensor y = (*model)(x);
    y.sum().backward();
    EXPECT_FALSE(y.equal((*model)(x)));  // another mask
  });
}

/// Otherwise the whole parameter would stay in memory with its holder.
TEST(Adopted, TheModuleItselfHasTheShards) {
  RunRanks(2, [](Rank& rank) {
    const auto module = std::make_shared<testing::TorchMlp>();
    const at::Tensor before = module->up->weight;
    const auto model = nn::adopt(module);
    fsdp::fully_shard(*model, rank.mesh({2}, {"dp"}));
    EXPECT_TRUE(tessera::is_distributed(module->up->weight));
    EXPECT_TRUE(tessera::is_distributed(module->named_parameters()["up.weight"]));
    EXPECT_ERROR(module->forward(testing::uniform_values({2, 5}, 1)), "'up.", "(*m)(x)");
  });
}

TEST(Adopted, StylesThatNeedHooksAreRefusedByName) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    const auto model = nn::adopt(std::make_shared<testing::TorchMlp>());
    EXPECT_ERROR(parallelize_module(*model, mesh, {{"norm", sequence_parallel()}}), "'norm'",
                 "torch::nn::LayerNormImpl", "nn::Hooked");
    EXPECT_ERROR(parallelize_module(*model, mesh,
                                    {{"down", rowwise_parallel({.output_layouts = Shard{0}})}}),
                 "'down'", "torch::nn::LinearImpl", "rowwise_parallel()");
    EXPECT_ERROR(parallelize_module(*model, mesh, {{"norm", colwise_parallel()}}), "'norm'",
                 "colwise_parallel", "Linear and Embedding");
  });
}

}  // namespace adopted

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
                 "colwise_parallel", "Linear and Embedding", "LayerNorm");
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
                   "sparse(false)");
    }
  });
}

namespace inner_modules {

constexpr std::int64_t kRows = 6, kTokens = 3, kDim = 8;

using Layer = nn::Hooked<torch::nn::TransformerEncoderLayer>;

/// (tokens, rows, dim) -> a loss.
class Stock : public nn::Module<Stock> {
 public:
  Stock() {
    for (const char* name : {"first", "second"}) {
      layers.push_back(register_module(
          name,
          std::make_shared<Layer>(
              torch::nn::TransformerEncoderLayerOptions(kDim, 2).dim_feedforward(10).dropout(0))));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers) {
      x = (*layer)(x);
    }
    return x.sin().mean();
  }
  void reset_parameters(const nn::InitContext& init) override {
    init.fill(*this, {{"**", nn::init::uniform(-0.3, 0.3)}});
  }
  /// The persistent tensor of a parameter.
  const at::Tensor& tensor(const std::string& fqn) const {
    for (const auto& [name, slot] : named_slots()) {
      if (name == fqn) {
        return slot->persistent();
      }
    }
    fail("there is no ", fqn);
  }
  std::vector<std::shared_ptr<Layer>> layers;
};

at::Tensor rows_of(int rank, int ranks) {
  const std::int64_t rows = kRows / ranks;
  return testing::uniform_values({kTokens, kRows, kDim}, 0.4).narrow(1, rank * rows, rows);
}

void expect_as_alone(Stock& model, const at::Tensor& x) {
  testing::Filled<Stock> alone;
  alone(rows_of(0, 1)).backward();
  model(x).backward();
  testing::expect_gradients(model, testing::gradients_of(alone));
}

TEST(InnerModules, AreShardedWithTheUnitOfTheModuleThatHoldsThem) {
  for (const int ranks : {2, 3}) {
    RunOnMesh({ranks}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
      testing::Filled<Stock> model;
      for (const auto& layer : model.layers) {
        fsdp::fully_shard(*layer, mesh);
      }
      fsdp::fully_shard(model, mesh);
      const at::Tensor& weight = model.tensor("second.self_attn.in_proj_weight");
      EXPECT_EQ(DistributedTensor(weight).placements(), Placements{Shard{0}});
      expect_as_alone(model, rows_of(rank.rank(), rank.size()));
    });
  }
}

TEST(InnerModules, AreReplicatedByAPlanOrPlacedAsItSays) {
  for (const int ranks : {1, 2, 3}) {
    RunRanks(ranks, [](Rank& rank) {
      testing::Filled<Stock> model;
      parallelize_module(
          model, rank.mesh({rank.size()}, {"tp"}),
          {{"first.linear1",
            place_parameters({.placements = {{"weight", Shard{0}}, {"bias", Shard{0}}}})},
           {"first.linear2", place_parameters({.placements = {{"weight", Shard{1}}}})}});
      EXPECT_EQ(DistributedTensor(model.tensor("first.linear2.weight")).placements(),
                Placements{Shard{1}});
      EXPECT_EQ(DistributedTensor(model.tensor("second.linear2.weight")).placements(),
                Placements{Replicate{}});
      expect_as_alone(model, rows_of(0, 1));
    });
  }
}

TEST(InnerModules, MadeOnTheMetaDeviceAreFilledAlikeOnEveryMesh) {
  const auto values = [](Rank& rank) {
    const auto model = testing::made_on_meta<Stock>();
    fsdp::fully_shard(*model, rank.mesh({rank.size()}, {"dp"}));
    nn::to_empty(*model, at::kCPU);
    nn::init_weights(*model, 3);
    return testing::parameter_values(*model);
  };
  at::Tensor expected;
  RunRanks(1, [&](Rank& rank) { expected = values(rank); });
  RunRanks(3, [&](Rank& rank) { EXPECT_TRUE(values(rank).equal(expected)); });
}

TEST(InnerModules, TakeNoStyleWhoseHooksWouldNotRun) {
  RunRanks(2, [](Rank& rank) {
    Stock model;
    EXPECT_ERROR(parallelize_module(model, rank.mesh({2}, {"tp"}),
                                    {{"first.linear1", replicate_parallel()}}),
                 "'first.linear1'", "torch::nn::LinearImpl", "nn::Hooked", "place_parameters()");
    EXPECT_ERROR(fsdp::fully_shard(
                     dynamic_cast<nn::ModuleBase&>(*model.layers[0]->named_children()["linear1"]),
                     rank.mesh({2}, {"dp"})),
                 "torch::nn::LinearImpl", "nn::Hooked", "apply it to the module");
  });
}

}  // namespace inner_modules
}  // namespace
}  // namespace tessera::tensor_parallel
