// Models of libtorch's own modules, taken by nn::adopt, on meshes: loss and gradients are those of
// the model itself on one rank, which libtorch alone computes.

#include "nn/torch_models.h"
#include "tessera/dtensor/random.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/meta_device.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
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
    EXPECT_ERROR(parallelize_module(*model, mesh, {{"norm", sequence_parallel()}}),
                 "'norm' is a torch::nn::LayerNormImpl", "without hooks");
    EXPECT_ERROR(parallelize_module(*model, mesh,
                                    {{"down", rowwise_parallel({.output_layouts = Shard{0}})}}),
                 "'down' is a torch::nn::LinearImpl", "colwise_parallel() and rowwise_parallel()");
    EXPECT_ERROR(parallelize_module(*model, mesh, {{"norm", colwise_parallel()}}), "'norm'",
                 "colwise_parallel is for Linear and Embedding");
  });
}

}  // namespace adopted
}  // namespace
}  // namespace tessera::tensor_parallel
