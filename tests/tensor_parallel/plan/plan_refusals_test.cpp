// Plans that would not have their stated effect are refused before anything is changed, with a
// remedy.

#include "tensor_parallel/plan/plan_matching.h"
#include "tessera/nn/child.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/norm.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"

namespace tessera::tensor_parallel {
namespace {

/// Attention's projections; the layers need not be alike.
class Projections : public nn::Module<Projections> {
 public:
  explicit Projections(bool with_norm) {
    q = register_module("q", std::make_shared<nn::Linear>(8, 12));
    if (with_norm) {
      register_module("q_norm", std::make_shared<nn::RMSNorm>(2));
    }
    o = register_module("o", std::make_shared<nn::Linear>(12, 8));
  }
  at::Tensor forward(const at::Tensor& x) { return (*o)((*q)(x)); }
  std::shared_ptr<nn::Linear> q, o;
};

struct Stack : nn::Module<Stack> {
  Stack() {
    for (const bool with_norm : {true, true, false, true}) {
      layers->push_back(std::make_shared<Projections>(with_norm));
    }
    layers->push_back(std::make_shared<nn::RMSNorm>(8));
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
  Projections& layer(std::size_t i) { return *layers->at<Projections>(i); }
  nn::Child<nn::ModuleList> layers{*this, "layers"};
};

DeviceMesh mesh_of(int ranks) {
  return init_device_mesh(comm::fake_world(0, ranks), {ranks}, {"tp"});
}

StylePtr norm_of_shares() {
  return sequence_parallel({.sequence_dim = 1});
}

TEST(PlanRefusals, AWildcardThatMatchesOnlySomeLayers) {
  Stack stack;
  EXPECT_ERROR(match_modules(stack, "layers.*.q_norm"), "'layers.*.q_norm' matches in 3 of the 4",
               "'layers.*' stands for, but not in 'layers.2', whose children are [q, o]",
               "(as [0-2])", "'**.q_norm'");
  EXPECT_EQ(match_modules(stack, "**.q_norm").size(), 3U);
  EXPECT_EQ(match_modules(stack, "layers.[013].q_norm").size(), 3U);
  // A norm among the layers is of another class.
  EXPECT_EQ(match_modules(stack, "layers.*.q").size(), 4U);
}

TEST(PlanRefusals, AWildcardWithinASharedModule) {
  class Sharing : public nn::Module<Sharing> {
   public:
    Sharing() {
      const auto shared = std::make_shared<Projections>(false);
      register_module("a0", shared);
      register_module("a1", shared);
    }
    at::Tensor forward(const at::Tensor& x) { return x; }
  };
  Sharing model;
  EXPECT_EQ(match_modules(model, "a*.q").size(), 1U);
}

TEST(PlanRefusals, AnEntryWithoutAStyle) {
  Stack stack;
  EXPECT_ERROR(parallelize_module(stack, mesh_of(2), {{"layers.*.q", nullptr}}),
               "the entry \"layers.*.q\" has no style");
}

TEST(PlanRefusals, HeadsThatTheRanksDoNotDivide) {
  const auto plan_with = [](std::int64_t heads) {
    return ParallelizePlan{{"**.q_norm", norm_of_shares()},
                           {"layers.*.q", colwise_parallel({.heads = heads})},
                           {"layers.*.o", rowwise_parallel({.heads = heads})}};
  };
  Stack stack;
  EXPECT_ERROR(parallelize_module(stack, mesh_of(4), plan_with(6)),
               "'layers.0.q': colwise_parallel: 6 heads cannot be shared out to 4 ranks",
               "take a tensor-parallel size that divides them");
  EXPECT_ERROR(parallelize_module(stack, mesh_of(2), plan_with(5)),
               "12 features are not 5 heads of equal size");
  ParallelizePlan only_back = plan_with(6);
  only_back[1].second = colwise_parallel();
  EXPECT_ERROR(parallelize_module(stack, mesh_of(4), only_back), "'layers.0.o': rowwise_parallel");
  parallelize_module(stack, mesh_of(3), plan_with(6));
  EXPECT_EQ(local_tensor(stack.layer(3).q->weight).size(0), 4);

  nn::Embedding embedding(10, 4);
  EXPECT_ERROR(
      parallelize_module(embedding, mesh_of(2),
                         {{"", rowwise_parallel({.input_layouts = Replicate{}, .heads = 2})}}),
      ".heads = 2 are those of a Linear's input");
}

}  // namespace
}  // namespace tessera::tensor_parallel
