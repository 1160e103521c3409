// Models that are right on every mesh, and the state that verify() restores.
#include "tessera/observe/verify.h"

#include <c10/core/GradMode.h>

#include "tessera/dtensor/manual_seed.h"
#include "tessera/nn/activation_checkpointing.h"
#include "tessera/nn/initialization.h"
#include "testing/distributed.h"
#include "testing/module_values.h"
#include "verify/gpt.h"

namespace tessera::observe {
namespace {

using namespace testing;

struct MeshCase {
  std::int64_t dp = 1, tp = 1;
  bool sequence_parallel = false;
  double dropout = 0;
};

class VerifyOnMesh : public ::testing::TestWithParam<MeshCase> {};

TEST_P(VerifyOnMesh, FindsARightModelEqual) {
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

TEST(Verify, JoinsPlainPartsThatAStyleHandsOut) {
  RunOnMesh({3}, {"tp"}, [](const DeviceMesh& mesh) {
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
  });
}

TEST(Verify, ComparesEveryCopyOfAHead) {
  RunOnMesh({4}, {"tp"}, [](const DeviceMesh& mesh) {
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
  });
}

TEST(Verify, TakesAReferenceOnTheMetaDeviceAndInHalfTheDigits) {
  RunOnMesh({1, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
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
  });
}

TEST(Verify, LooksAtInferenceWithoutGradients) {
  RunRanks(2, [](Rank& rank) {
    GptRun run;
    run.step = [](Gpt& model, const at::Tensor& tokens) {
      const c10::NoGradGuard no_grad;
      return model(tokens);
    };
    const VerifyReport report = verify_gpt(run, rank.mesh({1, 2}, {"dp", "tp"}));
    EXPECT_CONTAINS(report.text(), "verify: 31 modules equal one rank's");
  });
}

TEST(Verify, SeesThroughActivationCheckpointing) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    GptRun run{.options = {.dropout = 0.3}, .sequence_parallel = true};
    const auto model = make_gpt(run, mesh);
    nn::apply_activation_checkpointing(*model, {.select = nn::of_class<GptBlock>()});
    const VerifyReport report = verify_gpt(*model, run, mesh);
    EXPECT_TRUE(report.ok()) << report.text();
  });
}

TEST(Verify, TakesARankWithoutRows) {
  RunOnMesh({2}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    GptMlp model(GptOptions{}), reference(GptOptions{});
    fill(model);
    fsdp::fully_shard(model, mesh);
    const at::Tensor x = uniform_values({rank.rank() == 0 ? 3 : 0, kGptHidden}, 0.3);
    const VerifyReport report =
        verify(model, reference, mesh, [&](GptMlp& mlp) { return mlp(x).square().sum(); },
               {.batch_dims = {"dp"}});
    EXPECT_TRUE(report.ok()) << report.text();
  });
}

TEST(Verify, RefusesUnevenRowsOfAModelThatDraws) {
  RunOnMesh({2, 1}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    GptRun run{.options = {.dropout = 0.3}};
    run.step = [&](Gpt& model, const at::Tensor& tokens) {
      return gpt_loss(model, tokens.narrow(0, 0, 2 - rank.rank()));
    };
    EXPECT_ERROR(verify_gpt(run, mesh),
                 "draws random numbers, and rank 0 gives it 2 rows, but rank 1 1;");
  });
}

/// The loss of a step, and the gradients and buffers that it leaves.
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

TEST(Verify, LeavesTheModuleAsItWas) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    const GptRun run{.options = {.dropout = 0.3}};
    const auto train = [&](bool verified) {
      manual_seed(7);
      const auto model = make_gpt(run, mesh);
      std::vector<at::Tensor> values = step_of(*model, mesh);
      if (verified) {
        EXPECT_TRUE(verify_gpt(*model, run, mesh).ok());
      }
      // Gradients are added to those of the first step.
      const std::vector<at::Tensor> second = step_of(*model, mesh);
      values.insert(values.end(), second.begin(), second.end());
      return values;
    };
    const std::vector<at::Tensor> expected = train(false), values = train(true);
    ASSERT_EQ(values.size(), expected.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(values[i].equal(expected[i])) << i;
    }
  });
}

TEST(Verify, TakesTheModesAndWhatIsFrozenFromTheModule) {
  RunOnMesh({1, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    const GptRun run{.options = {.dropout = 0.3}, .plant = [](Gpt& model, const DeviceMesh&) {
                       model.eval();
                       model.blocks[1]->train();
                       model.head->slot("weight")->get().requires_grad_(false);
                     }};
    const VerifyReport report = verify_gpt(run, mesh);
    EXPECT_TRUE(report.ok()) << report.text();
    EXPECT_EQ(report.parameters, 37U);
  });
}

TEST(Verify, RefusesAReferenceThatDoesNotFit) {
  RunOnMesh({1, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    const auto model = make_gpt({}, mesh);
    const VerifyStep step = [](nn::ModuleBase&) { return at::Tensor(); };
    EXPECT_ERROR(verify(*model, *model, mesh, step), "the module itself is passed");
    nn::Linear linear(2, 3);
    EXPECT_ERROR(verify(*model, static_cast<nn::ModuleBase&>(linear), mesh, step),
                 "the reference has 'weight' where the module has 'embed.weight'",
                 "a second instance of the same class");
    Gpt unfilled;
    EXPECT_ERROR(verify(static_cast<nn::ModuleBase&>(unfilled), *model, mesh, step), "verify",
                 "'embed.weight'");
    const auto parallel = make_gpt({}, mesh);
    EXPECT_ERROR(verify(*model, *parallel, mesh, step),
                 "'embed.weight' of the reference is distributed");
  });
}

TEST(Verify, TellsEveryRankWhatTheStepThrowsWithTheReference) {
  RunOnMesh({1, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const bool wrong = rank.rank() == 1;
    const GptRun run{.options = {.inner = [wrong](const at::Tensor& x, const at::Tensor&) {
                       TESSERA_CHECK(!wrong, "planted");
                       return x;
                     }}};
    EXPECT_ERROR(verify_gpt(run, mesh), "verify: with the reference, the step failed, in ",
                 "'block0.mlp.tap': planted");
  });
}

TEST(Verify, NamesTheModuleInWhichTheStepThrowsOnTheMesh) {
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

TEST(Verify, RefusesAGradientOfManyNumbers) {
  RunRanks(2, [](Rank& rank) {
    GptRun run;
    run.step = [](Gpt& model, const at::Tensor& tokens) { return model(tokens); };
    EXPECT_ERROR(verify_gpt(run, rank.mesh({1, 2}, {"dp", "tp"})),
                 "it returned a tensor of sizes [2, 6, 13] that has a gradient; return the loss");
  });
}

}  // namespace
}  // namespace tessera::observe
