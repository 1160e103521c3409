// A module class says itself how it is split; a model of such modules needs no plan. And what a
// module takes and returns is prepared by one entry.

#include "tessera/tensor_parallel/declared_plan.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/norm.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {

using testing::uniform_values;

class DeclaringMlp : public nn::Module<DeclaringMlp>, public DeclaresPlan {
 public:
  DeclaringMlp() {
    up = register_module("up", std::make_shared<nn::Linear>(6, 11));
    down = register_module("down", std::make_shared<nn::Linear>(11, 6));
  }
  at::Tensor forward(const at::Tensor& x) { return (*down)((*up)(x).sigmoid()); }
  ParallelizePlan tensor_parallel_plan(const DeviceMesh& mesh,
                                       const DeclaredPlanOptions& options) const override {
    TESSERA_CHECK(options.sequence_parallel, "a DeclaringMlp on ", mesh.size(), " ranks");
    return {{"up", colwise_parallel()}, {"down", rowwise_parallel()}};
  }
  std::shared_ptr<nn::Linear> up, down;
};

class Stacked : public nn::Module<Stacked> {
 public:
  Stacked() {
    layers = register_module("layers", std::make_shared<nn::ModuleList>());
    layers->push_back(std::make_shared<DeclaringMlp>());
    layers->push_back(std::make_shared<DeclaringMlp>());
    norm = register_module("norm", std::make_shared<nn::RMSNorm>(6));
    testing::fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return (*norm)(layer(1)(layer(0)(x))); }
  DeclaringMlp& layer(std::size_t i) { return *layers->at<DeclaringMlp>(i); }
  std::shared_ptr<nn::ModuleList> layers;
  std::shared_ptr<nn::RMSNorm> norm;
};

TEST(DeclaredPlan, IsThatOfTheModulesBelow) {
  Stacked alone;
  alone(uniform_values({4, 6}, 0.5)).square().sum().backward();
  RunRanks(3, [&](testing::Rank& rank) {
    Stacked model;
    parallelize_module(model, rank.mesh({3}, {"tp"}));
    EXPECT_EQ(DistributedTensor(model.layer(1).down->weight).placements(), Placements{Shard{1}});
    model(uniform_values({4, 6}, 0.5)).square().sum().backward();
    testing::expect_gradients(model, testing::gradients_of(alone));
  });
}

TEST(DeclaredPlan, NamesModulesFromTheRoot) {
  const Stacked model;
  const auto mesh = init_device_mesh(comm::fake_world(0, 2), {2}, {"tp"});
  std::vector<std::string> patterns;
  for (const auto& [pattern, style] : declared_plan(model, mesh)) {
    patterns.push_back(pattern);
  }
  EXPECT_EQ(patterns, (std::vector<std::string>{"layers.0.up", "layers.0.down", "layers.1.up",
                                                "layers.1.down"}));
  EXPECT_ERROR(declared_plan(model, mesh, {.sequence_parallel = false}),
               "a DeclaringMlp on 2 ranks");
}

TEST(DeclaredPlan, IsRequiredIfNoPlanIsGiven) {
  nn::Linear linear(4, 4);
  const auto mesh = init_device_mesh(comm::fake_world(0, 2), {2}, {"tp"});
  EXPECT_ERROR(parallelize_module(linear, mesh), "no plan was given",
               "derive the class from tensor_parallel::DeclaresPlan");
}

// A plain module between parts of the sequence: 7 tokens over 3 ranks.
TEST(PrepareModuleInputOutput, GathersForAModuleAndSplitsWhatItReturns) {
  testing::Filled<nn::RMSNorm> alone(4);
  const at::Tensor x = uniform_values({7, 4}, 0.1);
  const at::Tensor expected = alone(x);
  expected.square().sum().backward();
  RunRanks(3, [&](testing::Rank& rank) {
    testing::Filled<nn::RMSNorm> norm(4);
    parallelize_module(norm, rank.mesh({3}, {"tp"}),
                       {{"", prepare_module_input_output({.input_layouts = {Shard{0}},
                                                          .desired_input_layouts = {Replicate{}},
                                                          .use_local_input = true,
                                                          .output_layouts = {Replicate{}},
                                                          .desired_output_layouts = {Shard{0}},
                                                          .use_local_output = false})}});
    const at::Tensor y = norm(x.chunk(3)[static_cast<std::size_t>(rank.rank())]);
    EXPECT_EQ(DistributedTensor(y).placements(), Placements{Shard{0}});
    EXPECT_TRUE(DistributedTensor(y).full_tensor().allclose(expected.detach(), 1e-5, 1e-6));
    y.square().sum().backward();
    EXPECT_TRUE(
        testing::full_tensor(norm.weight->grad()).allclose(alone.weight->grad(), 1e-5, 1e-5));
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel
