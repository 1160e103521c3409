// That TensorBoard reads the files is tested in Python, with its own reader.

#include "tessera/observe/tensorboard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::observe {
namespace {

using testing::TemporaryFolder;

double ValueOf(const Scalars& scalars, const std::string& tag) {
  const auto found = std::ranges::find(scalars, tag, &Scalars::value_type::first);
  return found == scalars.end() ? -1 : found->second;
}

StepMetrics StepOfSevenSeconds() {
  StepMetrics metrics;
  metrics.step = 7;
  metrics.loss = 2.5;
  metrics.tokens_per_s = 1000;
  metrics.step_time_s = 7;
  metrics.data_time_s = 1.75;
  metrics.peak_memory_bytes = std::int64_t{3} << 30;
  metrics.memory_capacity_bytes = std::int64_t{12} << 30;
  return metrics;
}

TEST(TitanScalars, AreOfARankAndInTorchtitansUnits) {
  StepMetrics metrics = StepOfSevenSeconds();
  metrics.mfu = 40;
  metrics.eval_loss = 2.25;
  metrics.peak_active_bytes = std::int64_t{6} << 29;
  const Scalars scalars = titan_scalars(metrics, 4, "cuda");
  EXPECT_EQ(ValueOf(scalars, "loss_metrics/global_avg_loss"), 2.5);
  EXPECT_EQ(ValueOf(scalars, "throughput(tps)"), 250);
  EXPECT_EQ(ValueOf(scalars, "time_metrics/data_loading(%)"), 25);
  EXPECT_EQ(ValueOf(scalars, "memory/max_reserved(GiB)"), 3);
  EXPECT_EQ(ValueOf(scalars, "memory/max_active(%)"), 25);
  EXPECT_EQ(ValueOf(scalars, "mfu(%)"), 40);
  EXPECT_EQ(ValueOf(scalars, "validation_metrics/loss"), 2.25);
}

TEST(TitanScalars, LeaveOutWhatIsNotKnown) {
  const Scalars scalars = titan_scalars(StepOfSevenSeconds(), 1, "cpu");
  for (const char* tag : {"mfu(%)", "validation_metrics/loss", "memory/max_active(GiB)",
                          "memory/max_reserved(GiB)", "loss_scale"}) {
    EXPECT_EQ(ValueOf(scalars, tag), -1) << tag;
  }
  EXPECT_EQ(ValueOf(scalars, "memory/max_resident(GiB)"), 3);
}

/// The first record is of known bytes but for the time: length 24, wall_time, step,
/// "brain.Event:2".
TEST(TensorBoardWriter, FramesAnEventAsATfRecord) {
  const TemporaryFolder folder;
  const TensorBoardWriter writer(folder / "tb");
  const std::string text = testing::ReadFile(writer.path());
  ASSERT_GT(text.size(), 12U + 26U);
  EXPECT_EQ(text.substr(0, 8), std::string("\x1a\0\0\0\0\0\0\0", 8));
  double time = 0;
  std::memcpy(&time, text.data() + 13, sizeof(time));
  EXPECT_GT(time, 1.7e9);
  EXPECT_EQ(text.substr(21, 17), std::string("\x10\0\x1a\x0d"
                                             "brain.Event:2",
                                             17));
}

TEST(TensorBoardWriter, LeavesOlderFilesAsTheyAre) {
  const TemporaryFolder folder;
  TensorBoardWriter first(folder / "tb");
  first.write(1, {{"loss", 2.5}});
  const std::string before = testing::ReadFile(first.path());
  TensorBoardWriter second(folder / "tb");
  second.write(1, {{"loss", 1.5}});
  EXPECT_NE(first.path(), second.path());
  EXPECT_EQ(testing::ReadFile(first.path()), before);
  EXPECT_EQ(testing::ReadFile(second.path()).size(), before.size());
}

TEST(TensorBoardWriter, SaysWhyItCannotWrite) {
  const TemporaryFolder folder;
  testing::WriteFile(folder / "file", "");
  EXPECT_ERROR(TensorBoardWriter(folder / "file"), "cannot write the TensorBoard file",
               "Not a directory; give a folder that may be written");
}

}  // namespace
}  // namespace tessera::observe
