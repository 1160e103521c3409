// A model with nn::Dropout that continues from a checkpoint draws the masks of one that never
// stopped.

#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/known_model.h"
#include "checkpoint/manifest.h"
#include "fsdp/training/random_model.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/optim/adamw.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using fsdp::drawing::DrawingModel;
using testing::TemporaryFolder;

/// A model whose dropouts are modules, and its optimizer.
struct DroppingRun {
  explicit DroppingRun(const DeviceMesh& over) : mesh(over) {
    tensor_parallel::parallelize_module(model, mesh["tp"], fsdp::drawing::plan_of(Replicate{}));
    for (const auto& block : model.blocks) {
      fsdp::fully_shard(*block, mesh["dp"]);
    }
    fsdp::fully_shard(model, mesh["dp"]);
    nn::init_weights(model, 5);
    optimizer.emplace(model, optim::AdamWOptions{.lr = 1e-2});
  }
  StateDict dict() { return {model, optim::named_state(*optimizer, model)}; }
  /// The steps from `begin` on, of 4 rows.
  void train(int begin, int end) {
    for (int step = begin; step < end; ++step) {
      const at::Tensor rows = fsdp::drawing::token_ids(4, step).chunk(
          mesh.size("dp"))[static_cast<std::size_t>(mesh.local_rank("dp"))];
      model(rows).square().mean().backward();
      optimizer->step();
      optimizer->zero_grad();
    }
  }

  DeviceMesh mesh;
  DrawingModel model{fsdp::drawing::kModules};
  std::optional<optim::AdamW> optimizer;
};

class DropoutCalls : public ::testing::TestWithParam<std::vector<std::int64_t>> {};

TEST_P(DropoutCalls, ContinueFromACheckpoint) {
  const TemporaryFolder dir;
  RunOnMesh(GetParam(), {"dp", "tp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    DroppingRun whole(mesh);
    whole.train(0, 2);
    save(*rank.world(), dir.path(), 2, whole.dict());
    whole.train(2, 4);
    DroppingRun resumed(mesh);
    load(*rank.world(), dir.path(), resumed.dict());
    EXPECT_EQ(resumed.model.blocks[1]->drop_residual->calls(), 4U);  // two in a forward
    resumed.train(2, 4);
    const Tensors expected = LocalValues(whole.model);
    for (const auto& [name, tensor] : LocalValues(resumed.model)) {
      EXPECT_TRUE(tensor.equal(expected.at(name))) << name;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, DropoutCalls,
                         ::testing::Values(std::vector<std::int64_t>{1, 1},
                                           std::vector<std::int64_t>{2, 2}));

TEST(DropoutCallsOf, StayWhereTheCheckpointHasNoneOrTheyAreExcluded) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    DroppingRun run(rank.mesh({1, 1}, {"dp", "tp"}));
    nn::Dropout& dropout = *run.model.blocks[0]->drop_scores;
    dropout.set_calls(3);
    save(*rank.world(), dir.path(), 1, {run.model});
    EXPECT_EQ(read_manifest(dir / "step-00000001").dropout_calls.at("block0.drop_scores"), 3);
    dropout.set_calls(7);
    load(*rank.world(), dir.path(), {run.model}, {.exclude = {"**.drop_scores"}});
    EXPECT_EQ(dropout.calls(), 7U);
    load(*rank.world(), dir.path(), {run.model});
    EXPECT_EQ(dropout.calls(), 3U);
  });
  Manifest older = read_manifest(dir / "step-00000001");
  older.dropout_calls.clear();
  testing::WriteFile(dir / "step-00000001/manifest.json", to_text(older));
  RunRanks(1, [&](Rank& rank) {
    DroppingRun run(rank.mesh({1, 1}, {"dp", "tp"}));
    run.model.blocks[0]->drop_scores->set_calls(5);
    load(*rank.world(), dir.path(), {run.model});
    EXPECT_EQ(run.model.blocks[0]->drop_scores->calls(), 5U);
  });
}

}  // namespace
}  // namespace tessera::checkpoint
