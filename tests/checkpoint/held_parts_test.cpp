// A step of training of what nn::Hooked holds, libtorch's TransformerEncoderLayer with parameters
// in its own modules, continues on another mesh as if nothing had been saved.

#include <torch/nn/modules/transformerlayer.h>

#include "nn/torch_models.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/child.h"
#include "tessera/nn/hooked.h"
#include "tessera/optim/adamw.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/files.h"
#include "testing/module_values.h"

namespace tessera::checkpoint {
namespace {
namespace held_parts {

constexpr std::int64_t kRows = 6, kTokens = 3, kDim = 8;

using Layer = nn::Hooked<torch::nn::TransformerEncoderLayer>;

torch::nn::TransformerEncoderLayerOptions options() {
  return torch::nn::TransformerEncoderLayerOptions(kDim, 2).dim_feedforward(10).dropout(0);
}

/// (tokens, rows, dim) -> a loss.
struct Encoder : nn::Module<Encoder> {
  at::Tensor forward(const at::Tensor& x) { return second(first(x)).sin().mean(); }
  nn::Child<Layer> first{*this, "first", options()};
  nn::Child<Layer> second{*this, "second", options()};
};

/// How a mesh of two dimensions splits it: by FSDP over the first, by a plan over the second.
void split(Encoder& model, const DeviceMesh& mesh) {
  using namespace tensor_parallel;
  testing::fill(model);
  parallelize_module(
      model, mesh["tp"],
      {{"*.linear1", place_parameters({.placements = {{"weight", Shard{0}}, {"bias", Shard{0}}}})},
       {"*.linear2", place_parameters({.placements = {{"weight", Shard{1}}}})}});
  fsdp::fully_shard(*model.first, mesh["dp"]);
  fsdp::fully_shard(model, mesh["dp"]);
}

void train(Encoder& model, optim::Sgd& optimizer, const DeviceMesh& mesh) {
  const std::int64_t rows = kRows / mesh.size("dp");
  const at::Tensor x = testing::uniform_values({kTokens, kRows, kDim}, 0.4);
  model(x.narrow(1, mesh.local_rank("dp") * rows, rows)).backward();
  optimizer.step();
  optimizer.zero_grad();
}

/// Runs `body` with a model that has not been trained.
void on_mesh(const std::vector<std::int64_t>& sizes,
             const std::function<void(Rank&, Encoder&, optim::Sgd&, const DeviceMesh&)>& body) {
  RunOnMesh(sizes, {"dp", "tp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Encoder model;
    split(model, mesh);
    optim::Sgd optimizer(model, {.lr = 0.1, .momentum = 0.9});
    body(rank, model, optimizer, mesh);
  });
}

TEST(HeldPartsCheckpoint, ContinuesOnAnyMesh) {
  const testing::TemporaryFolder dir;
  at::Tensor trained, further;
  on_mesh({3, 1}, [&](Rank& rank, Encoder& model, optim::Sgd& optimizer, const DeviceMesh& mesh) {
    train(model, optimizer, mesh);
    save(*rank.world(), dir.path(), 1, {model, optim::named_state(optimizer, model)});
    const at::Tensor saved = testing::parameter_values(model);
    train(model, optimizer, mesh);
    const at::Tensor next = testing::parameter_values(model);
    if (rank.rank() == 0) {
      trained = saved;
      further = next;
    }
  });
  for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{1, 1}, {2, 2}, {1, 3}, {6, 1}}) {
    on_mesh(sizes, [&](Rank& rank, Encoder& model, optim::Sgd& optimizer, const DeviceMesh& mesh) {
      const LoadReport report =
          load(*rank.world(), dir.path(), {model, optim::named_state(optimizer, model)});
      EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
      EXPECT_TRUE(testing::parameter_values(model).equal(trained));
      train(model, optimizer, mesh);
      EXPECT_TRUE(testing::parameter_values(model).allclose(further, 1e-4, 1e-5));
    });
  }
}

/// Statistics of a norm in an adopted model, and the buffer of the class itself.
TEST(HeldPartsCheckpoint, HasBuffersUnderTheirNamesInLibtorch) {
  const auto make = [](Rank& rank) {
    auto model = nn::adopt(std::make_shared<testing::TorchWithBuffers>());
    testing::fill(*model);
    fsdp::fully_shard(*model, rank.mesh({rank.size()}, {"dp"}));
    return model;
  };
  const at::Tensor x = testing::uniform_values({4, 5}, 0.7);
  const testing::TemporaryFolder dir;
  at::Tensor expected;
  RunRanks(2, [&](Rank& rank) {
    const auto model = make(rank);
    (*model)(x);
    model->held().shift.fill_(3);
    save(*rank.world(), dir.path(), 1, {*model});
    model->eval();
    const at::Tensor y = (*model)(x).detach();
    if (rank.rank() == 0) {
      expected = y;
    }
  });
  RunRanks(3, [&](Rank& rank) {
    const auto model = make(rank);
    const LoadReport report = load(*rank.world(), dir.path(), {*model});
    EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
    EXPECT_EQ(model->held().named_buffers()["norm.num_batches_tracked"].item<int>(), 1);
    model->eval();
    EXPECT_TRUE((*model)(x).allclose(expected));
  });
}

}  // namespace held_parts
}  // namespace
}  // namespace tessera::checkpoint
