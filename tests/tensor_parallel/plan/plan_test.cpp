#include "tensor_parallel/plan/plan_matching.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/child.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/norm.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {

struct Layer : nn::Module<Layer> {
  at::Tensor forward(const at::Tensor& x) { return (*down)((*up)(x)); }

  nn::Child<nn::Linear> up{*this, "up", 4, 6}, down{*this, "down", 6, 4};
};

class Tree : public nn::Module<Tree> {
 public:
  Tree() {
    embed = register_module("embed", std::make_shared<nn::Embedding>(10, 4));
    layers = register_module("layers", std::make_shared<nn::ModuleList>());
    for (int i = 0; i < 3; ++i) {
      layers->push_back(std::make_shared<Layer>());
    }
    norm = register_module("norm", std::make_shared<nn::RMSNorm>(4));
    head = register_module("head",
                           std::make_shared<nn::Linear>(4, 10, nn::LinearOptions{.bias = false}));
    for (const auto& [name, slot] : named_slots()) {
      const at::Tensor values = slot->get().detach();
      values.copy_(at::arange(values.numel()).view(values.sizes()));
    }
  }
  Layer& layer(std::size_t i) { return *layers->at<Layer>(i); }

  std::shared_ptr<nn::Embedding> embed;
  std::shared_ptr<nn::ModuleList> layers;
  std::shared_ptr<nn::RMSNorm> norm;
  std::shared_ptr<nn::Linear> head;
};

std::vector<std::string> fqns(Tree& tree, const std::string& pattern) {
  std::vector<std::string> names;
  for (const NamedModule& match : match_modules(tree, pattern)) {
    names.push_back(match.fqn);
  }
  return names;
}

TEST(PlanMatching, FindsAllMatchesOfAWildcard) {
  Tree tree;
  EXPECT_EQ(fqns(tree, "layers.*.up"),
            (std::vector<std::string>{"layers.0.up", "layers.1.up", "layers.2.up"}));
  EXPECT_EQ(fqns(tree, "layers.[02].?o*"),
            (std::vector<std::string>{"layers.0.down", "layers.2.down"}));
}

TEST(PlanMatching, TakesTheEmptyPatternForTheRoot) {
  Tree tree;
  EXPECT_EQ(match_modules(tree, "").at(0).module, &tree);
}

TEST(PlanMatching, LetsAStarNotCrossADot) {
  Tree tree;
  EXPECT_ERROR(match_modules(tree, "*.up"), "'*.up' matches no module");
}

TEST(PlanMatching, NamesTheChildrenWhereAPatternEnds) {
  Tree tree;
  EXPECT_ERROR(match_modules(tree, "layers.1.gate"), "'gate'", "[up, down]");
}

TEST(Parallelize, ShardsParametersAsTheStylesSay) {
  RunRanks(4, [](Rank& rank) {
    Tree tree;
    const at::Tensor up = tree.layer(1).up->weight->detach().clone();
    const at::Tensor down = tree.layer(1).down->weight->detach().clone();
    parallelize_module(tree, rank.mesh({4}, {"tp"}),
                       {{"embed", rowwise_parallel()},
                        {"layers.*.up", colwise_parallel()},
                        {"layers.*.down", rowwise_parallel()},
                        {"norm", sequence_parallel({.sequence_dim = 0})}});
    const auto r = static_cast<std::size_t>(rank.rank());
    // 6 over 4 ranks: 2, 2, 2, 0.
    EXPECT_EQ(local_tensor(tree.layer(1).up->weight).size(0), r < 3 ? 2 : 0);
    EXPECT_TRUE(DistributedTensor(tree.layer(1).up->weight).full_tensor().equal(up));
    EXPECT_TRUE(DistributedTensor(tree.layer(1).down->weight).full_tensor().equal(down));
    EXPECT_EQ(DistributedTensor(tree.layer(2).down->weight).placements(), Placements{Shard{1}});
    EXPECT_EQ(DistributedTensor(tree.layer(2).down->bias).placements(), Placements{Replicate{}});
    EXPECT_EQ(DistributedTensor(tree.embed->weight).placements(), Placements{Shard{0}});
    EXPECT_EQ(DistributedTensor(tree.norm->weight).placements(), Placements{Replicate{}});
    // No entry names it.
    EXPECT_EQ(DistributedTensor(tree.head->weight).placements(), Placements{Replicate{}});
  });
}

TEST(Parallelize, NeedsNoCommunication) {
  RunRanks(2, [](Rank& rank) {
    Tree tree;
    parallelize_module(tree, rank.mesh({2}, {"tp"}), {{"layers.*.up", colwise_parallel()}});
    EXPECT_TRUE(rank.world()->traffic().table().empty());
  });
}

TEST(Parallelize, FreesTheWholeParameter) {
  RunRanks(2, [](Rank& rank) {
    nn::Linear linear(4, 6);
    parallelize_module(linear, rank.mesh({2}, {"tp"}), {{"", colwise_parallel()}});
    EXPECT_EQ(local_tensor(linear.weight).storage().nbytes(), 3 * 4 * sizeof(float));
  });
}

TEST(Parallelize, KeepsFrozenParametersFrozen) {
  RunRanks(2, [](Rank& rank) {
    Tree tree;
    tree.norm->slot("weight")->get().set_requires_grad(false);
    tree.head->slot("weight")->get().set_requires_grad(false);
    parallelize_module(tree, rank.mesh({2}, {"tp"}),
                       {{"norm", sequence_parallel()}, {"head", colwise_parallel()}});
    EXPECT_FALSE(tree.norm->weight->requires_grad());
    EXPECT_FALSE(tree.head->weight->requires_grad());
    EXPECT_TRUE(tree.embed->weight->requires_grad());
  });
}

