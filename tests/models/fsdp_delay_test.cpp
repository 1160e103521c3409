// Ranks that come 100 ms late to a stage of a step change no number, under tensor parallelism too.
#include <gtest/gtest.h>

#include <chrono>
#include <tuple>

#include "models/llama_run.h"
#include "tessera/models/parallelize.h"
#include "testing/lateness.h"
#include "testing/ranks.h"

namespace tessera::models {
namespace {

using nn::ModuleBase;
using nn::TensorList;
using testing::Lateness;
using testing::Rank;
using testing::RunRanks;
using testing::Stage;

/// How parameters are split over the data-parallel ranks of a mesh with tensor parallelism.
struct DelayedRun {
  const char* name;
  std::int64_t replicas, dp, tp;
  bool reshard_after_forward = true;
  std::int64_t post_forward_mesh_size = 1;
};

/// After a block's forward, and before its backward.
void delay_block(ModuleBase& block, Lateness& lateness) {
  block.add_forward_hook([&lateness](ModuleBase&, TensorList outputs) {
    lateness.pass(Stage::kForward);
    outputs[0]->register_hook([&lateness](const at::Tensor&) { lateness.pass(Stage::kBackward); });
  });
}

Outcome train_late(const Shape& shape, const DelayedRun& run, Lateness& lateness) {
  const DeviceMesh mesh = init_device_mesh(lateness.world(), {run.replicas, run.dp, run.tp},
                                           {"dp_replicate", "dp", "tp"});
  const DeviceMesh used = run.replicas > 1 ? mesh : mesh[{"dp", "tp"}];
  const auto model = make_llama(shape);
  parallelize(*model, used,
              {.fsdp = {.reshard_after_forward = run.reshard_after_forward,
                        .post_forward_mesh_size = run.post_forward_mesh_size}});
  for (ModuleBase* block : model->blocks()) {
    delay_block(*block, lateness);
  }
  const DeviceMesh data = data_mesh(used).flatten();
  return train(*model, shape,
               {.part = data.local_rank(), .parts = data.size(), .before_step = [&lateness] {
                  lateness.pass(Stage::kStep);
                }});
}

using DelayedCase = std::tuple<DelayedRun, Stage>;

class FsdpDelays : public ::testing::TestWithParam<DelayedCase> {};

TEST_P(FsdpDelays, ChangeNoBit) {
  const auto& [run, stage] = GetParam();
  Shape shape = kOddShape;
  shape.steps = 1;
  RunRanks(static_cast<int>(run.replicas * run.dp * run.tp),
           [&, run = run, stage = stage](Rank& rank) {
             constexpr std::chrono::milliseconds kDelay(100);
             Lateness none(rank, Stage::kNone, kDelay), lateness(rank, stage, kDelay);
             const Outcome prompt = train_late(shape, run, none);
             const Outcome late = train_late(shape, run, lateness);
             EXPECT_GE(lateness.passed(), 1);
             EXPECT_EQ(prompt.losses, late.losses);
             EXPECT_EQ(prompt.norms, late.norms);
             for (std::size_t i = 0; i < prompt.parameters.size(); ++i) {
               EXPECT_TRUE(prompt.gradients[i].equal(late.gradients[i])) << prompt.names[i];
               EXPECT_TRUE(prompt.parameters[i].equal(late.parameters[i])) << prompt.names[i];
             }
           });
}

constexpr Stage kEveryStage[] = {Stage::kForward, Stage::kBackward, Stage::kAllGather,
                                 Stage::kReduceScatter, Stage::kStep};

std::string name_of_delay(const ::testing::TestParamInfo<DelayedCase>& info) {
  return std::string(std::get<0>(info.param).name) + "_" + to_string(std::get<1>(info.param));
}

constexpr DelayedRun kDelayedHybrid{"Hsdp", 2, 2, 2};

INSTANTIATE_TEST_SUITE_P(Stages, FsdpDelays,
                         ::testing::Combine(::testing::Values(DelayedRun{"Zero2", 1, 2, 2, false},
                                                              DelayedRun{"Zero3", 1, 2, 2},
                                                              DelayedRun{"Hpz", 1, 4, 2, true, 2},
                                                              kDelayedHybrid),
                                            ::testing::ValuesIn(kEveryStage)),
                         name_of_delay);
INSTANTIATE_TEST_SUITE_P(AllReduce, FsdpDelays,
                         ::testing::Combine(::testing::Values(kDelayedHybrid),
                                            ::testing::Values(Stage::kAllReduce)),
                         name_of_delay);

}  // namespace
}  // namespace tessera::models
