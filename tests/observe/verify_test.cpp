// Tests verify(): correct models on every mesh, the state that verify() must restore, and mistakes
// of users that verify() must find and name.
#include "tessera/observe/verify.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/random.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/blocks.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::observe {
namespace {

using namespace testing;

// A small GPT. Tests plant typical mistakes of users in this GPT, and verify() must find them.

/// The function that a Tap module computes; by default, the identity. Some tests pass a wrong one.
using TapFunction = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& gain)>;

at::Tensor pass_on(const at::Tensor& x, const at::Tensor&) {
  return x;
}

struct GptOptions {
  double dropout = 0;
  TapFunction embedded = pass_on;
  TapFunction inner = pass_on;  ///< in the MLP, where features are sharded
  /// A function that the MLP calls between its two projections.
  std::function<at::Tensor(const at::Tensor& x)> between = [](const at::Tensor& x) { return x; };
  std::function<bool(const at::Tensor& x)> skips_drop = [](const at::Tensor&) { return false; };
};

constexpr std::int64_t kGptHidden = 12, kGptInner = 24, kGptVocabulary = 13;

struct Tap : nn::Module<Tap> {
  explicit Tap(TapFunction function) : function_(std::move(function)) {
    gain = register_slot("gain", {1});
    calls = register_buffer_slot("calls", {1});
    calls.slot()->set(at::zeros({1}));
  }
  at::Tensor forward(const at::Tensor& x) {
    calls->add_(1);
    return function_(x, *gain);
  }
  nn::Parameter gain, calls;

 private:
  TapFunction function_;
};

struct GptMlp : nn::Module<GptMlp> {
  explicit GptMlp(const GptOptions& o) : options(o) {}
  at::Tensor forward(const at::Tensor& x) {
    return (*down)(options.between((*tap)((*up)(x)).tanh()));
  }
  GptOptions options;
  nn::Child<nn::Linear> up{*this, "up", kGptHidden, kGptInner};
  nn::Child<Tap> tap{*this, "tap", options.inner};
  nn::Child<nn::Linear> down{*this, "down", kGptInner, kGptHidden};
};

nn::AttentionOptions gpt_attention() {
  return {.hidden = kGptHidden, .heads = 6, .qkv_bias = true};
}

struct GptBlock : nn::Module<GptBlock> {
  explicit GptBlock(const GptOptions& o) : options(o) {}
  at::Tensor forward(const at::Tensor& x) {
    const bool skips = options.skips_drop(x);
    const auto dropped = [&](const at::Tensor& y) { return skips ? y : (*drop)(y); };
    const at::Tensor h = x + dropped((*attn)((*first_norm)(x)));
    return h + dropped((*mlp)((*second_norm)(h)));
  }
  GptOptions options;
  nn::Child<nn::LayerNorm> first_norm{*this, "first_norm", kGptHidden};
  nn::Child<nn::Attention> attn{*this, "attn", gpt_attention()};
  nn::Child<nn::LayerNorm> second_norm{*this, "second_norm", kGptHidden};
  nn::Child<GptMlp> mlp{*this, "mlp", options};
  nn::Child<nn::Dropout> drop{*this, "drop", options.dropout};
};

/// Maps token ids (batch, tokens) to logits (batch, tokens, vocabulary).
struct Gpt : nn::Module<Gpt> {
  explicit Gpt(const GptOptions& o = {}) {
    embed = register_module("embed", std::make_shared<nn::Embedding>(kGptVocabulary, kGptHidden));
    tap = register_module("tap", std::make_shared<Tap>(o.embedded));
    for (const char* name : {"block0", "block1"}) {
      blocks.push_back(register_module(name, std::make_shared<GptBlock>(o)));
    }
    norm = register_module("norm", std::make_shared<nn::LayerNorm>(kGptHidden));
    head = register_module("head", std::make_shared<nn::Linear>(kGptHidden, kGptVocabulary));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = (*tap)((*embed)(tokens));
    for (const auto& block : blocks) {
      x = (*block)(x);
    }
    return (*head)((*norm)(x));
  }
  std::shared_ptr<nn::Embedding> embed;
  std::shared_ptr<Tap> tap;
  std::vector<std::shared_ptr<GptBlock>> blocks;
  std::shared_ptr<nn::LayerNorm> norm;
  std::shared_ptr<nn::Linear> head;
};

