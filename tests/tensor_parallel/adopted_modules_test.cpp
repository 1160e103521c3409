// Modules of libtorch in nn::Hooked, and their submodules, under plans and FSDP.

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/transformerlayer.h>

#include "tessera/dtensor/random.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/initialization.h"
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

/// The loss and the gradients of the libtorch module on one rank.
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

/// `make` returns a module. dp splits dimension `rows_dim` of x.
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

TEST(Adopted, TrainsAsItDoesAlone) {
  const at::Tensor x = testing::uniform_values({6, 5}, 1);
  expect_as_libtorch([] { return std::make_shared<testing::TorchMlp>(); }, x, 0,
                     {{"up", colwise_parallel()}, {"down", rowwise_parallel()}});
  expect_as_libtorch([] { return testing::torch_sequential().ptr(); }, x, 0,
                     {{"0", colwise_parallel()}, {"2", rowwise_parallel()}});
  expect_as_libtorch([] { return std::make_shared<testing::TorchConvNet>(); },
                     testing::uniform_values({6, 2, 6, 6}, 1), 0,
                     {{"first", placed({{"weight", Shard{0}}, {"bias", Shard{0}}})},
                      {"second", placed({{"weight", Shard{1}}})},
                      {"head", colwise_parallel()}});
  expect_as_libtorch(
      [] { return testing::torch_encoder().ptr(); }, testing::uniform_values({3, 6, 8}, 0.4), 1,
      {{"layers.*.linear1", colwise_parallel()}, {"layers.*.linear2", rowwise_parallel()}});
  const auto embedding = [] {
    return torch::nn::Sequential(torch::nn::Embedding(11, 5), torch::nn::Linear(5, 3)).ptr();
  };
  const at::Tensor ids = at::arange(12, at::kLong).mul(5).remainder(11).view({6, 2});
  expect_as_libtorch(embedding, ids, 0, {{"0", colwise_parallel()}});
  expect_as_libtorch(embedding, ids, 0, {{"0", rowwise_parallel()}});
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

TEST(Adopted, AParameterOfTheClassItselfTrainsIfItsMemberIsNamed) {
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

TEST(Adopted, DropoutOfTokensThatComeFirstNeedsABatchPart) {
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

/// The libtorch module must not keep the whole parameter in memory.
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

TEST(StockModules, TakeTheStylesOfLinearsEmbeddingsAndNorms) {
  StockModel alone;
  alone(token_ids()).square().sum().backward();
  const auto plan_of = [](const StylePtr& embedding, const StylePtr& norm) {
    return ParallelizePlan{{"embed", embedding},
                           {"norm", norm},
                           {"up", colwise_parallel()},
                           {"down", rowwise_parallel()}};
  };
  const std::vector<ParallelizePlan> plans{
      plan_of(rowwise_parallel(), replicate_parallel()),
      plan_of(colwise_parallel({.output_layouts = Replicate{}}), replicate_parallel()),
      // The norm on each rank's part of the 6 tokens of a sequence.
      plan_of(rowwise_parallel({.output_layouts = Shard{1}}), sequence_parallel())};
  for (const int ranks : {1, 2, 3, 4}) {
    RunOnMesh({ranks}, {"tp"}, [&](const DeviceMesh& mesh) {
      for (const ParallelizePlan& plan : plans) {
        if (ranks == 4 && &plan != &plans.back()) {
          continue;
        }
        StockModel model;
        parallelize_module(model, mesh, plan);
        EXPECT_EQ(DistributedTensor(model.down->slot("weight")->get()).placements(),
                  Placements{Shard{1}});
        expect_as_alone(model, alone);
      }
    });
  }
  RunOnMesh({2, 2}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
    StockModel model;
    parallelize_module(model, mesh["tp"], plans[0]);
    fsdp::fully_shard(*model.down, mesh["dp"]);
    fsdp::fully_shard(model, mesh["dp"]);
    // The ranks of dp have one batch, so that the mean of their gradients is the gradient.
    expect_as_alone(model, alone);
  });
}

/// Three times a third of the bias would be rounded. After the call the libtorch module has its
/// bias again.
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

TEST(Adopted, StylesThatDoNotFitAreRefusedByName) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    struct Table : nn::Module<Table> {
      nn::Child<HookedEmbedding> rows{*this, "rows",
                                      torch::nn::EmbeddingOptions(4, 3).sparse(true)};
    } table;
    HookedNorm norm(torch::nn::LayerNormOptions({4}));
    const auto model = nn::adopt(std::make_shared<testing::TorchMlp>());
    const auto applying = [&](nn::ModuleBase& to, const std::string& pattern, StylePtr style) {
      return [&to, &mesh, pattern, style] { parallelize_module(to, mesh, {{pattern, style}}); };
    };
    testing::expect_refusals({
        {"hooks of a norm",
         applying(*model, "norm", sequence_parallel()),
         {"'norm'", "torch::nn::LayerNormImpl", "nn::Hooked"}},
        {"hooks of a Linear",
         applying(*model, "down", rowwise_parallel({.output_layouts = Shard{0}})),
         {"'down'", "torch::nn::LinearImpl", "rowwise_parallel()"}},
        {"columns of a norm",
         applying(*model, "norm", colwise_parallel()),
         {"'norm'", "colwise_parallel", "Linear and Embedding"}},
        {"columns of a hooked norm",
         applying(norm, "", colwise_parallel()),
         {"colwise_parallel", "Linear and Embedding", "LayerNorm"}},
        {"sparse gradients, columns",
         applying(table, "rows", colwise_parallel()),
         {"'rows'", "Embedding", "sparse(false)"}},
        {"sparse gradients, rows",
         applying(table, "rows", rowwise_parallel()),
         {"'rows'", "Embedding", "sparse(false)"}},
    });
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

TEST(InnerModules, AreShardedWithTheUnitOfTheirParent) {
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

TEST(InnerModules, AreReplicatedOrPlacedByAPlan) {
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
