// Tests blocks under plans that modules declare or functions return, and plans for LoRA. tests/fuzz
// tests whole models under one plan.

#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/dtensor/random.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/detail/lora.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/optim/adamw.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {

struct DeclaringMlp : nn::Module<DeclaringMlp>, DeclaresPlan {
  at::Tensor forward(const at::Tensor& x) { return (*down)((*up)(x).sigmoid()); }
  ParallelizePlan tensor_parallel_plan(const DeviceMesh& mesh,
                                       const DeclaredPlanOptions& options) const override {
    TESSERA_CHECK(options.sequence_parallel, "a DeclaringMlp on ", mesh.size(), " ranks");
    return {{"up", colwise_parallel()}, {"down", rowwise_parallel()}};
  }
  nn::Child<nn::Linear> up{*this, "up", 6, 11}, down{*this, "down", 11, 6};
};

struct Stacked : nn::Module<Stacked> {
  Stacked() {
    layers->push_back(std::make_shared<DeclaringMlp>());
    layers->push_back(std::make_shared<DeclaringMlp>());
    testing::fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return (*norm)(layer(1)(layer(0)(x))); }
  DeclaringMlp& layer(std::size_t i) { return *layers->at<DeclaringMlp>(i); }
  nn::Child<nn::ModuleList> layers{*this, "layers"};
  nn::Child<nn::RMSNorm> norm{*this, "norm", 6};
};

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
  nn::Linear undeclared(4, 4);
  EXPECT_ERROR(parallelize_module(undeclared, mesh), "no plan", "DeclaresPlan");
}

// The style gathers the sharded input of a norm and shards the result: 7 tokens on 3 ranks.
TEST(PrepareModuleInputOutput, GathersInputsAndShardsResults) {
  testing::Filled<nn::RMSNorm> alone(4);
  const at::Tensor x = uniform_values({7, 4}, 0.1);
  const at::Tensor expected = alone(x);
  expected.square().sum().backward();
  RunRanks(3, [&](Rank& rank) {
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
    EXPECT_TRUE(full_tensor(norm.weight->grad()).allclose(alone.weight->grad(), 1e-5, 1e-5));
  });
}

constexpr std::int64_t kHidden = 12, kSequences = 2, kPositions = 6;

struct BlockCase {
  nn::AttentionOptions attention;
  bool folded = false;
  bool sequence_parallel = false;
  bool gated = false;
};

