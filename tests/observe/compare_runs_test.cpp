#include "tessera/observe/compare_runs.h"

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/activation_checkpointing.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/initialization.h"
#include "tessera/tensor_parallel/block_plans.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/environment.h"
#include "testing/files.h"
#include "testing/module_values.h"
#include "testing/small_llama.h"

namespace tessera::observe {
namespace {

using testing::SmallLlama;
using testing::TemporaryFolder;

constexpr std::int64_t kTokens = 24;

/// A run of one step on a mesh of dp x tp ranks.
struct Trial {
  std::int64_t dp = 1, tp = 1;
  bool sequence_parallel = true;
  bool checkpointed = false;
  /// Changes the model after it was made parallel and filled.
  std::function<void(SmallLlama&)> plant = [](SmallLlama&) {};
  std::uint64_t seed = 0;
};

/// This rank's samples, of tokens that are the same on every mesh.
at::Tensor own_tokens(const DeviceMesh& mesh) {
  const at::Tensor all = at::arange(kTokens).mul(7).remainder(13);
  const std::int64_t each = kTokens / mesh.size("dp");
  return all.narrow(0, mesh.local_rank("dp") * each, each).clone();
}

void train_step(const Trial& run, const DeviceMesh& mesh, const CompareOptions& options) {
  const auto model = testing::made_on_meta<SmallLlama>();
  if (run.tp > 1) {
    tensor_parallel::parallelize_module(*model, mesh["tp"],
                                        testing::plan_of_small_llama(run.sequence_parallel));
  }
  if (run.checkpointed) {
    nn::apply_activation_checkpointing(*model,
                                       {.select = nn::of_class<testing::LlamaBlock>(),
                                        .options = {.policy = nn::save_matmuls_and_attention()}});
  }
  fsdp::fully_shard(*model, mesh["dp"]);
  nn::to_empty(*model, at::kCPU);
  nn::init_weights(*model, run.seed);
  run.plant(*model);
  compare_runs(*model, mesh, {"dp"}, options);
  const at::Tensor tokens = own_tokens(mesh);
  tensor_parallel::cross_entropy((*model)(tokens), tokens.add(1).remainder(13)).backward();
}

/// What rank 0 says.
std::vector<std::string> findings(const Trial& run, const TemporaryFolder& folder) {
  std::vector<std::string> lines;
  RunRanks(static_cast<int>(run.dp * run.tp), [&](Rank& rank) {
    CompareOptions options{.folder = folder / "recording"};
    if (rank.rank() == 0) {
      options.report = [&](const std::string& line) { lines.push_back(line); };
    }
    train_step(run, rank.mesh({run.dp, run.tp}, {"dp", "tp"}), options);
  });
  return lines;
}

/// The gradient of a norm's weight is not summed over the ranks that split the sequence.
void plant_wrong_sum(SmallLlama& model) {
  auto& norm = *model.blocks[1]->first_norm;
  norm.add_forward_pre_hook([](nn::ModuleBase& self, nn::TensorList) {
    self.slot("weight")->get().register_hook(
        [](const at::Tensor& gradient) { return gradient.mul(2); });
  });
}

TEST(CompareRuns, RecordsThenFindsEveryMeshEqual) {
  const TemporaryFolder folder;
  const auto recorded = findings({}, folder);
  ASSERT_EQ(recorded.size(), 1U);
  EXPECT_CONTAINS(recorded[0], "tensors of 1 step are recorded in");
  for (const Trial& run : {Trial{}, Trial{.dp = 2}, Trial{.tp = 2}, Trial{.dp = 2, .tp = 2},
                           Trial{.dp = 2, .tp = 2, .sequence_parallel = false},
                           Trial{.dp = 2, .tp = 2, .checkpointed = true}, Trial{.dp = 3}}) {
    const auto lines = findings(run, folder);
    ASSERT_EQ(lines.size(), 1U) << lines.front();
    EXPECT_CONTAINS(lines[0], "tessera: compare: step 1: all ", " tensors agree with ",
                    "recorded on DeviceMesh((dp=1, tp=1), cpu)");
  }
}

/// With 4 heads and 2 of keys and values, 4 ranks compute each of the latter twice.
TEST(CompareRuns, ComparesEveryCopyOfAHead) {
  const TemporaryFolder folder;
  const nn::AttentionOptions few{.hidden = 12, .heads = 4, .kv_heads = 2};
  std::vector<std::string> lines;
  for (const std::int64_t ranks : {1, 4}) {
    testing::RunOnMesh({ranks}, {"tp"}, [&](const DeviceMesh& mesh) {
      nn::Attention model(few);
      if (ranks > 1) {
        tensor_parallel::parallelize_module(
            model, mesh, tensor_parallel::attention_plan("", few, {.replicate_kv_heads = true}));
      }
      nn::init_weights(model, 0);
      CompareOptions options{.folder = folder / "recording"};
      if (mesh.local_rank() == 0) {
        options.report = [&](const std::string& line) { lines.push_back(line); };
      }
      compare_runs(model, mesh, {}, options);
      model(at::linspace(-1, 1, 2 * 5 * 12).view({2, 5, 12})).square().mean().backward();
    });
  }
  ASSERT_EQ(lines.size(), 2U) << lines.back();
  EXPECT_CONTAINS(lines[1], "step 1: all ", " tensors agree with ");
}

TEST(CompareRuns, MayRecordOnAnyMesh) {
  const TemporaryFolder folder;
  findings({.dp = 2, .tp = 2}, folder);
  for (const Trial& run : {Trial{}, Trial{.dp = 4}, Trial{.tp = 3}}) {
    const auto lines = findings(run, folder);
    ASSERT_EQ(lines.size(), 1U) << lines.front();
    EXPECT_CONTAINS(lines[0], " tensors agree with ");
  }
}

TEST(CompareRuns, NamesAWrongSumInANormsGradientFirst) {
  const TemporaryFolder folder;
  findings({}, folder);
  const auto lines = findings({.dp = 2, .tp = 2, .plant = plant_wrong_sum}, folder);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_CONTAINS(lines[0],
                  "step 1: the gradient of parameter 'block1.first_norm.weight' is the first that "
                  "differs: at [",
                  "it is ", "recorded ",
                  "here [8] on (dp=2, tp=2) as [Shard(0), Replicate()], recorded [8] on (dp=1) as "
                  "[Shard(0)] of DeviceMesh((dp=1, tp=1), cpu)");
  EXPECT_CONTAINS(lines[1], "step 1: 1 of ", " tensors differ from ");
}

TEST(CompareRuns, NamesTheModuleWhoseOutputDiffersFirst) {
  const TemporaryFolder folder;
  findings({}, folder);
  const auto lines = findings(
      {.tp = 2,
       .plant =
           [](SmallLlama& model) {
             model.blocks[0]->mlp->add_forward_hook([](nn::ModuleBase&, nn::TensorList outputs) {
               *outputs[0] = outputs[0]->mul(1.01);
             });
           }},
      folder);
  ASSERT_GE(lines.size(), 1U);
  EXPECT_CONTAINS(lines[0], "the output of 'block0.mlp' is the first that differs");
}

TEST(CompareRuns, NamesTheGradientOfAnOutput) {
  const TemporaryFolder folder;
  findings({}, folder);
  const auto lines = findings(
      {.plant =
           [](SmallLlama& model) {
             model.blocks[1]->mixer->add_forward_hook([](nn::ModuleBase&, nn::TensorList outputs) {
               outputs[0]->register_hook(
                   [](const at::Tensor& gradient) { return gradient.mul(1.01); });
             });
           }},
      folder);
  ASSERT_GE(lines.size(), 1U);
  EXPECT_CONTAINS(lines[0], "the gradient of the output of 'block1.mixer");
}

TEST(CompareRuns, NamesAParameterThatBeginsDifferently) {
  const TemporaryFolder folder;
  findings({}, folder);
  EXPECT_CONTAINS(findings({.dp = 2, .seed = 1}, folder).at(0),
                  "step 1: parameter 'embed.weight' is the first that differs");
}

TEST(CompareRuns, RefusesAFolderThatHoldsSomethingElse) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder / "recording");
  testing::WriteFile(folder / "recording" / "notes.txt", "text");
  EXPECT_ERROR(findings({.dp = 2}, folder), "holds files, but no complete recording",
               "name another folder");
}

TEST(CompareRuns, ReadsItsOptionsFromTheEnvironment) {
  const testing::ScopedVariable compare("TESSERA_COMPARE", "runs/a");
  const testing::ScopedVariable steps("TESSERA_COMPARE_STEPS", "3");
  {
    const testing::ScopedVariable tolerance("TESSERA_COMPARE_TOLERANCE", "1e-3");
    const CompareOptions options = compare_options_from_environment();
    EXPECT_EQ(options.folder, "runs/a");
    EXPECT_EQ(options.steps, 3);
    EXPECT_EQ(options.tolerance, 1e-3);
  }
  const testing::ScopedVariable wrong("TESSERA_COMPARE_STEPS", "-1");
  EXPECT_ERROR(compare_options_from_environment(), "TESSERA_COMPARE_STEPS=-1",
               "not a positive number");
}

}  // namespace
}  // namespace tessera::observe
