// Metrics whose values are spread over ranks, alone and in checkpoints.

#include "tessera/observe/metric.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"
#include "testing/distributed.h"
#include "testing/files.h"

namespace tessera::observe {
namespace {

using testing::TemporaryFolder;

/// The smallest and the largest value.
class Range final : public Metric {
 public:
  void update(double value) {
    check_update();
    least_ = std::min(least_, value);
    most_ = std::max(most_, value);
  }
  double compute() const override { return most_ - least_; }

 private:
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double& least_ = add_state("least", kInfinity, Reduction::kMin);
  double& most_ = add_state("most", -kInfinity, Reduction::kMax);
};

/// Rank r sees the mean 10 r with the weight r + 1, and the values r and 2 r.
struct Seen {
  explicit Seen(int rank) {
    mean.update(10.0 * rank, rank + 1);
    range.update(rank);
    range.update(2.0 * rank);
  }
  checkpoint::NamedRankStates named() { return {{"mean", &mean}, {"range", &range}}; }
  MeanMetric mean;
  Range range;
};

// The mean of three ranks: (0 * 1 + 10 * 2 + 20 * 3) / 6.
constexpr double kMeanOfAll = 80.0 / 6;

TEST(Metric, HasTheValuesOfAllRanksBetweenSyncAndUnsync) {
  RunRanks(3, [](Rank& rank) {
    Seen seen(rank.rank());
    const nlohmann::json own = seen.mean.state_dict();
    seen.mean.sync(*rank.world());
    seen.range.sync(*rank.world());
    EXPECT_DOUBLE_EQ(seen.mean.compute(), kMeanOfAll);
    EXPECT_EQ(seen.range.compute(), 4);
    EXPECT_EQ(seen.mean.state_dict(), own);
    EXPECT_ERROR(seen.mean.update(1), "call unsync() first");
    EXPECT_ERROR(seen.mean.sync(*rank.world()), "the values of all ranks already");
    seen.mean.unsync();
    seen.range.unsync();
    EXPECT_EQ(seen.mean.compute(), 10.0 * rank.rank());
    EXPECT_EQ(seen.range.compute(), rank.rank());
    EXPECT_ERROR(seen.mean.unsync(), "its rank's own values");
    seen.mean.reset();
    EXPECT_TRUE(std::isnan(seen.mean.compute()));
  });
}

TEST(Metric, CommunicatesNothingInOneProcess) {
  const auto world = comm::fake_world(0, 1);
  Seen seen(2);
  seen.mean.sync(*world);
  EXPECT_EQ(seen.mean.compute(), 20);
  seen.mean.unsync();
  EXPECT_EQ(seen.mean.compute(), 20);
}

TEST(Metric, RefusesStatesThatWouldCountTwice) {
  struct Bad final : Metric {
    double compute() const override { return 0; }
    void add_twice() {
      add_state("a", 0, Reduction::kSum);
      add_state("a", 0, Reduction::kSum);
    }
    void add_from_one() { add_state("b", 1, Reduction::kSum); }
  } bad;
  EXPECT_ERROR(bad.add_twice(), "two states named 'a'");
  EXPECT_ERROR(bad.add_from_one(), "the state 'b' of a metric is summed over ranks");
}

TEST(Metric, IsSavedUnsynchronisedAndLoadedOnAnyNumberOfRanks) {
  const TemporaryFolder dir;
  const auto filled = [] {
    auto linear = std::make_unique<nn::Linear>(2, 3);
    nn::init_weights(*linear, 1);
    return linear;
  };
  RunRanks(3, [&](Rank& rank) {
    Seen seen(rank.rank());
    checkpoint::save(*rank.world(), dir.path(), 1,
                     {.model = *filled(), .rank_states = seen.named()});
    EXPECT_EQ(seen.mean.compute(), 10.0 * rank.rank());
  });
  for (const int ranks : {1, 2, 3}) {
    RunRanks(ranks, [&](Rank& rank) {
      Seen seen(7);
      const auto model = filled();
      checkpoint::load(*rank.world(), dir.path(), {.model = *model, .rank_states = seen.named()});
      if (ranks == 3) {
        EXPECT_EQ(seen.mean.compute(), 10.0 * rank.rank());
      }
      seen.mean.sync(*rank.world());
      seen.range.sync(*rank.world());
      EXPECT_DOUBLE_EQ(seen.mean.compute(), kMeanOfAll);
      EXPECT_EQ(seen.range.compute(), 4);
      seen.range.set_persistent(false);
      seen.range.unsync();
      checkpoint::load(*rank.world(), dir.path(), {.model = *model, .rank_states = seen.named()});
      EXPECT_EQ(seen.range.compute(), -std::numeric_limits<double>::infinity());
      EXPECT_FALSE(seen.mean.synced());
    });
  }
}

}  // namespace
}  // namespace tessera::observe
