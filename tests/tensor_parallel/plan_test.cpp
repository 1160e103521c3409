#include <torch/nn/modules/linear.h>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/optim/adamw.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {

struct Layer : nn::Module<Layer> {
  at::Tensor forward(const at::Tensor& x) { return (*down)((*up)(x)); }

  nn::Child<nn::Linear> up{*this, "up", 4, 6}, down{*this, "down", 6, 4};
};

struct Tree : nn::Module<Tree> {
  Tree() {
    for (int i = 0; i < 3; ++i) {
      layers->push_back(std::make_shared<Layer>());
    }
    for (const auto& [name, slot] : named_slots()) {
      const at::Tensor values = slot->get().detach();
      values.copy_(at::arange(values.numel()).view(values.sizes()));
    }
  }
  Layer& layer(std::size_t i) { return *layers->at<Layer>(i); }

  nn::Child<nn::Embedding> embed{*this, "embed", 10, 4};
  nn::Child<nn::ModuleList> layers{*this, "layers"};
  nn::Child<nn::RMSNorm> norm{*this, "norm", 4};
  nn::Child<nn::Linear> head{*this, "head", 4, 10, nn::LinearOptions{.bias = false}};
};

DeviceMesh mesh_of(int ranks) {
  return init_device_mesh(comm::fake_world(0, ranks), {ranks}, {"tp"});
}

/// Records the modules that a plan entry matches. Changes no parameter.
class Probe final : public ParallelStyle {
 public:
  std::string name() const override { return "probe"; }
  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    found.push_back(&module);
    return {};
  }
  void apply(nn::ModuleBase&, const DeviceMesh&) const override {}
  mutable std::vector<const nn::ModuleBase*> found;
};

std::vector<std::string> matches(nn::ModuleBase& root, const std::string& pattern) {
  const auto probe = std::make_shared<Probe>();
  parallelize_module(root, mesh_of(2), {{pattern, probe}});
  std::vector<std::string> names;
  for (const nn::ModuleBase* module : probe->found) {
    nn::visit_modules(root, [&](const std::string& fqn, const nn::ModuleBase& each) {
      if (&each == module) {
        names.push_back(fqn);
      }
    });
  }
  return names;
}

using Names = std::vector<std::string>;

TEST(PlanPatterns, MatchByWildcard) {
  Tree tree;
  EXPECT_EQ(matches(tree, "layers.*.up"), (Names{"layers.0.up", "layers.1.up", "layers.2.up"}));
  EXPECT_EQ(matches(tree, "layers.[02].?o*"), (Names{"layers.0.down", "layers.2.down"}));
  EXPECT_EQ(matches(tree, ""), Names{""});
}

struct Projections : nn::Module<Projections> {
  explicit Projections(bool with_norm) {
    if (with_norm) {
      register_module("q_norm", std::make_shared<nn::RMSNorm>(2));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return (*o)((*q)(x)); }
  nn::Child<nn::Linear> q{*this, "q", 8, 12}, o{*this, "o", 12, 8};
};

struct Stack : nn::Module<Stack> {
  Stack() {
    for (const bool with_norm : {true, true, false, true}) {
      layers->push_back(std::make_shared<Projections>(with_norm));
    }
    layers->push_back(std::make_shared<nn::RMSNorm>(8));
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
  nn::Child<nn::ModuleList> layers{*this, "layers"};
};

TEST(PlanPatterns, AreRefusedIfSomeModulesLackTheChild) {
  Stack stack;
  EXPECT_EQ(matches(stack, "**.q_norm").size(), 3U);
  EXPECT_EQ(matches(stack, "layers.[013].q_norm").size(), 3U);
  // Of the four layers, `layers.2` has no q_norm.
  EXPECT_EQ(matches(stack, "layers.*.q").size(), 4U);
  EXPECT_ERROR(matches(stack, "layers.*.q_norm"), "'layers.*.q_norm'", "3 of the 4", "'layers.2'",
               "[q, o]", "[0-2]", "'**.q_norm'");
}

TEST(PlanPatterns, MatchASharedModuleOnce) {
  struct Sharing : nn::Module<Sharing> {
    Sharing() {
      const auto shared = std::make_shared<Projections>(false);
      register_module("a0", shared);
      register_module("a1", shared);
    }
    at::Tensor forward(const at::Tensor& x) { return x; }
  };
  Sharing model;
  EXPECT_EQ(matches(model, "a*.q").size(), 1U);
}

TEST(Plan, IsRefusedBeforeAnyChange) {
  struct Case {
    const char* name;
    int ranks;
    ParallelizePlan plan;
    std::vector<std::string_view> words;
  };
  const StylePtr columns = colwise_parallel(), rows = rowwise_parallel();
  const std::vector<Case> cases{
      {"a star does not match a dot", 2, {{"*.up", columns}}, {"'*.up'"}},
      {"no such module", 2, {{"layers.1.gate", columns}}, {"'gate'", "[up, down]"}},
      {"a later entry",
       2,
       {{"layers.*.up", columns}, {"layers.*.gate", rows}},
       {"'layers.*.gate'"}},
      {"no style", 2, {{"layers.*.up", nullptr}}, {"layers.*.up"}},
      {"an unfit style",
       2,
       {{"embed", rows}, {"norm", columns}},
       {"'norm'", "colwise_parallel", "RMSNorm"}},
      {"two styles",
       2,
       {{"layers.*.up", columns}, {"layers.0.up", rows}},
       {"'layers.0.up'", "colwise_parallel", "rowwise_parallel"}},
      {"heads and ranks, columns",
       4,
       {{"layers.*.up", colwise_parallel({.heads = 6})}},
       {"'layers.0.up'", "colwise_parallel", "6 heads", "4 ranks"}},
      {"heads and ranks, rows",
       4,
       {{"layers.*.down", rowwise_parallel({.heads = 6})}},
       {"'layers.0.down'", "rowwise_parallel", "6 heads", "4 ranks"}},
      {"heads and features",
       2,
       {{"layers.*.up", colwise_parallel({.heads = 5})}},
       {"6 features", ".heads = 5"}},
      {"heads of an Embedding",
       2,
       {{"embed", rowwise_parallel({.input_layouts = Replicate{}, .heads = 2})}},
       {".heads = 2", "Embedding"}},
      {"no parameters of its own",
       2,
       {{"layers", place_parameters()}},
       {"'layers'", "place_parameters"}},
      {"no such parameter",
       2,
       {{"norm", place_parameters({{"wight", Shard{0}}})}},
       {"'wight'", "weight"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    Tree tree;
    EXPECT_TRUE(testing::Throws<Error>([&] { parallelize_module(tree, mesh_of(c.ranks), c.plan); },
                                       c.words));
    for (const auto& [name, slot] : tree.named_slots()) {
      EXPECT_FALSE(tessera::is_distributed(slot->get())) << name;
    }
  }
}

TEST_ON_RANKS(Parallelize, ShardsParametersByStyle, 4) {
  Tree tree;
  const at::Tensor up = tree.layer(1).up->weight->detach().clone();
  const at::Tensor down = tree.layer(1).down->weight->detach().clone();
  parallelize_module(tree, rank.mesh({4}, {"tp"}),
                     {{"embed", rowwise_parallel()},
                      {"layers.*.up", colwise_parallel()},
                      {"layers.*.down", rowwise_parallel()},
                      {"norm", sequence_parallel({.sequence_dim = 0})}});
  const auto r = static_cast<std::size_t>(rank.rank());
  // The weight of `up` has 6 rows; the ranks have 2, 2, 2 and 0 rows.
  EXPECT_EQ(local_tensor(tree.layer(1).up->weight).size(0), r < 3 ? 2 : 0);
  EXPECT_TRUE(DistributedTensor(tree.layer(1).up->weight).full_tensor().equal(up));
  EXPECT_TRUE(DistributedTensor(tree.layer(1).down->weight).full_tensor().equal(down));
  EXPECT_EQ(DistributedTensor(tree.layer(2).down->weight).placements(), Placements{Shard{1}});
  EXPECT_EQ(DistributedTensor(tree.layer(2).down->bias).placements(), Placements{Replicate{}});
  EXPECT_EQ(DistributedTensor(tree.embed->weight).placements(), Placements{Shard{0}});
  EXPECT_EQ(DistributedTensor(tree.norm->weight).placements(), Placements{Replicate{}});
  EXPECT_EQ(DistributedTensor(tree.head->weight).placements(), Placements{Replicate{}});
}

TEST_ON_RANKS(Parallelize, SendsNothingAndKeepsFrozenParameters, 2) {
  const DeviceMesh mesh = rank.mesh({2}, {"tp"});
  Tree tree;
  tree.norm->slot("weight")->get().set_requires_grad(false);
  tree.head->slot("weight")->get().set_requires_grad(false);
  parallelize_module(tree, mesh, {{"norm", sequence_parallel()}, {"head", colwise_parallel()}});
  EXPECT_TRUE(rank.world()->traffic().table().empty());
  EXPECT_FALSE(tree.norm->weight->requires_grad());
  EXPECT_FALSE(tree.head->weight->requires_grad());
  EXPECT_TRUE(tree.embed->weight->requires_grad());
  // The shard must not be a view, because a view would keep the memory of the whole parameter.
  EXPECT_EQ(local_tensor(tree.head->weight).storage().nbytes(), 5 * 4 * sizeof(float));
  const auto linear = testing::made_on_meta<nn::Linear>(4, 7);
  parallelize_module(*linear, mesh, {{"", colwise_parallel()}});
  EXPECT_TRUE(linear->weight->is_meta());
  EXPECT_EQ(local_tensor(linear->weight).size(0), rank.rank() == 0 ? 4 : 3);
}

TEST_ON_RANKS(Parallelize, KeepsTiedWeightsTied, 2) {
  Tree tree;
  tree.head->tie_slot("weight", tree.embed->slot("weight"));
  parallelize_module(tree, rank.mesh({2}, {"tp"}),
                     {{"embed", rowwise_parallel()}, {"head", colwise_parallel()}});
  EXPECT_TRUE(tree.head->weight->is_same(*tree.embed->weight));
  EXPECT_EQ(DistributedTensor(tree.head->weight).placements(), Placements{Shard{0}});
}

// torchtitan applies a plan to the model, and then another plan to each block.
TEST_ON_MESH(Parallelize, AcceptsASecondPlanForOtherModules, {2}, {"tp"}) {
  Tree tree;
  const at::Tensor up = tree.layer(1).up->weight->detach().clone();
  parallelize_module(tree, mesh, {{"head", colwise_parallel()}});
  parallelize_module(tree.layer(1), mesh, {{"up", colwise_parallel()}});
  EXPECT_EQ(DistributedTensor(tree.layer(1).up->weight).placements(), Placements{Shard{0}});
  EXPECT_TRUE(DistributedTensor(tree.layer(1).up->weight).full_tensor().equal(up));
  EXPECT_EQ(DistributedTensor(tree.layer(1).down->weight).placements(), Placements{Replicate{}});
  EXPECT_EQ(DistributedTensor(tree.layer(0).up->weight).placements(), Placements{Replicate{}});
}

TEST(Parallelize, RefusesInvalidCalls) {
  EXPECT_ERROR(prepare_module_input({.input_layouts = {Replicate{}}, .desired_input_layouts = {}}),
               "prepare_module_input", "1 placements", "0 desired");
  RunOnMesh({1, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    Tree tied, planned, sharded, unplanned;
    const DeviceMesh tp = mesh["tp"];
    const StylePtr columns = colwise_parallel();
    tied.head->tie_slot("weight", tied.embed->slot("weight"));
    parallelize_module(planned, tp, {{"head", columns}});
    fsdp::fully_shard(*sharded.head, mesh["dp"]);
    testing::expect_refusals({
        {"two placements of a tied weight",
         [&] { parallelize_module(tied, tp, {{"embed", columns}, {"head", columns}}); },
         {"tied"}},
        {"a second plan of the same parameters",
         [&] { parallelize_module(planned, tp, {{"head", columns}}); },
         {"'head'", "(tp=2)"}},
        {"a unit of FSDP",
         [&] { parallelize_module(sharded, tp, {{"head", columns}}); },
         {"'head'", "fully_shard"}},
        {"a mesh of two dimensions",
         [&] { parallelize_module(unplanned, mesh, {}); },
         {"(dp=1, tp=2)"}},
    });
    EXPECT_FALSE(tessera::is_distributed(tied.head->weight));
  });
}

using testing::fill;

struct ScaledMlp : nn::Module<ScaledMlp> {
  ScaledMlp() {
    scale = register_slot("scale", at::ones({1}));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return (*down)((*norm)((*up)(x) * *scale)); }

  nn::Child<nn::Linear> up{*this, "up", 4, 6};
  nn::Child<nn::LayerNorm> norm{*this, "norm", 6};
  nn::Child<nn::Linear> down{*this, "down", 6, 4};
  nn::Parameter scale;
};

TEST_ON_MESH(Mistakes, DirectForwardIsReported, {2, 2}, {"dp", "tp"}) {
  const at::Tensor plain = at::ones({3, 4});
  ScaledMlp model, sharded;
  parallelize_module(model, mesh["tp"], {{"up", colwise_parallel()}});
  EXPECT_ERROR(model.up->forward(plain), "hooks", "(*m)(x)");
  // A direct call of forward() skips the hooks. The error of at::linear must name this cause.
  EXPECT_ERROR(at::linear(plain, *model.up->weight), "argument 0, [3, 4], is plain",
               "'up.weight', [", "m->forward(x)", "fsdp::register_forward_method", "plan");
  parallelize_module(sharded, mesh["tp"], {{"up", colwise_parallel()}});
  fsdp::fully_shard(sharded, mesh["dp"]);
  const at::Tensor x = distribute_tensor(plain, mesh["tp"], {Replicate{}});
  EXPECT_ERROR(at::linear(x, *sharded.up->weight), "different meshes", "'up.weight'",
               "m->forward(x)");
}

TEST_ON_MESH(Mistakes, PartialPlansAndFsdpOnTheTpMeshAreReported, {2}, {"tp"}) {
  ScaledMlp model;
  parallelize_module(*model.up, mesh, {{"", colwise_parallel()}});
  EXPECT_ERROR(model(at::ones({3, 4})), "'scale', [1]", "plain", "parallelize_module");
  parallelize_module(model, mesh, {});
  EXPECT_NO_THROW(model(at::ones({3, 4})));
  EXPECT_ERROR(fsdp::fully_shard(model, mesh), "(tp=2)", "by parallelize_module");
}

/// register_parameter() of libtorch makes no slot for `stray`.
struct HalfSlotted : nn::Module<HalfSlotted> {
  HalfSlotted() { register_parameter("stray", at::ones({2})); }
  at::Tensor forward(const at::Tensor& x) { return (*up)(x); }
  nn::Child<nn::Linear> up{*this, "up", 4, 6};
};

TEST_ON_MESH(Mistakes, ParameterWithoutASlotIsReported, {1, 2}, {"dp", "tp"}) {
  nn::Sequential model(std::make_shared<HalfSlotted>());
  EXPECT_ERROR(parallelize_module(model, mesh["tp"], {{"0.up", colwise_parallel()}}),
               "parameter '0.stray'", "register_slot");
  EXPECT_ERROR(fsdp::fully_shard(model, mesh["dp"]), "parameter '0.stray'");
  EXPECT_ERROR(optim::Sgd(model, {.lr = 0.1}), "parameter '0.stray'");
  EXPECT_FALSE(tessera::is_distributed(model.named_children()["0"]->parameters()[0]));
}

// In a StrictScope, an implicit redistribution throws, and the error names the missing plan entry.

/// An MLP on (tokens, dim): with a norm at the end if `normed_result`, otherwise with a residual.
struct NormedMlp : nn::Module<NormedMlp> {
  explicit NormedMlp(bool normed_result) : normed(normed_result) { testing::fill(*this); }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = (*fc2)(at::gelu((*fc1)(x)));
    return normed ? (*norm)(y) : x + y;
  }
  bool normed;
  nn::Child<nn::LayerNorm> norm{*this, "norm", 4};
  nn::Child<nn::Linear> fc1{*this, "fc1", 4, 6}, fc2{*this, "fc2", 6, 4};
};

TEST_ON_MESH(StrictScopeHints, NameTheMissingPlanEntry, {2}, {"tp"}) {
  const at::Tensor x = at::ones({6, 4});
  for (const bool in_forward : {false, true}) {
    NormedMlp model(in_forward);
    parallelize_module(model, mesh, {{"fc1", colwise_parallel()}});
    const StrictScope strict;
    EXPECT_ERROR(model(x).square(), "[Partial(sum)] -> [Replicate()]", "rowwise_parallel()");
  }
  // The norm's input is sharded by features, and no plan entry gathers this input.
  NormedMlp model(/*normed_result=*/true);
  parallelize_module(model, mesh, {{"fc2", colwise_parallel()}});
  const StrictScope strict;
  EXPECT_ERROR(model(x), "[Shard(1)] -> [Replicate()]", "prepare_module_input");
}

TEST_ON_RANKS(StrictScopeHints, NameNoPlanForATensorOutsideAPlan, 2) {
  const auto x = distribute_tensor(at::ones({4, 4}), rank.mesh({2}, {"tp"}), {Shard{0}});
  const StrictScope strict;
  const std::string message = testing::message_of([&] { x.tensor().cumsum(0); });
  EXPECT_TRUE(message.ends_with("redistribute the inputs explicitly first")) << message;
}

}  // namespace
}  // namespace tessera::tensor_parallel
