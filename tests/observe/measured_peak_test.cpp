#include "tessera/observe/measured_peak.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "testing/ranks.h"

namespace tessera::observe {
namespace {

TEST(MeasuredPeak, IsANumberThatAllRanksHave) {
  RunRanks(3, [](Rank& rank) {
    const double peak = measure_peak_flops(*rank.world(), c10::kFloat);
    EXPECT_GT(peak, 1e7);
    EXPECT_LT(peak, 1e15);
    const at::Tensor both = at::full({1}, peak, at::kDouble);
    rank.mesh({3}, {"dp"}).group().all_reduce(both, ReduceOp::kMax)->wait();
    EXPECT_EQ(both.item<double>(), peak);
  });
}

TEST(MeasuredPeak, LeavesRandomNumbersAndTrafficAsTheyWere) {
  RunRanks(2, [](Rank& rank) {
    at::manual_seed(3);
    const comm::TrafficTable before = rank.world()->traffic().table();
    measure_peak_flops(*rank.world(), c10::kBFloat16);
    EXPECT_TRUE(rank.world()->traffic().since(before).empty());
  });
  at::manual_seed(3);
  const at::Tensor expected = at::randn({4});
  at::manual_seed(3);
  RunRanks(1, [](Rank& rank) { measure_peak_flops(*rank.world(), c10::kFloat); });
  EXPECT_TRUE(at::randn({4}).equal(expected));
}

}  // namespace
}  // namespace tessera::observe
