// Tests libtorch modules (in nn::Hooked) under tensor-parallel plans and FSDP, and modules with
// parameters that no plan entry matches.

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/transformerlayer.h>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
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
  return place_parameters(std::move(placements));
}

struct Expected {
  double loss = 0;
  std::vector<at::Tensor> gradients;
};

template <class M>
Expected of_libtorch(const std::shared_ptr<M>& module, const at::Tensor& x) {
  double seed = 0;
  for (at::Tensor& parameter : module->parameters()) {
    const c10::NoGradGuard no_grad;
    parameter.copy_(uniform_values(parameter.sizes(), seed++, 0.3));
  }
  const at::Tensor loss = module->forward(x).square().mean();
  loss.backward();
  Expected expected{loss.template item<double>(), {}};
  for (const at::Tensor& parameter : module->parameters()) {
    expected.gradients.push_back(parameter.grad());
  }
  return expected;
}

/// Compares a module under a plan with libtorch on one rank. dp splits dimension `rows_dim` of x.
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
      at::Tensor sum = full_tensor(loss).clone();
      mesh["dp"].group().all_reduce(sum, ReduceOp::kSum)->wait();
      EXPECT_NEAR(sum.item<double>() / static_cast<double>(sizes[0]), expected.loss, 1e-5);
      testing::expect_gradients(*model, expected.gradients);
    });
  }
}

TEST(Adopted, TrainsLikeTheLibtorchModule) {
  const at::Tensor x = uniform_values({6, 5}, 1);
  expect_as_libtorch([] { return std::make_shared<testing::TorchMlp>(); }, x, 0,
                     {{"up", colwise_parallel()}, {"down", rowwise_parallel()}});
  expect_as_libtorch([] { return testing::torch_sequential().ptr(); }, x, 0,
                     {{"0", colwise_parallel()}, {"2", rowwise_parallel()}});
  expect_as_libtorch([] { return std::make_shared<testing::TorchConvNet>(); },
                     uniform_values({6, 2, 6, 6}, 1), 0,
                     {{"first", placed({{"weight", Shard{0}}, {"bias", Shard{0}}})},
                      {"second", placed({{"weight", Shard{1}}})},
                      {"head", colwise_parallel()}});
  expect_as_libtorch(
      [] { return testing::torch_encoder().ptr(); }, uniform_values({3, 6, 8}, 0.4), 1,
      {{"layers.*.linear1", colwise_parallel()}, {"layers.*.linear2", rowwise_parallel()}});
  const auto embedding = [] {
    return torch::nn::Sequential(torch::nn::Embedding(11, 5), torch::nn::Linear(5, 3)).ptr();
  };
  const at::Tensor ids = at::arange(12, at::kLong).mul(5).remainder(11).view({6, 2});
  expect_as_libtorch(embedding, ids, 0, {{"0", colwise_parallel()}});
  expect_as_libtorch(embedding, ids, 0, {{"0", rowwise_parallel()}});
}

TEST(Adopted, HasEqualInitialWeightsOnEveryMesh) {
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

TEST(Adopted, TrainsParametersInNamedMembers) {
  const auto expected =
      of_libtorch(std::make_shared<testing::TorchScaled>(), uniform_values({6, 5}, 1));
  RunRanks(2, [&](Rank& rank) {
    const auto model = nn::adopt<testing::TorchScale>(std::make_shared<testing::TorchScaled>());
    testing::fill(*model);
    fsdp::fully_shard(*model, rank.mesh({2}, {"dp"}));
    (*model)(uniform_values({6, 5}, 1).narrow(0, rank.rank() * 3, 3)).square().mean().backward();
    testing::expect_gradients(*model, expected.gradients);
  });
}

/// After fully_shard(), the libtorch module must have only this rank's shards in memory.
TEST_ON_RANKS(Adopted, ReplacesParametersOfTheLibtorchModuleByShards, 2) {
  const auto module = std::make_shared<testing::TorchMlp>();
  const at::Tensor before = module->up->weight;
  const auto model = nn::adopt(module);
  fsdp::fully_shard(*model, rank.mesh({2}, {"dp"}));
  EXPECT_TRUE(tessera::is_distributed(module->up->weight));
  EXPECT_TRUE(tessera::is_distributed(module->named_parameters()["up.weight"]));
  EXPECT_ERROR(module->forward(uniform_values({2, 5}, 1)), "'up.", "(*m)(x)");
}

}  // namespace adopted

