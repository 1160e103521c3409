#include "tessera/optim/lr_schedule.h"

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

TEST(LrSchedule, WarmsUpWithoutAZeroStep) {
  const LrSchedule schedule(Schedule::kConstant, 3, 10);
  EXPECT_DOUBLE_EQ(schedule.factor(0), 1.0 / 3.0);
  EXPECT_DOUBLE_EQ(schedule.factor(1), 2.0 / 3.0);
  EXPECT_DOUBLE_EQ(schedule.factor(2), 1.0);
  EXPECT_DOUBLE_EQ(schedule.factor(3), 1.0);
}

TEST(LrSchedule, ConstantStays) {
  const LrSchedule schedule(Schedule::kConstant, 0, 10);
  for (const int step : {0, 5, 9, 10, 1000}) EXPECT_EQ(schedule.factor(step), 1.0);
}

TEST(LrSchedule, LinearFallsAfterTheWarmUp) {
  const LrSchedule schedule(Schedule::kLinear, 2, 12);
  EXPECT_DOUBLE_EQ(schedule.factor(2), 1.0);
  EXPECT_DOUBLE_EQ(schedule.factor(7), 0.5);
  EXPECT_DOUBLE_EQ(schedule.factor(11), 0.1);
  EXPECT_EQ(schedule.factor(12), 0.0);
}

TEST(LrSchedule, CosineFallsAsHalfAWave) {
  const LrSchedule schedule(Schedule::kCosine, 0, 8);
  EXPECT_DOUBLE_EQ(schedule.factor(0), 1.0);
  EXPECT_NEAR(schedule.factor(2), 0.8535533905932737, 1e-15);
  EXPECT_NEAR(schedule.factor(4), 0.5, 1e-15);
  EXPECT_NEAR(schedule.factor(6), 0.1464466094067263, 1e-15);
  EXPECT_GT(schedule.factor(7), 0.0);
  EXPECT_EQ(schedule.factor(8), 0.0);
}

TEST(LrSchedule, AWarmUpAsLongAsTheRunNeverEnds) {
  const LrSchedule schedule(Schedule::kCosine, 5, 5);
  EXPECT_DOUBLE_EQ(schedule.factor(3), 4.0 / 5.0);
  EXPECT_EQ(schedule.factor(5), 0.0);
}

TEST(LrSchedule, RefusesNegativeSteps) {
  EXPECT_THROW(LrSchedule(Schedule::kLinear, -1, 5), Error);
  EXPECT_THROW(LrSchedule(Schedule::kLinear, 0, -5), Error);
}

TEST(ParseSchedule, KnowsItsNames) {
  EXPECT_EQ(parse_schedule("constant"), Schedule::kConstant);
  EXPECT_EQ(parse_schedule("linear"), Schedule::kLinear);
  EXPECT_EQ(parse_schedule("cosine"), Schedule::kCosine);
  EXPECT_THROW(parse_schedule("cosin"), Error);
}

}  // namespace
}  // namespace tessera::optim