/// Makes the parameter `gain` of a Tap a replicated distributed tensor, and changes nothing else.
class TapStyle final : public tensor_parallel::ParallelStyle {
 public:
  std::string name() const override { return "tap"; }
  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    return {{module.slot("gain"), Replicate{}}};
  }
  void apply(nn::ModuleBase&, const DeviceMesh&) const override {}
};

tensor_parallel::ParallelizePlan gpt_plan(bool sequence_parallel) {
  using namespace tensor_parallel;
  const Placement between = sequence_parallel ? Placement(Shard{1}) : Replicate{};
  const StylePtr norm = sequence_parallel ? tensor_parallel::sequence_parallel({.sequence_dim = 1})
                                          : replicate_parallel();
  const BlockPlanOptions block{.activations = between};
  const StylePtr tap = std::make_shared<TapStyle>();
  return joined(
      {embedding_plan("embed", block),
       attention_plan("block*.attn", gpt_attention(), block),
       {{"tap", tap},
        {"block*.*_norm", norm},
        {"block*.mlp", prepare_module_input(
                           {.input_layouts = {between}, .desired_input_layouts = {Replicate{}}})},
        {"block*.mlp.up", colwise_parallel({.use_local_output = false})},
        {"block*.mlp.tap", tap},
        {"block*.mlp.down",
         rowwise_parallel({.output_layouts = between, .use_local_output = false})},
        {"norm", norm},
        {"head", colwise_parallel({.input_layouts = between, .use_local_output = false})}}});
}

/// A GPT on a (dp, tp) mesh. verify() compares this GPT with the same GPT on one rank.
struct GptRun {
  GptOptions options{};
  bool sequence_parallel = false;
  /// Called after the initialization of the parameters, to plant a mistake in the model.
  std::function<void(Gpt&, const DeviceMesh&)> plant = [](Gpt&, const DeviceMesh&) {};
  /// The function that verify() runs, on the mesh and on one rank; nullptr: the loss.
  std::function<at::Tensor(Gpt&, const at::Tensor& tokens)> step{};
};

std::shared_ptr<Gpt> make_gpt(const GptRun& run, const DeviceMesh& mesh) {
  auto model = std::make_shared<Gpt>(run.options);
  fill(*model);
  if (mesh.size("tp") > 1) {
    tensor_parallel::parallelize_module(*model, mesh["tp"], gpt_plan(run.sequence_parallel));
  }
  if (mesh.size("dp") > 1) {
    for (const auto& block : model->blocks) {
      fsdp::fully_shard(*block, mesh["dp"]);
    }
    fsdp::fully_shard(*model, mesh["dp"]);
  }
  run.plant(*model, mesh);
  return model;
}

/// Data-parallel ranks get different token ids: two sequences of six tokens each.
at::Tensor gpt_tokens(const DeviceMesh& mesh) {
  return at::arange(12)
      .mul(7)
      .add(5 * mesh.local_rank("dp"))
      .remainder(kGptVocabulary)
      .view({2, 6});
}

at::Tensor gpt_loss(Gpt& model, const at::Tensor& tokens) {
  return tensor_parallel::cross_entropy(model(tokens).flatten(0, 1),
                                        tokens.add(1).remainder(kGptVocabulary).flatten());
}

VerifyReport verify_gpt(Gpt& model, const GptRun& run, const DeviceMesh& mesh) {
  Gpt reference(run.options);
  const auto step = run.step ? run.step : gpt_loss;
  return verify(model, reference, mesh, [&](Gpt& gpt) { return step(gpt, gpt_tokens(mesh)); },
                {.batch_dims = {"dp"}});
}

VerifyReport verify_gpt(const GptRun& run, const DeviceMesh& mesh) {
  return verify_gpt(*make_gpt(run, mesh), run, mesh);
}

struct MeshCase {
  std::int64_t dp = 1, tp = 1;
  bool sequence_parallel = false;
  double dropout = 0;
};

class VerifyOnMesh : public ::testing::TestWithParam<MeshCase> {};

TEST_P(VerifyOnMesh, AcceptsACorrectModel) {
  const MeshCase& c = GetParam();
  RunRanks(static_cast<int>(c.dp * c.tp), [&](Rank& rank) {
    manual_seed(3);
    const VerifyReport report =
        verify_gpt({.options = {.dropout = c.dropout}, .sequence_parallel = c.sequence_parallel},
                   rank.mesh({c.dp, c.tp}, {"dp", "tp"}));
    EXPECT_TRUE(report.ok()) << report.text();
    EXPECT_EQ(report.modules, 31U);
    EXPECT_EQ(report.parameters, 38U);
    EXPECT_LT(report.largest, 1e-5);
    EXPECT_CONTAINS(report.text(),
                    "verify: 31 modules and 38 parameters equal one rank's (largest "
                    "difference ");
    report.check();
  });
}