using HookedLinear = nn::Hooked<torch::nn::Linear>;
using HookedEmbedding = nn::Hooked<torch::nn::Embedding>;
using HookedNorm = nn::Hooked<torch::nn::LayerNorm>;

/// Exactly one of three ranks must add the bias: three times a third of the bias is rounded
/// differently. After the call the module must have its bias again.
TEST_ON_RANKS(StockModules, AddTheBiasOnce, 3) {
  HookedLinear linear(6, 2);
  linear.held().weight.detach().zero_();
  linear.held().bias.detach().fill_(0.1);
  parallelize_module(linear, rank.mesh({3}, {"tp"}), {{"", rowwise_parallel()}});
  EXPECT_TRUE(full_tensor(linear(uniform_values({4, 6}, 1))).equal(at::full({4, 2}, 0.1F)));
  EXPECT_TRUE(linear.held().bias.defined());
  EXPECT_THROWN(std::exception, linear(uniform_values({4, 3}, 1)), "6 input features");
  EXPECT_TRUE(linear.held().bias.defined());
}

TEST_ON_MESH(Adopted, RefusesUnsuitableStyles, {2}, {"tp"}) {
  struct Table : nn::Module<Table> {
    nn::Child<HookedEmbedding> rows{*this, "rows", torch::nn::EmbeddingOptions(4, 3).sparse(true)};
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
      {"a unit of an inner module",
       [&] {
         fsdp::fully_shard(dynamic_cast<nn::ModuleBase&>(*model->named_children()["down"]), mesh);
       },
       {"torch::nn::LinearImpl", "nn::Hooked", "apply fully_shard to the module"}},
      {"sparse gradients, columns",
       applying(table, "rows", colwise_parallel()),
       {"'rows'", "Embedding", "sparse(false)"}},
      {"sparse gradients, rows",
       applying(table, "rows", rowwise_parallel()),
       {"'rows'", "Embedding", "sparse(false)"}},
  });
}

constexpr std::int64_t kDim = 6;
constexpr std::int64_t kPatches = 5;

/// A residual MLP whose branch is multiplied by a learned scale (LayerScale).
struct ScaledBlock : nn::Module<ScaledBlock> {
  ScaledBlock() { scale = register_slot("scale", {kDim}); }
  at::Tensor forward(const at::Tensor& x) {
    return x + *scale * (*down)(at::gelu((*up)((*norm)(x))));
  }
  nn::Child<nn::LayerNorm> norm{*this, "norm", kDim};
  nn::Child<nn::Linear> up{*this, "up", kDim, 9}, down{*this, "down", 9, kDim};
  nn::Parameter scale;
};

/// Maps (patches, dim) to a loss. Prepends a class token and two register tokens; adds positions.
struct Encoder : nn::Module<Encoder> {
  Encoder() {
    token = register_slot("token", {1, kDim});
    registers = register_slot("registers", {2, kDim});
    positions = register_slot("positions", {3 + kPatches, kDim});
    for (int i = 0; i < 2; ++i) {
      blocks->push_back(std::make_shared<ScaledBlock>());
    }
    testing::fill(*this);
  }
  at::Tensor forward(const at::Tensor& patches) {
    at::Tensor x = at::cat({*token, *registers, patches}) + *positions;
    for (std::size_t i = 0; i < 2; ++i) {
      x = (*blocks->at<ScaledBlock>(i))(x);
    }
    return x[0].square().sum() + x.slice(0, 3).sin().mean();
  }
  nn::Parameter token, registers, positions;
  nn::Child<nn::ModuleList> blocks{*this, "blocks"};
};

ParallelizePlan plan() {
  return {{"blocks.*.norm", sequence_parallel({.sequence_dim = 0})},
          {"blocks.*.up", colwise_parallel()},
          {"blocks.*.down", rowwise_parallel({.output_layouts = Shard{0}})}};
}

