// Which lane waits for compute outside of the usual step, and on one rank.

#include "fsdp/training/training.h"
#include "fsdp/unit.h"
#include "recording_streams.h"

namespace tessera::fsdp {
namespace {

using testing::record;
using Log = std::vector<std::string>;

TEST(LaneOrder, GradientsOfOneRankStayInTheComputeLane) {
  RunRanks(1, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 4);
    fully_shard(linear, rank.mesh({1}, {"dp"}));
    set_gradient_divide_factor(linear, 2);
    const auto streams = record(linear);
    linear(testing::uniform_values({2, 3}, 1)).sum().backward();
    for (const std::string& line : streams->log()) {
      EXPECT_FALSE(line.starts_with("enter")) << line;
    }
  });
}

class GatherByHand : public ::testing::TestWithParam<void (*)(nn::ModuleBase&)> {};

// After an optimizer's step, say.
TEST_P(GatherByHand, WaitsForTheComputeLane) {
  RunRanks(2, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 4);
    fully_shard(linear, rank.mesh({2}, {"dp"}));
    const auto streams = record(linear);
    linear(testing::uniform_values({2, 3}, 1)).sum().backward();
    streams->clear();
    GetParam()(linear);
    const Log& log = streams->log();
    ASSERT_GE(log.size(), 3u);
    EXPECT_TRUE(log[0].starts_with("compute: record ")) << log[0];
    EXPECT_EQ(log[1], "all_gather: wait " + log[0].substr(std::string("compute: record ").size()));
    EXPECT_EQ(log[2], "all_gather the root unit");
  });
}

INSTANTIATE_TEST_SUITE_P(
    Calls, GatherByHand,
    ::testing::Values([](nn::ModuleBase& module) { unshard(module); },
                      [](nn::ModuleBase& module) { start_unshard(module).wait(); },
                      [](nn::ModuleBase& module) { const UnshardScope unsharded(module); }));

}  // namespace
}  // namespace tessera::fsdp