INSTANTIATE_TEST_SUITE_P(
    , VerifyOnMesh,
    ::testing::Values(MeshCase{}, MeshCase{.tp = 2}, MeshCase{.tp = 2, .sequence_parallel = true},
                      MeshCase{.tp = 2, .dropout = 0.3},
                      MeshCase{.tp = 3, .sequence_parallel = true}, MeshCase{.dp = 2, .tp = 2},
                      MeshCase{.dp = 2, .tp = 2, .sequence_parallel = true, .dropout = 0.3},
                      MeshCase{.dp = 3, .dropout = 0.3}),
    [](const auto& info) { return "Case" + std::to_string(info.index); });

TEST_ON_MESH(Verify, JoinsPlainPartsReturnedByStyles, {3}, {"tp"}) {
  GptMlp model(GptOptions{}), reference(GptOptions{});
  fill(model);
  using namespace tensor_parallel;
  parallelize_module(model, mesh,
                     {{"up", colwise_parallel({.use_local_output = true})},
                      {"tap", std::make_shared<TapStyle>()},
                      {"down", rowwise_parallel({.input_layouts = Shard{-1}})}});
  const at::Tensor x = uniform_values({5, kGptHidden}, 0.3);
  const VerifyReport report =
      verify(model, reference, mesh, [&](GptMlp& mlp) { return mlp(x).square().mean(); });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_ON_MESH(Verify, ComparesEveryCopyOfAHead, {4}, {"tp"}) {
  const nn::AttentionOptions options{.hidden = 12, .heads = 4, .kv_heads = 2, .qk_norm = true};
  nn::Attention model(options), reference(options);
  fill(model);
  tensor_parallel::parallelize_module(
      model, mesh, tensor_parallel::attention_plan("", options, {.replicate_kv_heads = true}));
  const at::Tensor x = uniform_values({2, 5, 12}, 0.3);
  const VerifyReport report = verify(model, reference, mesh, [&](nn::Attention& attention) {
    return attention(x).square().mean();
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_ON_MESH(Verify, AcceptsMetaAndBf16References, {1, 2}, {"dp", "tp"}) {
  const auto model = make_gpt({}, mesh);
  const auto reference = testing::made_on_meta<Gpt>();
  const auto step = [&](Gpt& gpt) { return gpt_loss(gpt, gpt_tokens(mesh)); };
  EXPECT_TRUE(verify(*model, *reference, mesh, step).ok());
  model->to(at::kBFloat16);
  Gpt half;
  half.to(at::kBFloat16);
  const VerifyReport report = verify(*model, half, mesh, step);
  EXPECT_TRUE(report.ok()) << report.text();
  EXPECT_GT(report.largest, 1e-4);
}

TEST_ON_RANKS(Verify, SupportsInferenceWithoutGradients, 2) {
  GptRun run;
  run.step = [](Gpt& model, const at::Tensor& tokens) {
    const c10::NoGradGuard no_grad;
    return model(tokens);
  };
  const VerifyReport report = verify_gpt(run, rank.mesh({1, 2}, {"dp", "tp"}));
  EXPECT_CONTAINS(report.text(), "verify: 31 modules equal one rank's");
}

TEST_ON_MESH(Verify, SupportsActivationCheckpointing, {2, 2}, {"dp", "tp"}) {
  GptRun run{.options = {.dropout = 0.3}, .sequence_parallel = true};
  const auto model = make_gpt(run, mesh);
  nn::apply_activation_checkpointing(*model, nn::of_class<GptBlock>());
  const VerifyReport report = verify_gpt(*model, run, mesh);
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_ON_MESH(Verify, SupportsARankWithoutRows, {2}, {"dp"}) {
  GptMlp model(GptOptions{}), reference(GptOptions{});
  fill(model);
  fsdp::fully_shard(model, mesh);
  const at::Tensor x = uniform_values({rank.rank() == 0 ? 3 : 0, kGptHidden}, 0.3);
  const VerifyReport report =
      verify(model, reference, mesh, [&](GptMlp& mlp) { return mlp(x).square().sum(); },
             {.batch_dims = {"dp"}});
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_ON_MESH(Verify, RefusesUnevenRowsWithRandomOperators, {2, 1}, {"dp", "tp"}) {
  GptRun run{.options = {.dropout = 0.3}};
  run.step = [&](Gpt& model, const at::Tensor& tokens) {
    return gpt_loss(model, tokens.narrow(0, 0, 2 - rank.rank()));
  };
  EXPECT_ERROR(verify_gpt(run, mesh),
               "draws random numbers, and rank 0 passes 2 rows to the model, but rank 1 passes 1;");
}

std::vector<at::Tensor> step_of(Gpt& model, const DeviceMesh& mesh) {
  const at::Tensor loss = gpt_loss(model, gpt_tokens(mesh));
  loss.backward();
  std::vector<at::Tensor> values{full_tensor(loss).clone()};
  for (const auto& [name, slot] : model.named_slots()) {
    if (slot->persistent().grad().defined()) {
      values.push_back(full_tensor(slot->persistent().grad()).clone());
    }
  }
  for (const auto& [name, slot] : model.named_buffer_slots()) {
    values.push_back(slot->get().clone());
  }
  return values;
}

TEST_ON_MESH(Verify, DoesNotChangeTheModule, {2, 2}, {"dp", "tp"}) {
  const GptRun run{.options = {.dropout = 0.3}};
  const auto train = [&](bool verified) {
    manual_seed(7);
    const auto model = make_gpt(run, mesh);
    std::vector<at::Tensor> values = step_of(*model, mesh);
    if (verified) {
      EXPECT_TRUE(verify_gpt(*model, run, mesh).ok());
    }
    // Gradients are not cleared, so they are sums over both steps.
    const std::vector<at::Tensor> second = step_of(*model, mesh);
    values.insert(values.end(), second.begin(), second.end());
    return values;
  };
  EXPECT_EACH(train(true), train(false));
}

TEST_ON_MESH(Verify, CopiesModesAndFrozenParameters, {1, 2}, {"dp", "tp"}) {
  const GptRun run{.options = {.dropout = 0.3}, .plant = [](Gpt& model, const DeviceMesh&) {
                     model.eval();
                     model.blocks[1]->train();
                     model.head->slot("weight")->get().requires_grad_(false);
                   }};
  const VerifyReport report = verify_gpt(run, mesh);
  EXPECT_TRUE(report.ok()) << report.text();
  EXPECT_EQ(report.parameters, 37U);
}

TEST_ON_MESH(Verify, RefusesAWrongReferenceAndANonscalarLoss, {1, 2}, {"dp", "tp"}) {
  const auto model = make_gpt({}, mesh);
  const VerifyStep step = [](nn::ModuleBase&) { return at::Tensor(); };
  EXPECT_ERROR(verify(*model, *model, mesh, step), "the module was passed as its own reference");
  nn::Linear linear(2, 3);
  EXPECT_ERROR(verify(*model, static_cast<nn::ModuleBase&>(linear), mesh, step),
               "the reference has 'weight' where the module has 'embed.weight'",
               "a second instance of the same class");
  Gpt unfilled;
  EXPECT_ERROR(verify(static_cast<nn::ModuleBase&>(unfilled), *model, mesh, step), "verify",
               "'embed.weight'");
  const auto parallel = make_gpt({}, mesh);
  EXPECT_ERROR(verify(*model, *parallel, mesh, step),
               "'embed.weight' of the reference is a distributed tensor");
  GptRun run;
  run.step = [](Gpt& each, const at::Tensor& tokens) { return each(tokens); };
  EXPECT_ERROR(verify_gpt(run, mesh),
               "the step returned a tensor of sizes [2, 6, 13] that requires a gradient");
}

TEST_ON_MESH(Verify, ReportsReferenceErrorsOnAllRanks, {1, 2}, {"dp", "tp"}) {
  const bool wrong = rank.rank() == 1;
  const GptRun run{.options = {.inner = [wrong](const at::Tensor& x, const at::Tensor&) {
                     TESSERA_CHECK(!wrong, "planted");
                     return x;
                   }}};
  EXPECT_ERROR(verify_gpt(run, mesh), "verify: with the reference, the step failed, in ",
               "'block0.mlp.tap': planted");
}

TEST(Verify, NamesTheModuleThatThrowsOnTheMesh) {
  const std::vector<std::string> errors = ErrorsOfRanks(2, [](Rank& rank) {
    const bool wrong = rank.rank() == 1;
    const GptRun run{.options = {.inner = [wrong](const at::Tensor& x, const at::Tensor&) {
                       TESSERA_CHECK(!wrong || !tessera::is_distributed(x), "planted");
                       return x;
                     }}};
    verify_gpt(run, rank.mesh({1, 2}, {"dp", "tp"}));
  });
  EXPECT_CONTAINS(errors[1], "verify: on the mesh, the step failed, in 'block0.mlp.tap': planted");
  EXPECT_CONTAINS(errors[0], "rank 1");
}

// The following models have mistakes on a mesh. On one rank, the same code is correct.

using LocalFunction = std::function<at::Tensor(const at::Tensor& local)>;

/// A typical mistake of users: applies `function` to the local tensor, not to the global tensor.
at::Tensor by_hand(const at::Tensor& x, const LocalFunction& function) {
  if (!tessera::is_distributed(x)) {
    return function(x);
  }
  const DistributedTensor whole(x);
  return DistributedTensor::from_local(function(whole.to_local()), whole.mesh(), whole.placements(),
                                       x.sizes().vec());
}

/// Applies `function` in the MLP between the projections, where the features are sharded.
GptOptions between_projections(const LocalFunction& function) {
  return {
      .inner = [function](const at::Tensor& x, const at::Tensor&) { return by_hand(x, function); }};
}

std::int64_t tp_rank_of(const at::Tensor& x) {
  return tessera::is_distributed(x) ? sharding_spec(x).mesh.local_rank() : 0;
}

/// Returns verify()'s report. The two tensor-parallel ranks must have equal reports.
VerifyReport found(const GptRun& run) {
  VerifyReport report;
  RunRanks(2, [&](Rank& rank) {
    const VerifyReport own = verify_gpt(run, rank.mesh({1, 2}, {"dp", "tp"}));
    EXPECT_FALSE(own.ok());
    if (rank.rank() == 0) {
      report = own;
    }
  });
  return report;
}

void expect_tap_named(const VerifyReport& report) {
  ASSERT_FALSE(report.outputs.empty()) << report.text();
  EXPECT_EQ(report.outputs[0].fqn, "block0.mlp.tap");
  EXPECT_ERROR(report.check(),
               "verify: the output of 'block0.mlp.tap', [2, 6, 24] on (tp=2) as [Shard(2)], "
               "differs from the one-rank run: at [",
               "one rank has ", "off by ", "rounding makes up to ", "on ranks 0, 1",
               "its inputs and all outputs before are equal, so look at the forward of "
               "'block0.mlp.tap'");
}

TEST(Verify, FindsFaultsBetweenProjections) {
  const at::Tensor table = at::linspace(0.5, 1.5, kGptInner);
  const std::vector<Named<at::Tensor(const at::Tensor&)>> faults{
      // narrow() takes the first feature of the rank's shard, not the first of all features.
      {"an explicit slice of a part", [](const at::Tensor& x) { return x * x.narrow(-1, 0, 1); }},
      {"the item of a part", [](const at::Tensor& x) { return x / x.abs().max().item<double>(); }},
      {"a statistic of a detached part",
       [](const at::Tensor& x) { return x - x.detach().mean(-1, /*keepdim=*/true); }},
      {"a divisor of the local size",
       [](const at::Tensor& x) { return x / std::sqrt(static_cast<double>(x.size(-1))); }},
      {"a fused weight cut along the wrong features",
       [](const at::Tensor& x) {
         const auto halves = x.chunk(2, -1);
         return at::cat({halves[0] * halves[1], halves[1]}, -1);
       }},
      {"a member of the wrong rank",
       [table](const at::Tensor& x) { return x * table.narrow(0, 0, x.size(-1)); }}};
  for (const auto& fault : faults) {
    SCOPED_TRACE(fault.name);
    GptRun run{.options = between_projections(fault.run)};
    expect_tap_named(found(run));
    // verify() must also find the mistake in a forward without backward.
    run.step = [](Gpt& model, const at::Tensor& tokens) {
      const c10::NoGradGuard no_grad;
      return model(tokens);
    };
    const VerifyReport report = found(run);
    expect_tap_named(report);
    EXPECT_TRUE(report.gradients.empty());
  }
}

/// Computes x * gain. Planted mistake: backward does not add up gain's gradient over the ranks.
struct GainFunction : torch::autograd::Function<GainFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& gain) {
    context->save_for_backward({x, gain});
    return x * gain;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    return {grads[0] * saved[1], (grads[0] * saved[0]).sum().view({1})};
  }
};

at::Tensor times_gain(const at::Tensor& x, const at::Tensor& gain) {
  const at::Tensor own = tessera::is_distributed(gain) ? DistributedTensor(gain).to_local() : gain;
  return by_hand(x, [&](const at::Tensor& local) { return GainFunction::apply(local, own); });
}

TEST(Verify, FindsAMissingReductionInBackward) {
  const VerifyReport report = found({.options = {.inner = times_gain}});
  EXPECT_TRUE(report.outputs.empty()) << report.text();
  ASSERT_EQ(report.gradients.size(), 2U) << report.text();
  // Gradients are reported in the order of backward: from the last block to the first.
  EXPECT_EQ(report.gradients[0].fqn, "block1.mlp.tap.gain");
  EXPECT_EQ(report.gradients[1].fqn, "block0.mlp.tap.gain");
  EXPECT_ERROR(report.check(),
               "verify: the gradient of parameter 'block1.mlp.tap.gain', [1] on (tp=2) as "
               "[Replicate()], differs from the one-rank run: at [0] it is ",
               "to_local()", "Partial{}", "(0 outputs and 1 gradient more differ)");
}

TEST_ON_MESH(Verify, FindsAParameterThatDivergedAfterForward, {1, 2}, {"dp", "tp"}) {
  const auto model = make_gpt({}, mesh);
  gpt_loss(*model, gpt_tokens(mesh)).backward();
  if (rank.rank() == 1) {
    const c10::NoGradGuard no_grad;
    local_tensor(model->blocks[1]->second_norm->slot("weight")->get()).mul_(1.5);
  }
  EXPECT_ERROR(
      verify_gpt(*model, {}, mesh).check(),
      "verify: parameter 'block1.second_norm.weight' differs from rank 0 on ranks 1, first "
      "at [0]: ",
      "give every rank the same values");
}

/// Returns 0 on data-parallel rank 0. Elsewhere, tensor-parallel ranks get different values.
double rank_value(const DeviceMesh& mesh) {
  const auto part = static_cast<double>(mesh.local_rank("dp"));
  return part * static_cast<double>(10 + mesh.local_rank("tp"));
}

TEST_ON_RANKS(Verify, FindsABufferThatDiffersOnOneRank, 4) {
  const GptRun run{.plant = [](Gpt& model, const DeviceMesh& mesh) {
    model.tap->calls->fill_(rank_value(mesh));
  }};
  EXPECT_ERROR(
      verify_gpt(run, rank.mesh({2, 2}, {"dp", "tp"})).check(),
      "verify: buffer 'tap.calls' differs from rank 2 on ranks 3, first at [0]: 10 on rank "
      "2 and 11 on rank 3");
}

/// Adds a hook that halves a gradient, but only on tensor-parallel rank 1.
void plant_hook(Gpt& model, const DeviceMesh& mesh) {
  if (mesh.local_rank("tp") == 1) {
    model.blocks[1]->mlp->up->add_forward_pre_hook([](nn::ModuleBase& self, nn::TensorList) {
      self.slot("weight")->get().register_hook(
          [](const at::Tensor& gradient) { return gradient.mul(0.5); });
    });
  }
}

TEST(Verify, FindsAHookThatScalesGradientsOfOneRank) {
  for (const int dp : {1, 2}) {
    RunRanks(2 * dp, [dp](Rank& rank) {
      const VerifyReport report =
          verify_gpt({.plant = plant_hook}, rank.mesh({dp, 2}, {"dp", "tp"}));
      EXPECT_ERROR(report.check(),
                   "verify: the gradient of parameter 'block1.mlp.up.weight', [24, 12] on ",
                   "differs from the one-rank run", "a hook",
                   dp == 1 ? "on (tp=2) as [Shard(0)]" : "on ranks 0, 1, 2, 3");
      EXPECT_TRUE(report.outputs.empty());
      EXPECT_EQ(report.gradients.size(), 1U) << report.text();
    });
  }
}

TEST_ON_MESH(Verify, FindsAFaultOnOneDataParallelRank, {2, 2}, {"dp", "tp"}) {
  const bool wrong = mesh.local_rank("dp") == 1;
  const VerifyReport report =
      verify_gpt({.options = {.embedded =
                                  [wrong](const at::Tensor& x, const at::Tensor&) {
                                    return wrong && tessera::is_distributed(x) ? x.mul(2) : x;
                                  }}},
                 mesh);
  EXPECT_ERROR(report.check(), "the output of 'tap', ", "on ranks 2, 3;");
}

TEST_ON_RANKS(Verify, FindsCallsOfOnlyOneRank, 2) {
  GptRun run;
  run.plant = [](Gpt& model, const DeviceMesh& mesh) {
    if (mesh.local_rank("tp") == 1) {
      model.norm->add_forward_hook(
          [&model](nn::ModuleBase&, nn::TensorList outputs) { (*model.tap)(*outputs[0]); });
    }
  };
  EXPECT_ERROR(verify_gpt(run, rank.mesh({1, 2}, {"dp", "tp"})),
               "verify: on the mesh rank 0 has nothing else, but rank 1 has the output of 'tap', "
               "call 2, [2, 6, 12] on (tp=2)",
               "in the same order on every rank");
}

TEST(Verify, NamesTheFaultyModuleOrStep) {
  struct Fault {
    const char* name;
    GptRun run;
    std::vector<std::string_view> words;
  };
  const TapFunction mask = [](const at::Tensor& x, const at::Tensor&) {
    const std::int64_t rank = tp_rank_of(x);
    return by_hand(x, [rank](const at::Tensor& local) {
      return local * at::arange(local.size(-1)).add(rank).remainder(5).ne(0);
    });
  };
  const auto own_maximum = [](const at::Tensor& x) {
    return by_hand(
        x, [](const at::Tensor& local) { return local / local.abs().max().item<double>(); });
  };
  const auto own_logits = [](Gpt& model, const at::Tensor& tokens) {
    const at::Tensor logits = model(tokens).flatten(0, 1);
    const at::Tensor own =
        tessera::is_distributed(logits) ? DistributedTensor(logits).to_local() : logits;
    const at::Tensor loss = tensor_parallel::cross_entropy(logits, tokens.flatten());
    return (tessera::is_distributed(loss) ? DistributedTensor(loss).full_tensor() : loss) +
           own.logsumexp(-1).square().mean().mul(1e-3);
  };
  const auto rolled_tokens = [](Gpt& model, const at::Tensor& tokens) {
    const bool on_mesh = tessera::is_distributed(model.norm->slot("weight")->get());
    return gpt_loss(model, on_mesh ? tokens.roll(1, 0) : tokens);
  };
  const Fault faults[] = {
      {"a mask that depends on the rank, and is right on rank 0",
       {.options = {.embedded = mask}},
       {"the output of 'tap', [2, 6, 12] on (tp=2) as [Replicate()], differs from the one-rank run",
        ", on rank 1;"}},
      {"a sum of the ranks' own logits",
       {.step = own_logits},
       {"verify: the loss, [], plain, differs from", "look at the step: the loss"}},
      {"between two modules, each of which is right",
       {.options = {.between = own_maximum}},
       {"the output of 'block0.mlp.down'", "its input differs already",
        "look at the forward of 'block0.mlp' before it calls 'block0.mlp.down'"}},
      {"before the model",
       {.step = rolled_tokens},
       {"the output of 'embed'", "the input of the model differs already",
        "look at the step before it calls the model"}},
      {"a module that the mesh never calls",
       {.options = {.skips_drop = [](const at::Tensor& x) { return tessera::is_distributed(x); }}},
       {"'block0.drop'", "is never called on the mesh", "look at the forward of 'block0'"}}};
  for (const Fault& fault : faults) {
    SCOPED_TRACE(fault.name);
    const VerifyReport report = found(fault.run);
    EXPECT_TRUE(testing::Throws<Error>([&] { report.check(); }, fault.words));
  }
}

// The following models have experts. The mesh dimensions are replicas, dp, ep and tp.

const nn::ExpertsOptions kExperts{
    .hidden = kGptHidden, .inner = 10, .experts = 6, .shared_inner = 8, .init_std = 0.3};

struct ExpertsNet : nn::Module<ExpertsNet> {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = into(x);
    return out(h + mixture(h));
  }
  nn::Child<nn::Linear> into{*this, "into", 5, kGptHidden};
  nn::Child<nn::MixtureOfExperts> mixture{*this, "mixture", kExperts};
  nn::Child<nn::Linear> out{*this, "out", kGptHidden, 5};
};

std::shared_ptr<ExpertsNet> make_experts(const DeviceMesh& mesh) {
  auto model = std::make_shared<ExpertsNet>();
  nn::init_weights(*model, /*seed=*/1);
  const bool tp = mesh.size("tp") > 1, ep = mesh.size("ep") > 1;
  if (tp) {
    using namespace tensor_parallel;
    parallelize_module(*model, mesh["tp"],
                       joined({{{"into", colwise_parallel({.output_layouts = Replicate{},
                                                           .use_local_output = false})}},
                               experts_plan("mixture", kExperts),
                               {{"out", colwise_parallel({.output_layouts = Replicate{}})}}}));
  }
  nn::apply_expert_parallel(*model, !ep ? mesh["tp"] : tp ? mesh[{"ep", "tp"}] : mesh["ep"]);
  fsdp::Options options;
  options.parameter_mesh = [=](const std::string& name, const at::Tensor&) {
    return name.starts_with("mixture.experts.") ? std::optional(mesh[{"replicas", "dp"}])
                                                : std::nullopt;
  };
  fsdp::fully_shard(
      *model, DeviceMesh::concatenate({mesh["replicas"], mesh[{"dp", "ep"}].flatten()}), options);
  return model;
}

at::Tensor full_tensor_of(const at::Tensor& y) {
  return tessera::is_distributed(y) ? DistributedTensor(y).full_tensor() : y;
}

/// `losses_of`: the mesh for take_router_losses(); nullptr: no auxiliary loss is added.
VerifyReport verify_experts(ExpertsNet& model, const DeviceMesh& mesh,
                            const DeviceMesh* losses_of = nullptr) {
  constexpr std::int64_t kTokens = 6;
  const DeviceMesh batch = mesh[{"replicas", "dp", "ep"}];
  const std::int64_t ranks = batch.size();
  const std::int64_t rank =
      (mesh.local_rank("replicas") * mesh.size("dp") + mesh.local_rank("dp")) * mesh.size("ep") +
      mesh.local_rank("ep");
  const at::Tensor all = uniform_values({ranks * kTokens, 5}, 0.7);
  const at::Tensor own = all.narrow(0, rank * kTokens, kTokens);
  ExpertsNet reference;
  return verify(model, reference, mesh,
                [&](ExpertsNet& net) {
                  const bool whole = losses_of != nullptr && &net != &model;
                  const at::Tensor loss = full_tensor_of(net(whole ? all : own)).square().mean();
                  if (losses_of == nullptr) {
                    return loss;
                  }
                  const nn::RouterLosses router =
                      nn::take_router_losses(net, whole ? DeviceMesh() : *losses_of);
                  return loss + router.load_balancing + router.z;
                },
                {.batch_dims = {"replicas", "dp", "ep"}, .splits_samples = losses_of != nullptr});
}

TEST(Verify, AcceptsCorrectExperts) {
  for (const std::vector<std::int64_t>& sizes : std::vector<std::vector<std::int64_t>>{
           {1, 2, 2, 1}, {1, 1, 4, 1}, {1, 1, 1, 2}, {1, 1, 2, 2}, {1, 2, 2, 2}, {2, 1, 2, 1}}) {
    RunOnMesh(sizes, {"replicas", "dp", "ep", "tp"}, [&](const DeviceMesh& mesh) {
      const auto model = make_experts(mesh);
      const VerifyReport report = verify_experts(*model, mesh);
      EXPECT_TRUE(report.ok()) << ::testing::PrintToString(sizes) << report.text();
      EXPECT_EQ(report.modules, 9U);
      EXPECT_EQ(report.parameters, 11U);
      const DeviceMesh batch = mesh[{"replicas", "dp", "ep"}];
      const VerifyReport auxiliary = verify_experts(*model, mesh, &batch);
      EXPECT_TRUE(auxiliary.ok()) << ::testing::PrintToString(sizes) << auxiliary.text();
    });
  }
}

TEST_ON_MESH(Verify, FindsAnExpertChangedOnOneReplica, {2, 1, 2, 1},
             {"replicas", "dp", "ep", "tp"}) {
  const auto model = make_experts(mesh);
  if (rank.rank() == 3) {
    const c10::NoGradGuard no_grad;
    for (const auto& [name, slot] : model->named_slots()) {
      if (name == "mixture.experts.up_proj.weight") {
        local_tensor(slot->persistent())[1].mul_(1.01);
      }
    }
  }
  EXPECT_ERROR(verify_experts(*model, mesh).check(), "mixture.experts.up_proj.weight");
}

TEST_ON_MESH(Verify, FindsRouterLossesOverLocalTokens, {1, 1, 4, 1},
             {"replicas", "dp", "ep", "tp"}) {
  const auto model = make_experts(mesh);
  const DeviceMesh none;
  EXPECT_ERROR(verify_experts(*model, mesh, &none).check(), "the loss");
}

}  // namespace
}  // namespace tessera::observe
