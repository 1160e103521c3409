#include "tessera/optim/optimizer.h"

#include <utility>

#include "testing/errors.h"

namespace tessera::optim {
namespace {

/// A schedule, and its factors at some steps.
struct Row {
  const char* name;
  LrScheduleOptions options;
  std::vector<std::pair<int, double>> factors;
};

TEST(LrSchedule, HasItsFactors) {
  const std::vector<Row> rows{
      {"warms up without a step at 0",
       {.schedule = Schedule::kConstant, .warmup = 3, .steps = 10},
       {{0, 1.0 / 3}, {1, 2.0 / 3}, {2, 1}, {3, 1}}},
      {"constant",
       {.schedule = Schedule::kConstant, .warmup = 0, .steps = 10},
       {{0, 1}, {5, 1}, {9, 1}, {10, 1}, {1000, 1}}},
      {"linear",
       {.schedule = Schedule::kLinear, .warmup = 2, .steps = 12},
       {{2, 1}, {7, 0.5}, {11, 0.1}, {12, 0}}},
      {"cosine",
       {.schedule = Schedule::kCosine, .warmup = 0, .steps = 8},
       {{0, 1}, {2, 0.8535533905932737}, {4, 0.5}, {6, 0.1464466094067263}, {8, 0}}},
      {"a warm-up as long as the run",
       {.schedule = Schedule::kCosine, .warmup = 5, .steps = 5},
       {{3, 0.8}, {5, 0}}},
      {"warm-up, stable, decay",
       {.schedule = Schedule::kWsd, .warmup = 2, .steps = 20, .decay_ratio = 0.2},
       {{0, 0.5}, {2, 1}, {16, 1}, {17, 0.75}, {19, 0.25}, {20, 0}}},
      {"to the smallest rate",
       {.schedule = Schedule::kLinear, .warmup = 2, .steps = 12, .min_factor = 0.1},
       {{0, 0.5}, {7, 0.55}, {12, 0.1}, {100, 0.1}}}};
  for (const Row& row : rows) {
    for (const auto& [step, factor] : row.factors) {
      EXPECT_NEAR(LrSchedule(row.options).factor(step), factor, 1e-15) << row.name << " " << step;
    }
  }
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
