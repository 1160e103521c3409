// Parameters that no style of their module places, since no entry names them or a container has
// them. They have the gradients of one rank.

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/linear.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel::unnamed {
namespace {

using testing::fill;
using testing::Filled;
using testing::full_tensor;
using testing::uniform_values;

/// 4 heads of 2 features: a norm that all heads share, a gain for each head, and a scale of the
/// whole. `shift`, (1), is added to the input, which is plain.
class Heads : public nn::Module<Heads> {
 public:
  Heads() {
    const nn::LinearOptions no_bias{.bias = false};
    q = register_module("q", std::make_shared<nn::Linear>(8, 8, no_bias));
    q_norm = register_module("q_norm", std::make_shared<nn::RMSNorm>(2));
    o = register_module("o", std::make_shared<nn::Linear>(8, 8, no_bias));
    gain = register_slot("gain", at::ones({4, 1}));
    scale = register_slot("scale", at::ones({}));
    shift = register_slot("shift", at::ones({1}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor heads = (*q)(x + *shift).view({x.size(0), -1, 2});
    return (*o)(((*q_norm)(heads) * *gain).flatten(1)) * *scale;
  }

  std::shared_ptr<nn::Linear> q, o;
  std::shared_ptr<nn::RMSNorm> q_norm;
  nn::Parameter gain, scale, shift;
};

class Model : public nn::Module<Model> {
 public:
  Model() {
    layers = register_module("layers", std::make_shared<nn::ModuleList>());
    for (int i = 0; i < 2; ++i) {
      layers->push_back(std::make_shared<Heads>());
    }
    norm = register_module("norm", std::make_shared<nn::RMSNorm>(8));
    fill(*this);
  }
  /// The loss plus an auxiliary loss of the local parts.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target) {
    at::Tensor y = x;
    for (std::size_t i = 0; i < 2; ++i) {
      y = y + layer(i)(y);
    }
    const at::Tensor auxiliary = (*layer(0).q)(x).square().mean();
    return ((*norm)(y)-target).square().mean() + 0.1 * auxiliary;
  }
  Heads& layer(std::size_t i) { return *layers->at<Heads>(i); }

  std::shared_ptr<nn::ModuleList> layers;
  std::shared_ptr<nn::RMSNorm> norm;
};

at::Tensor tokens(int rows = 5) {
  return uniform_values({rows, 8}, 0.5);
}

at::Tensor target(int rows = 5) {
  return uniform_values({rows, 8}, 0.7);
}

ParallelizePlan plan() {
  return {{"layers.*.q", colwise_parallel()}, {"layers.*.o", rowwise_parallel()}};
}

void expect_as_alone(Model& model) {
  Model alone;
  const at::Tensor expected = alone(tokens(), target());
  expected.backward();
  const at::Tensor loss = model(tokens(), target());
  loss.backward();
  EXPECT_TRUE(full_tensor(loss).allclose(expected.detach(), 1e-5, 1e-6));
  testing::expect_gradients(model, testing::gradients_of(alone));
}

TEST(UnnamedParameters, HaveTheGradientsOfOneRank) {
  for (const int ranks : {1, 2, 4}) {
    RunOnMesh({ranks}, {"tp"}, [](const DeviceMesh& mesh) {
      Model model;
      parallelize_module(model, mesh, plan());
      expect_as_alone(model);
    });
  }
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    Model model;
    parallelize_module(model, mesh["tp"], plan());
    fsdp::fully_shard(*model.layer(1).q_norm, mesh["dp"]);
    fsdp::fully_shard(model.layer(1), mesh["dp"]);
    fsdp::fully_shard(model, mesh["dp"]);
    expect_as_alone(model);
  });
}

TEST(UnnamedParameters, StayPlainIfTheyDifferByRank) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    Model model;
    model.norm->slot("weight")->set_distinct_along(mesh);
    parallelize_module(model, mesh, plan());
    EXPECT_FALSE(tessera::is_distributed(model.norm->weight));
    EXPECT_TRUE(tessera::is_distributed(model.layer(0).gain));
  });
}

TEST(PlainTensors, GetPlainAndWholeGradients) {
  Model alone;
  const at::Tensor x_alone = tokens().requires_grad_();
  const at::Tensor target_alone = target().requires_grad_();
  alone(x_alone, target_alone).backward();
  RunRanks(2, [&](Rank& rank) {
    Model model;
    parallelize_module(model, rank.mesh({2}, {"tp"}), plan());
    for (int step = 0; step < 2; ++step) {
      const at::Tensor x = tokens().requires_grad_();
      const at::Tensor of_loss = target().requires_grad_();
      model(x, of_loss).backward();
      EXPECT_FALSE(tessera::is_distributed(x.grad()));
      EXPECT_FALSE(tessera::is_distributed(of_loss.grad()));
      EXPECT_TRUE(x.grad().allclose(x_alone.grad(), 1e-5, 1e-6));
      EXPECT_TRUE(of_loss.grad().allclose(target_alone.grad(), 1e-5, 1e-6));
    }
  });
}

TEST(PlainTensors, MadeOutsideTheForwardAreNotMixedWithItsResult) {
  struct Linear : nn::Module<Linear> {
    at::Tensor forward(const at::Tensor& x) { return (*q)(x); }
    nn::Child<nn::Linear> q{*this, "q", 8, 8};
  };
  RunRanks(2, [](Rank& rank) {
    Filled<Linear> model;
    parallelize_module(model, rank.mesh({2}, {"tp"}), {{"q", colwise_parallel()}});
    EXPECT_ERROR(model(tokens()) - target(), "plain", "use_local_output = true");
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel::unnamed

namespace tessera::tensor_parallel {
namespace {

constexpr std::int64_t kDim = 6;
constexpr std::int64_t kPatches = 5;

/// x + scale * down(gelu(up(norm(x)))), with a LayerScale.
struct ScaledBlock : nn::Module<ScaledBlock> {
  ScaledBlock() { scale = register_slot("scale", {kDim}); }
  at::Tensor forward(const at::Tensor& x) {
    return x + *scale * (*down)(at::gelu((*up)((*norm)(x))));
  }
  nn::Child<nn::LayerNorm> norm{*this, "norm", kDim};
  nn::Child<nn::Linear> up{*this, "up", kDim, 9}, down{*this, "down", 9, kDim};
  nn::Parameter scale;
};

/// (patches, dim) -> a loss: a class token and two registers in front, learned positions.
class Encoder : public nn::Module<Encoder> {
 public:
  Encoder() {
    token = register_slot("token", {1, kDim});
    registers = register_slot("registers", {2, kDim});
    positions = register_slot("positions", {3 + kPatches, kDim});
    blocks = register_module("blocks", std::make_shared<nn::ModuleList>());
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
  std::shared_ptr<nn::ModuleList> blocks;
};

ParallelizePlan plan() {
  return {{"blocks.*.norm", sequence_parallel({.sequence_dim = 0})},
          {"blocks.*.up", colwise_parallel()},
          {"blocks.*.down", rowwise_parallel({.output_layouts = Shard{0}})}};
}

void expect_as_alone(Encoder& model) {
  const at::Tensor patches = testing::uniform_values({kPatches, kDim}, 0.5);
  Encoder alone;
  const at::Tensor expected = alone(patches);
  expected.backward();
  const at::Tensor loss = model(patches);
  loss.backward();
  EXPECT_TRUE(testing::full_tensor(loss).allclose(expected, 1e-5, 1e-6));
  testing::expect_gradients(model, testing::gradients_of(alone));
}

// No entry, or a style, may name the container and its blocks.
TEST(OwnParameters, InAContainerHaveTheGradientsOfOneRank) {
  ParallelizePlan named = plan();
  named.push_back({"", replicate_parallel()});
  named.push_back({"blocks.*", replicate_parallel()});
  for (const ParallelizePlan& styles : {plan(), named}) {
    for (const int ranks : {1, 2, 3}) {
      RunOnMesh({ranks}, {"tp"}, [&](const DeviceMesh& mesh) {
        Encoder model;
        parallelize_module(model, mesh, styles);
        expect_as_alone(model);
      });
    }
  }
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    Encoder model;
    parallelize_module(model, mesh["tp"], plan());
    for (std::size_t i = 0; i < 2; ++i) {
      fsdp::fully_shard(*model.blocks->at<ScaledBlock>(i), mesh["dp"]);
    }
    fsdp::fully_shard(model, mesh["dp"]);
    expect_as_alone(model);
  });
}

TEST(OwnParameters, MayBePlacedByAnEntryNextToEntriesOfModulesBelow) {
  for (const int ranks : {1, 2, 3}) {
    RunRanks(ranks, [](Rank& rank) {
      Encoder model;
      ParallelizePlan styles = plan();
      // Before and behind the entries of modules below: the order does not matter.
      styles.insert(styles.begin(),
                    {"", place_parameters({.placements = {{"positions", Shard{0}}}})});
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

TEST(OwnParameters, FollowTheInnermostEntry) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
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
  });
}

TEST(OwnParameters, AreRefusedIfTheModuleHasNone) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    Encoder model;
    EXPECT_ERROR(parallelize_module(model, mesh, {{"blocks", place_parameters()}}), "'blocks'",
                 "place_parameters");
    EXPECT_ERROR(parallelize_module(model, mesh,
                                    {{"", place_parameters({.placements = {{"tokn", Shard{0}}}})}}),
                 "parameter 'tokn'", "token, registers, positions");
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel
