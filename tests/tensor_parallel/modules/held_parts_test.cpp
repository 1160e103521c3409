// Parameters of modules inside of one that nn::Hooked holds: libtorch's TransformerEncoderLayer
// under FSDP and in plans, as one rank computes it.

#include <torch/nn/modules/transformerlayer.h>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/meta_device.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {
namespace held_parts {

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

TEST(HeldParts, AreShardedWithTheUnitOfTheModuleThatHoldsThem) {
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

TEST(HeldParts, AreReplicatedByAPlanOrPlacedAsItSays) {
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

TEST(HeldParts, MadeOnTheMetaDeviceAreFilledAlikeOnEveryMesh) {
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

TEST(HeldParts, TakeNoStyleWhoseHooksWouldNotRun) {
  RunRanks(2, [](Rank& rank) {
    Stock model;
    EXPECT_ERROR(parallelize_module(model, rank.mesh({2}, {"tp"}),
                                    {{"first.linear1", replicate_parallel()}}),
                 "'first.linear1' is a torch::nn::LinearImpl inside of a module that nn::Hooked "
                 "holds",
                 "place_parameters()");
    EXPECT_ERROR(fsdp::fully_shard(
                     dynamic_cast<nn::ModuleBase&>(*model.layers[0]->named_children()["linear1"]),
                     rank.mesh({2}, {"dp"})),
                 "torch::nn::LinearImpl", "nn::Hooked", "apply it to the module");
  });
}

}  // namespace held_parts
}  // namespace
}  // namespace tessera::tensor_parallel