/// A norm, attention, and an MLP. The MLP's width (13) is not divisible by 2 or 3 ranks.
struct OneBlock final : nn::Module<OneBlock> {
  explicit OneBlock(const BlockCase& c) : options(c) {
    norm = register_module("norm", std::make_shared<nn::LayerNorm>(kHidden));
    attn = register_module("attn", std::make_shared<nn::Attention>(c.attention));
    const nn::MlpOptions mlp{.hidden = kHidden, .inner = 13, .bias = true};
    if (c.gated) {
      gated = register_module("mlp", std::make_shared<nn::SwiGlu>(mlp));
    } else {
      gelu = register_module("mlp", std::make_shared<nn::GeluMlp>(mlp));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    const nn::AttentionInputs inputs{.batch = options.folded ? kSequences : 0};
    const at::Tensor h = x + (*attn)((*norm)(x), inputs);
    return options.gated ? (*gated)(h) : (*gelu)(h);
  }
  BlockCase options;
  std::shared_ptr<nn::LayerNorm> norm;
  std::shared_ptr<nn::Attention> attn;
  std::shared_ptr<nn::SwiGlu> gated;
  std::shared_ptr<nn::GeluMlp> gelu;
};

ParallelizePlan plan_of(const BlockCase& c) {
  const Placement between = c.sequence_parallel ? Placement(Shard{c.folded ? 0 : 1}) : Replicate{};
  const StylePtr norm = c.sequence_parallel ? sequence_parallel({.sequence_dim = c.folded ? 0 : 1})
                                            : replicate_parallel();
  return joined({{{"norm", norm}},
                 attention_plan("attn", c.attention, {.activations = between}),
                 c.gated ? swi_glu_plan("mlp", {}, {.activations = between})
                         : gelu_mlp_plan("mlp", {}, {.activations = between})});
}

at::Tensor input_of(const BlockCase& c) {
  const at::Tensor x = uniform_values({kSequences, kPositions, kHidden}, 0.3).to(at::kDouble);
  return c.folded ? x.flatten(0, 1) : x;
}

class BlockOnRanks : public ::testing::TestWithParam<BlockCase> {};

TEST_P(BlockOnRanks, HasTheResultsOfOneRank) {
  const BlockCase& c = GetParam();
  OneBlock alone(c);
  alone.to(at::kDouble);
  testing::fill(alone);
  const at::Tensor expected = alone(input_of(c));
  expected.square().mean().backward();
  for (const int ranks : {2, 3}) {
    if (alone.attn->options().kv_heads % ranks != 0) {
      continue;
    }
    RunOnMesh({ranks}, {"tp"}, [&](const DeviceMesh& mesh) {
      const StrictScope strict;
      OneBlock model(c);
      model.to(at::kDouble);
      testing::fill(model);
      parallelize_module(model, mesh, plan_of(c));
      const Placement place =
          c.sequence_parallel ? Placement(Shard{c.folded ? 0 : 1}) : Replicate{};
      const at::Tensor y =
          DistributedTensor(model(distribute_tensor(input_of(c), mesh, {place}))).full_tensor();
      EXPECT_TRUE(y.allclose(expected, 1e-10, 1e-12));
      y.square().mean().backward();
      testing::expect_gradients(model, testing::gradients_of(alone), 1, 1e-10, 1e-12);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    , BlockOnRanks,
    ::testing::Values(
        BlockCase{.attention = {.hidden = kHidden, .heads = 6, .qkv_bias = true},
                  .folded = true,
                  .gated = true},
        BlockCase{.attention = {.hidden = kHidden,
                                .heads = 6,
                                .head_dim = 4,
                                .output_bias = true,
                                .qk_norm = true,
                                .window = 3},
                  .sequence_parallel = true},
        BlockCase{.attention = {.hidden = kHidden, .heads = 6, .qkv_bias = true, .fused_qkv = true},
                  .sequence_parallel = true},
        BlockCase{
            .attention =
                {.hidden = kHidden, .heads = 4, .kv_heads = 2, .qkv_bias = true, .fused_qkv = true},
            .folded = true,
            .sequence_parallel = true,
            .gated = true}),
    [](const auto& info) { return "Case" + std::to_string(info.index); });

TEST_ON_MESH(BlockPlan, RefusesIndivisibleHeads, {3}, {"tp"}) {
  for (const bool fused : {false, true}) {
    const BlockCase c{
        .attention = {.hidden = kHidden, .heads = 4, .fused_qkv = fused, .names = {.output = "o"}}};
    OneBlock model(c);
    EXPECT_ERROR(parallelize_module(model, mesh, plan_of(c)), fused ? "4 groups" : "4 heads", "3");
    EXPECT_FALSE(tessera::is_distributed(*model.norm->weight));
  }
  EXPECT_ERROR(attention_plan("attn", {.hidden = 12, .heads = 5}), "5 heads");
}

constexpr std::int64_t kLoraRows = 8;
const nn::LoraOptions kAdapters{
    .rank = 3, .alpha = 6, .targets = {"gate_up", "down"}, .dropout = 0.25};

/// Linears with LoRA adapters. The output sizes of gate_up (10 + 10) and down (6) are not divisible
/// by 4 ranks.
struct AdaptedBlock final : nn::Module<AdaptedBlock> {
  at::Tensor forward(const at::Tensor& x) {
    const std::vector<at::Tensor> parts = gate_up->split((*gate_up)(x));
    return (*head)((*down)(at::gelu(parts[0]) * parts[1]));
  }
  nn::Child<nn::FusedLinear> gate_up{*this, "gate_up", 6,
                                     std::vector<nn::FusedPart>{{"gate", 10}, {"up", 10}}};
  nn::Child<nn::Linear> down{*this, "down", 10, 6}, head{*this, "head", 6, 5};
};

/// Sets B, which is 0 in a new adapter: with B = 0 the adapter's result would not depend on A.
void fill_adapters(nn::ModuleBase& model) {
  const c10::NoGradGuard no_grad;
  for (const auto& [name, slot] : nn::lora_slots(model)) {
    const at::Tensor& to = slot->persistent();
    const at::Tensor values = uniform_values(to.sizes(), static_cast<double>(name.size()), 0.4);
    if (!tessera::is_distributed(to)) {
      to.copy_(values);
      continue;
    }
    const ShardingSpec& spec = sharding_spec(to);
    const DistributedTensor whole(make_distributed(
        values, {spec.mesh, Layout::replicated(spec.layout->mesh_sizes(), 2)}, to.sizes().vec()));
    local_tensor(to).copy_(local_tensor(whole.redistribute(spec.layout)));
  }
}

/// Takes two steps on this rank's part of the rows. Returns the unsharded adapter parameters.
std::vector<at::Tensor> train(AdaptedBlock& model, std::int64_t part, std::int64_t parts) {
  manual_seed(11);
  optim::Sgd optimizer(model, {.lr = 0.5});
  for (int step = 0; step < 2; ++step) {
    const at::Tensor batch = uniform_values({kLoraRows, 6}, 0.1 + step);
    model(batch.chunk(parts)[static_cast<std::size_t>(part)]).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  std::vector<at::Tensor> values;
  for (const auto& [name, slot] : nn::lora_slots(model)) {
    values.push_back(full_tensor(slot->persistent()).clone());
  }
  return values;
}

std::shared_ptr<AdaptedBlock> adapted_on(const DeviceMesh& mesh) {
  const auto model = testing::made_on_meta<AdaptedBlock>();
  nn::apply_lora(*model, kAdapters);
  parallelize_module(*model, mesh["tp"],
                     {{"gate_up", fused_colwise_parallel({.use_local_output = false})},
                      {"down", rowwise_parallel({.use_local_output = false})},
                      {"head", colwise_parallel({.output_layouts = Replicate{}})}});
  fsdp::fully_shard(*model, mesh["dp"]);
  nn::to_empty(*model, at::kCPU);
  nn::init_weights(*model, 5);
  return model;
}

TEST(LoraOnAMesh, StartsTrainsAndMergesLikeOneRank) {
  at::Tensor initial, merged;
  std::vector<at::Tensor> expected;
  // Under FSDP, dropout draws random numbers by global index, also on one rank.
  RunRanks(1, [&](Rank& rank) {
    AdaptedBlock alone;
    nn::apply_lora(alone, kAdapters);
    fsdp::fully_shard(alone, rank.mesh({1}, {"dp"}));
    nn::init_weights(alone, 5);
    initial = testing::parameter_values(alone);
    fill_adapters(alone);
    expected = train(alone, 0, 1);
    nn::merge_lora(alone);
    merged = testing::parameter_values(alone);
  });
  using Sizes = std::vector<std::int64_t>;
  for (const Sizes& sizes : {Sizes{2, 2}, Sizes{1, 4}, Sizes{1, 3}, Sizes{4, 1}}) {
    SCOPED_TRACE(::testing::PrintToString(sizes));
    RunOnMesh(sizes, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
      const StrictScope strict;
      const auto model = adapted_on(mesh);
      EXPECT_TRUE(at::equal(testing::parameter_values(*model), initial));
      fill_adapters(*model);
      EXPECT_EACH(train(*model, mesh.local_rank("dp"), sizes[0]), expected, 1e-4, 1e-5);
      for (const auto& [name, slot] : model->named_slots()) {
        EXPECT_FALSE(slot->persistent().grad().defined()) << name;
      }
      nn::merge_lora(*model);
      EXPECT_TRUE(testing::parameter_values(*model).allclose(merged, 1e-4, 1e-5));
    });
  }
}

TEST_ON_MESH(LoraOnAMesh, SendsOnlyAdapterGradients, {2, 1}, {"dp", "tp"}) {
  const auto model = adapted_on(mesh);
  const Sent sent(rank);
  (*model)(uniform_values({2, 6}, 0.2)).sum().backward();
  // On one of 2 ranks, gate_up has A of 2 x 6 and B of 10 x 3, and down has A of 2 x 10 and B of 3
  // x 3. Shards are padded to multiples of 16 elements (64 bytes).
  EXPECT_EQ(sent.of("dp", "reduce_scatter").bytes, 4 * 2 * (16 + 32 + 32 + 16));
  EXPECT_ERROR(nn::apply_lora(*model, {.targets = {"head"}}), "'head'", "distributed already",
               "before parallelize_module");
}

}  // namespace
}  // namespace tessera::tensor_parallel