void expect_as_alone(Encoder& model) {
  const at::Tensor patches = uniform_values({kPatches, kDim}, 0.5);
  Encoder alone;
  const at::Tensor expected = alone(patches);
  expected.backward();
  const at::Tensor loss = model(patches);
  loss.backward();
  EXPECT_TRUE(full_tensor(loss).allclose(expected, 1e-5, 1e-6));
  testing::expect_gradients(model, testing::gradients_of(alone));
}

TEST(OwnParameters, MayBePlacedTogetherWithSubmodules) {
  for (const int ranks : {1, 2, 3}) {
    RunRanks(ranks, [](Rank& rank) {
      Encoder model;
      ParallelizePlan styles = plan();
      styles.insert(styles.begin(), {"", place_parameters({{"positions", Shard{0}}})});
      styles.push_back({"blocks.*", place_parameters()});
      parallelize_module(model, rank.mesh({rank.size()}, {"tp"}), styles);
      EXPECT_EQ(DistributedTensor(*model.positions).placements(), Placements{Shard{0}});
      EXPECT_EQ(DistributedTensor(*model.token).placements(), Placements{Replicate{}});
      const auto block = model.blocks->at<ScaledBlock>(1);
      EXPECT_EQ(DistributedTensor(*block->scale).placements(), Placements{Replicate{}});
      EXPECT_EQ(DistributedTensor(*block->up->weight).placements(), Placements{Shard{0}});
      expect_as_alone(model);
    });
  }
}

TEST_ON_MESH(OwnParameters, FollowTheInnermostPlanEntry, {2}, {"tp"}) {
  Encoder model;
  EXPECT_ERROR(
      parallelize_module(model, mesh,
                         {{"blocks.0", place_parameters()}, {"blocks.*", replicate_parallel()}}),
      "'blocks.0'", "place_parameters", "replicate_parallel");
  parallelize_module(model, mesh,
                     {{"", replicate_parallel()},
                      {"blocks.0", replicate_parallel()},
                      {"blocks.0.up", colwise_parallel()}});
  const auto block = model.blocks->at<ScaledBlock>(0);
  EXPECT_EQ(DistributedTensor(*block->scale).placements(), Placements{Replicate{}});
  EXPECT_EQ(DistributedTensor(*block->up->weight).placements(), Placements{Shard{0}});
}

TEST_ON_MESH(UnnamedParameters, StayPlainIfMarkedDistinct, {2}, {"tp"}) {
  Encoder model;
  const auto block = model.blocks->at<ScaledBlock>(0);
  block->slot("scale")->set_distinct_along(mesh);
  parallelize_module(model, mesh, plan());
  EXPECT_FALSE(tessera::is_distributed(block->scale));
  EXPECT_TRUE(tessera::is_distributed(model.token));
}

TEST(PlainTensors, GetPlainAndWholeGradients) {
  Encoder alone;
  const at::Tensor expected = uniform_values({kPatches, kDim}, 0.5).clone().requires_grad_();
  alone(expected).backward();
  RunOnMesh({2}, {"tp"}, [&](const DeviceMesh& mesh) {
    Encoder model;
    parallelize_module(model, mesh, plan());
    for (int step = 0; step < 2; ++step) {
      const at::Tensor x = expected.detach().clone().requires_grad_();
      model(x).backward();
      EXPECT_FALSE(tessera::is_distributed(x.grad()));
      EXPECT_TRUE(x.grad().allclose(expected.grad(), 1e-4, 1e-6));
      for (const auto& [name, slot] : model.named_slots()) {
        slot->get().mutable_grad().reset();
      }
    }
  });
}

TEST(PlainTensors, CannotBeMixedWithDistributedResults) {
  struct Linear : nn::Module<Linear> {
    at::Tensor forward(const at::Tensor& x) { return (*q)(x); }
    nn::Child<nn::Linear> q{*this, "q", 8, 8};
  };
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    testing::Filled<Linear> model;
    parallelize_module(model, mesh, {{"q", colwise_parallel()}});
    const at::Tensor x = uniform_values({5, 8}, 0.5);
    EXPECT_ERROR(model(x) - x, "plain", "use_local_output = true");
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel
