// parallelize() of a model other than Llama, against itself on one rank, in fp64.
#include "tessera/models/parallelize.h"

#include <ATen/ops/arange.h>

#include <set>

#include "tessera/tessera.hpp"
#include "testing/errors.h"
#include "testing/module_values.h"
#include "testing/ranks.h"

namespace tessera::models {
namespace {

using testing::Rank;
using testing::RunRanks;

// None of them divides by 2.
constexpr std::int64_t kVocabulary = 11, kHidden = 5, kInner = 7, kRows = 12;

struct Layer : nn::Module<Layer> {
  at::Tensor forward(const at::Tensor& x) { return x + mlp(norm(x)); }
  nn::Child<nn::RMSNorm> norm{*this, "norm", kHidden};
  nn::Child<nn::SwiGlu> mlp{*this, "mlp", nn::MlpOptions{.hidden = kHidden, .inner = kInner}};
};

/// (rows) -> logits (rows, vocabulary).
struct Stack : nn::Module<Stack>, tensor_parallel::DeclaresPlan, DeclaresUnits {
  Stack() {
    for (int i = 0; i < 2; ++i) {
      layers->push_back(std::make_shared<Layer>());
    }
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = embed(tokens);
    for (std::size_t i = 0; i < layers->size(); ++i) {
      x = (*layers->at<Layer>(i))(x);
    }
    return head(x);
  }
  tensor_parallel::ParallelizePlan tensor_parallel_plan(
      const DeviceMesh&, const tensor_parallel::DeclaredPlanOptions&) const override {
    using namespace tensor_parallel;
    return joined({embedding_plan("embed"),
                   swi_glu_plan("layers.*.mlp"),
                   {{"head", colwise_parallel({.output_layouts = Shard{-1}})}}});
  }
  std::vector<nn::ModuleBase*> blocks() const override {
    return {layers->items().at(0).get(), layers->items().at(1).get()};
  }
  std::vector<std::vector<nn::ModuleBase*>> fsdp_units() override {
    return {{&*embed}, {blocks().at(0)}, {blocks().at(1)}, {this}};
  }
  nn::Child<nn::Embedding> embed{*this, "embed", kVocabulary, kHidden};
  nn::Child<nn::ModuleList> layers{*this, "layers"};
  nn::Child<nn::Linear> head{*this, "head", kHidden, kVocabulary};
};

std::shared_ptr<Stack> make_stack() {
  const auto model = std::make_shared<Stack>();
  nn::init_weights(*model, 7);
  model->to(c10::kDouble);
  return model;
}

/// The loss of rows [first, last).
at::Tensor loss_of(Stack& model, std::int64_t first, std::int64_t last) {
  const at::Tensor row = at::arange(first, last, c10::kLong);
  return tensor_parallel::cross_entropy(model((row * row).remainder(kVocabulary)),
                                        (3 * row).remainder(kVocabulary));
}

/// Sizes of the mesh ("dp", "tp"), and what is kept for backward.
struct StackMesh {
  std::int64_t dp, tp;
  ActivationMemory activations;
};

class ParallelizedStack : public ::testing::TestWithParam<StackMesh> {};

TEST_P(ParallelizedStack, HasTheGradientsOfOneRank) {
  const StackMesh& c = GetParam();
  const auto alone = make_stack();
  loss_of(*alone, 0, kRows).backward();
  RunRanks(static_cast<int>(c.dp * c.tp), [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({c.dp, c.tp}, {"dp", "tp"});
    const auto model = make_stack();
    parallelize(*model, mesh, {.activations = c.activations});
    const std::int64_t rows = kRows / c.dp, first = mesh.local_rank("dp") * rows;
    loss_of(*model, first, first + rows).backward();
    testing::expect_gradients(*model, testing::gradients_of(*alone), 1, 1e-10, 1e-10);
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, ParallelizedStack,
                         ::testing::Values(StackMesh{1, 3, ActivationMemory::kAll},
                                           StackMesh{2, 2, ActivationMemory::kInputs},
                                           StackMesh{3, 1, ActivationMemory::kMatmuls}));

/// The modules whose parameters a rank holds between forward and backward.
std::set<std::string> gathered_between(const DeviceMesh& mesh, bool reshard_last) {
  const auto model = make_stack();
  parallelize(*model, mesh, {.reshard_last = reshard_last});
  const at::Tensor loss = loss_of(*model, 0, kRows);
  std::set<std::string> gathered;
  for (const auto& [name, slot] : model->named_slots()) {
    if (slot->role.gathered) {
      gathered.insert(name.substr(0, name.starts_with("layers.") ? 8 : 4));
    }
  }
  loss.backward();
  return gathered;
}

TEST_ON_MESH(Parallelize, KeepsGatheredWhatBackwardNeedsFirst, {2, 1}, {"dp", "tp"}) {
  EXPECT_EQ(gathered_between(mesh, false), (std::set<std::string>{"layers.1", "head"}));
  EXPECT_EQ(gathered_between(mesh, true), std::set<std::string>{});
}

TEST_ON_MESH(Parallelize, RefusesAModelThatDeclaresNoUnits, {1, 1}, {"dp", "tp"}) {
  Layer layer;
  EXPECT_ERROR(parallelize(layer, mesh, {}), "declares no units", "models::DeclaresUnits");
}

TEST_ON_MESH(Parallelize, RefusesToSplitSequencesOfAModelThatCannot, {1, 2, 1},
             {"dp", "cp", "tp"}) {
  Stack model;
  EXPECT_ERROR(parallelize(model, mesh, {}), "context parallelism over 2 ranks was asked for");
}

}  // namespace
}  // namespace tessera::models
