// Parameters that a container holds itself, under sequence parallelism: what they meet is split
// along the sequence, and they have the gradients of one rank without an entry in the plan.

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/child.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/norm.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/tensor_parallel/plan_table.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

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

TEST(OwnParameters, InAContainerHaveTheGradientsOfOneRank) {
  for (const int ranks : {1, 2, 3}) {
    RunRanks(ranks, [](Rank& rank) {
      Encoder model;
      parallelize_module(model, rank.mesh({rank.size()}, {"tp"}), plan());
      expect_as_alone(model);
    });
  }
}

TEST(OwnParameters, InAContainerHaveTheGradientsOfOneRankUnderFsdp) {
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

TEST(OwnParameters, InABlockMayBeNamedByAStyle) {
  RunRanks(2, [](Rank& rank) {
    Encoder model;
    ParallelizePlan styles = plan();
    styles.push_back({"", replicate_parallel()});
    styles.push_back({"blocks.*", replicate_parallel()});
    EXPECT_NO_THROW(parallelize_module(model, rank.mesh({2}, {"tp"}), styles));
    expect_as_alone(model);
  });
}

TEST(OwnParameters, MayBePlacedByAnEntryBesideThoseOfTheModulesBelow) {
  for (const int ranks : {1, 2, 3}) {
    RunRanks(ranks, [](Rank& rank) {
      Encoder model;
      ParallelizePlan styles = plan();
      // Before and behind those for modules below: the order says nothing.
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
    const PlanTable table = check_plan(model, mesh,
                                       {{"", replicate_parallel()},
                                        {"blocks.0", replicate_parallel()},
                                        {"blocks.0.up", colwise_parallel()}});
    std::size_t of_block = 0, of_up = 0;
    for (const PlanRow& row : table.rows) {
      of_block += row.fqn == "blocks.0" ? row.parameters.size() : 0;
      of_up += row.fqn == "blocks.0.up" ? row.parameters.size() : 0;
    }
    EXPECT_EQ(of_block, 5U);  // all but those of up
    EXPECT_EQ(of_up, 2U);
    EXPECT_ERROR(check_plan(model, mesh,
                            {{"blocks.0", place_parameters()}, {"blocks.*", replicate_parallel()}}),
                 "two entries of the plan place the parameters of 'blocks.0'");
  });
}

TEST(OwnParameters, AreRefusedIfTheModuleHasNone) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    Encoder model;
    EXPECT_ERROR(parallelize_module(model, mesh, {{"blocks", place_parameters()}}),
                 "parallelize_module: 'blocks': place_parameters", "no own parameters");
    EXPECT_ERROR(parallelize_module(model, mesh,
                                    {{"", place_parameters({.placements = {{"tokn", Shard{0}}}})}}),
                 "parameter 'tokn'", "token, registers, positions");
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel
