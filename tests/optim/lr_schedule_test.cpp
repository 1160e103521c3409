#include "tessera/optim/lr_schedule.h"

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "testing/errors.h"

namespace tessera::optim {
namespace {

TEST(LrSchedule, WarmsUpWithoutAZeroStep) {
  const LrSchedule schedule({.schedule = Schedule::kConstant, .warmup = 3, .steps = 10});
  EXPECT_DOUBLE_EQ(schedule.factor(0), 1.0 / 3.0);
  EXPECT_DOUBLE_EQ(schedule.factor(1), 2.0 / 3.0);
  EXPECT_DOUBLE_EQ(schedule.factor(2), 1.0);
  EXPECT_DOUBLE_EQ(schedule.factor(3), 1.0);
}

TEST(LrSchedule, ConstantStays) {
  const LrSchedule schedule({.schedule = Schedule::kConstant, .warmup = 0, .steps = 10});
  for (const int step : {0, 5, 9, 10, 1000}) {
    EXPECT_EQ(schedule.factor(step), 1.0);
  }
}

TEST(LrSchedule, LinearFallsAfterTheWarmUp) {
  const LrSchedule schedule({.schedule = Schedule::kLinear, .warmup = 2, .steps = 12});
  EXPECT_DOUBLE_EQ(schedule.factor(2), 1.0);
  EXPECT_DOUBLE_EQ(schedule.factor(7), 0.5);
  EXPECT_DOUBLE_EQ(schedule.factor(11), 0.1);
  EXPECT_EQ(schedule.factor(12), 0.0);
}

TEST(LrSchedule, CosineFallsAsHalfAWave) {
  const LrSchedule schedule({.schedule = Schedule::kCosine, .warmup = 0, .steps = 8});
  EXPECT_DOUBLE_EQ(schedule.factor(0), 1.0);
  EXPECT_NEAR(schedule.factor(2), 0.8535533905932737, 1e-15);
  EXPECT_NEAR(schedule.factor(4), 0.5, 1e-15);
  EXPECT_NEAR(schedule.factor(6), 0.1464466094067263, 1e-15);
  EXPECT_GT(schedule.factor(7), 0.0);
  EXPECT_EQ(schedule.factor(8), 0.0);
}

TEST(LrSchedule, AWarmUpAsLongAsTheRunNeverEnds) {
  const LrSchedule schedule({.schedule = Schedule::kCosine, .warmup = 5, .steps = 5});
  EXPECT_DOUBLE_EQ(schedule.factor(3), 4.0 / 5.0);
  EXPECT_EQ(schedule.factor(5), 0.0);
}

TEST(LrSchedule, WarmsUpStaysAndDecays) {
  const LrSchedule schedule(
      {.schedule = Schedule::kWsd, .warmup = 2, .steps = 20, .decay_ratio = 0.2});
  EXPECT_DOUBLE_EQ(schedule.factor(0), 0.5);
  EXPECT_DOUBLE_EQ(schedule.factor(2), 1);
  EXPECT_DOUBLE_EQ(schedule.factor(16), 1);
  EXPECT_DOUBLE_EQ(schedule.factor(17), 0.75);
  EXPECT_DOUBLE_EQ(schedule.factor(19), 0.25);
  EXPECT_DOUBLE_EQ(schedule.factor(20), 0);
}

TEST(LrSchedule, FallsFromTheFullRateWhereTheWarmUpLeavesLess) {
  ::testing::internal::CaptureStderr();
  const LrSchedule schedule(
      {.schedule = Schedule::kWsd, .warmup = 6, .steps = 10, .decay_ratio = 0.8});
  EXPECT_CONTAINS(::testing::internal::GetCapturedStderr(),
                  "of 10 steps falls in the last 8, but its warm-up takes the first 6; "
                  "it falls in the last 4");
  EXPECT_DOUBLE_EQ(schedule.factor(5), 1);
  EXPECT_DOUBLE_EQ(schedule.factor(6), 1);
  EXPECT_DOUBLE_EQ(schedule.factor(7), 0.75);
  EXPECT_DOUBLE_EQ(schedule.factor(9), 0.25);
}

TEST(LrSchedule, FallsToTheSmallestRate) {
  const LrSchedule schedule(
      {.schedule = Schedule::kLinear, .warmup = 2, .steps = 12, .min_factor = 0.1});
  EXPECT_DOUBLE_EQ(schedule.factor(0), 0.5);
  EXPECT_DOUBLE_EQ(schedule.factor(7), 0.55);
  EXPECT_DOUBLE_EQ(schedule.factor(12), 0.1);
  EXPECT_DOUBLE_EQ(schedule.factor(100), 0.1);
}

TEST(LrSchedule, Refusals) {
  EXPECT_ERROR(LrSchedule({.decay_ratio = 1.5}), "decay_ratio 1.5");
  EXPECT_ERROR(LrSchedule({.min_factor = -0.5}), "min_factor -0.5", "from 0 to 1");
  EXPECT_ERROR(LrSchedule({.warmup = -1, .steps = 5}), "with a warm-up of -1");
  EXPECT_ERROR(LrSchedule({.steps = -5}), "a schedule of -5 steps");
}

// A run of no steps may have one, but no step may be taken at a rate of 0 unnoticed.
TEST(LrSchedule, NeedsTheRunsStepsUnlessConstant) {
  EXPECT_EQ(LrSchedule({.warmup = 0}).factor(7), 1);
  for (const Schedule schedule : {Schedule::kLinear, Schedule::kCosine, Schedule::kWsd}) {
    const LrSchedule unset({.schedule = schedule, .warmup = 2});
    EXPECT_ERROR(unset.factor(0), "needs the number of the run's steps",
                 "LrScheduleOptions::steps");
  }
  EXPECT_ERROR(LrSchedule({.schedule = Schedule::kWsd}).factor(1), "step 1 of a wsd schedule");
  EXPECT_ERROR(LrSchedule(LrScheduleOptions{}).factor(-1), "the rate of step -1");
}

TEST(ParseSchedule, KnowsItsNames) {
  EXPECT_EQ(parse_schedule("constant"), Schedule::kConstant);
  EXPECT_EQ(parse_schedule("linear"), Schedule::kLinear);
  EXPECT_EQ(parse_schedule("cosine"), Schedule::kCosine);
  EXPECT_ERROR(parse_schedule("cosin"), "schedule 'cosin'");
}

}  // namespace
}  // namespace tessera::optim