TEST(Parallelize, KeepsTiedWeightsTied) {
  RunRanks(2, [](Rank& rank) {
    Tree tree;
    tree.head->tie_slot("weight", tree.embed->slot("weight"));
    parallelize_module(tree, rank.mesh({2}, {"tp"}),
                       {{"embed", rowwise_parallel()}, {"head", colwise_parallel()}});
    EXPECT_TRUE(tree.head->weight->is_same(*tree.embed->weight));
    EXPECT_EQ(DistributedTensor(tree.head->weight).placements(), Placements{Shard{0}});
  });
}

TEST(Parallelize, RefusesTwoPlacementsOfATiedWeight) {
  RunRanks(2, [](Rank& rank) {
    Tree tree;
    tree.head->tie_slot("weight", tree.embed->slot("weight"));
    EXPECT_ERROR(parallelize_module(tree, rank.mesh({2}, {"tp"}),
                                    {{"embed", colwise_parallel()}, {"head", colwise_parallel()}}),
                 "tied");
    EXPECT_FALSE(tessera::is_distributed(tree.head->weight));
  });
}

TEST(Parallelize, ShardsMetaParameters) {
  RunRanks(2, [](Rank& rank) {
    const auto linear = testing::made_on_meta<nn::Linear>(4, 7);
    parallelize_module(*linear, rank.mesh({2}, {"tp"}), {{"", colwise_parallel()}});
    EXPECT_TRUE(linear->weight->is_meta());
    EXPECT_EQ(local_tensor(linear->weight).size(0), rank.rank() == 0 ? 4 : 3);
  });
}

TEST(Parallelize, ChangesNothingWhenAnEntryMatchesNothing) {
  RunRanks(2, [](Rank& rank) {
    Tree tree;
    EXPECT_ERROR(parallelize_module(tree, rank.mesh({2}, {"tp"}),
                                    {{"layers.*.up", colwise_parallel()},
                                     {"layers.*.sideways", rowwise_parallel()}}),
                 "layers.*.sideways");
    EXPECT_FALSE(tessera::is_distributed(tree.layer(0).up->weight));
  });
}

TEST(Parallelize, RefusesAStyleThatDoesNotFit) {
  RunRanks(2, [](Rank& rank) {
    Tree tree;
    EXPECT_ERROR(parallelize_module(tree, rank.mesh({2}, {"tp"}),
                                    {{"embed", rowwise_parallel()}, {"norm", colwise_parallel()}}),
                 "colwise_parallel");
    EXPECT_FALSE(tessera::is_distributed(tree.embed->weight));
  });
}

TEST(Parallelize, RefusesTwoStylesForOneModule) {
  RunRanks(2, [](Rank& rank) {
    Tree tree;
    EXPECT_ERROR(parallelize_module(
                     tree, rank.mesh({2}, {"tp"}),
                     {{"layers.*.up", colwise_parallel()}, {"layers.0.up", rowwise_parallel()}}),
                 "two entries of the plan place the parameters of");
    EXPECT_FALSE(tessera::is_distributed(tree.layer(0).up->weight));
  });
}

// As torchtitan: one plan of the model, then one of each block.
TEST(Parallelize, TakesASecondPlanOfWhatTheFirstDidNotName) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    Tree tree;
    const at::Tensor up = tree.layer(1).up->weight->detach().clone();
    parallelize_module(tree, mesh, {{"head", colwise_parallel()}});
    parallelize_module(tree.layer(1), mesh, {{"up", colwise_parallel()}});
    EXPECT_EQ(DistributedTensor(tree.layer(1).up->weight).placements(), Placements{Shard{0}});
    EXPECT_TRUE(DistributedTensor(tree.layer(1).up->weight).full_tensor().equal(up));
    EXPECT_EQ(DistributedTensor(tree.layer(1).down->weight).placements(), Placements{Replicate{}});
    EXPECT_EQ(DistributedTensor(tree.layer(0).up->weight).placements(), Placements{Replicate{}});
  });
}

TEST(Parallelize, RefusesASecondPlanOfTheSameParameters) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    Tree tree;
    parallelize_module(tree, mesh, {{"head", colwise_parallel()}});
    EXPECT_ERROR(parallelize_module(tree, mesh, {{"head", colwise_parallel()}}),
                 "is distributed already");
  });
}

TEST(Parallelize, RefusesAShardedModule) {
  RunOnMesh({1, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    Tree tree;
    fsdp::fully_shard(*tree.head, mesh["dp"]);
    EXPECT_ERROR(parallelize_module(tree, mesh["tp"], {{"head", colwise_parallel()}}),
                 "belong to an FSDP unit");
  });
}

TEST(Parallelize, RefusesAMeshThatIsNotOneDimensional) {
  RunRanks(4, [](Rank& rank) {
    Tree tree;
    EXPECT_ERROR(parallelize_module(tree, rank.mesh({2, 2}, {"dp", "tp"}), {}),
                 "the mesh is DeviceMesh((dp=2, tp=2), cpu)");
  });
}

TEST(Parallelize, RefusesListsOfUnlikeLength) {
  EXPECT_ERROR(prepare_module_input({.input_layouts = {Replicate{}}, .desired_input_layouts = {}}),
               "1 placements and 0 desired ones");
}

}  // namespace
}  // namespace tessera::tensor_parallel
