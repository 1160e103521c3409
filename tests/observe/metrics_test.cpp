#include "tessera/observe/metrics.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <future>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/observe/device.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::observe {
namespace {

using nlohmann::ordered_json;
using testing::ReadFile;
using testing::TemporaryFolder;
using testing::WriteFile;

StepMetrics Sample() {
  StepMetrics metrics;
  metrics.step = 3;
  metrics.loss = 7.654321;
  metrics.grad_norm = 1.25;
  metrics.lr = 3e-4;
  metrics.step_time_s = 0.5;
  metrics.tokens_per_s = 4936000;
  metrics.tflops = 1234.5678;
  metrics.peak_memory_bytes = std::int64_t{3} << 29;
  metrics.memory_capacity_bytes = std::int64_t{12} << 30;
  metrics.comm = {{{"dp", "all_gather"}, {4, 4096}},
                  {{"dp", "reduce_scatter"}, {2, 2048}},
                  {{"tp", "all_gather"}, {1, 100}}};
  return metrics;
}

TEST(ToJson, HasTheContractsKeysInOrder) {
  const auto json = ordered_json::parse(to_json(Sample()));
  std::vector<std::string> keys;
  for (const auto& [key, value] : json.items()) {
    keys.push_back(key);
  }
  EXPECT_EQ(keys, (std::vector<std::string>{"step", "loss", "grad_norm", "lr", "step_time_s",
                                            "data_time_s", "tokens_per_s", "tflops", "mfu",
                                            "mfu_causal", "peak_memory_bytes", "comm"}));
}

TEST(ToJson, KeepsValuesExactly) {
  auto metrics = Sample();
  metrics.loss = 0.1 + 0.2;
  metrics.mfu = 51.25;
  const auto json = ordered_json::parse(to_json(metrics));
  EXPECT_EQ(json["step"].get<int>(), 3);
  EXPECT_EQ(json["loss"].get<double>(), 0.1 + 0.2);
  EXPECT_EQ(json["mfu"].get<double>(), 51.25);
  EXPECT_EQ(json["peak_memory_bytes"].get<std::int64_t>(), std::int64_t{3} << 29);
}

TEST(ReadMetrics, ReturnsTheWrittenRecords) {
  const TemporaryFolder folder;
  auto metrics = Sample();
  metrics.mfu = 51.25;
  metrics.loss_scale = 1024;
  metrics.skipped = true;
  metrics.checkpoint_stall_s = 0.125;
  metrics.grad_norm = std::numeric_limits<double>::infinity();
  MetricsWriter(folder / "m.jsonl").write(metrics);
  const auto read = read_metrics(folder / "m.jsonl", 3);
  ASSERT_EQ(read.size(), 1U);
  metrics.grad_norm = 1;
  auto same = read[0];
  EXPECT_TRUE(std::isnan(same.grad_norm));
  same.grad_norm = 1;
  EXPECT_EQ(to_json(same), to_json(metrics));
  EXPECT_TRUE(read_metrics(folder / "none.jsonl", 3).empty());
}

TEST(MetricsWriter, CutsTheRecordsOfLaterStepsInAResumedRun) {
  const TemporaryFolder folder;
  const auto file = folder / "m.jsonl";
  auto metrics = Sample();
  std::string first_two;
  {
    MetricsWriter writer(file);
    for (metrics.step = 1; metrics.step <= 4; ++metrics.step) {
      writer.write(metrics);
      first_two = metrics.step == 2 ? ReadFile(file) : first_two;
    }
  }
  WriteFile(file, ReadFile(file) + R"({"step": 5, "lo)");  // killed in the middle of a line
  EXPECT_EQ(read_metrics(file, 9).size(), 4U);
  MetricsWriter writer(file, /*resumed=*/2);
  EXPECT_EQ(ReadFile(file), first_two);
  metrics.step = 3;
  writer.write(metrics);
  EXPECT_EQ(ReadFile(file), first_two + to_json(metrics) + "\n");
}

TEST(MetricsWriter, RefusesToResumeAFileOfOtherText) {
  const TemporaryFolder folder;
  WriteFile(folder / "notes", "dear diary\n");
  EXPECT_ERROR(MetricsWriter(folder / "notes", 2), "notes' has a line that is no record");
  EXPECT_EQ(ReadFile(folder / "notes"), "dear diary\n");
}

TEST(ToJson, NestsTrafficByMeshDimensionAndCollective) {
  const auto json = ordered_json::parse(to_json(Sample()));
  EXPECT_EQ(json["comm"].dump(), R"({"dp":{"all_gather":{"calls":4,"bytes":4096},)"
                                 R"("reduce_scatter":{"calls":2,"bytes":2048}},)"
                                 R"("tp":{"all_gather":{"calls":1,"bytes":100}}})");
}

TEST(ToJson, TellsOfLossScalingWhereThereIsSome) {
  auto metrics = Sample();
  EXPECT_FALSE(ordered_json::parse(to_json(metrics)).contains("loss_scale"));
  metrics.loss_scale = 32768.0;
  metrics.skipped = true;
  const auto json = ordered_json::parse(to_json(metrics));
  EXPECT_EQ(json["loss_scale"].get<double>(), 32768.0);
  EXPECT_TRUE(json["skipped"].get<bool>());
}

TEST(ToJson, TellsWhatTensorsHadWhereThatIsKnown) {
  auto metrics = Sample();
  EXPECT_FALSE(ordered_json::parse(to_json(metrics)).contains("peak_active_bytes"));
  metrics.peak_active_bytes = std::int64_t{1} << 29;
  EXPECT_EQ(ordered_json::parse(to_json(metrics))["peak_active_bytes"], std::int64_t{1} << 29);
}

TEST(ToJson, WritesAnEmptyObjectWithoutTraffic) {
  EXPECT_EQ(ordered_json::parse(to_json(StepMetrics{}))["comm"].dump(), "{}");
}

TEST(ToJson, WritesNullForWhatIsUnknownOrNotFinite) {
  auto metrics = Sample();
  metrics.loss = std::numeric_limits<double>::quiet_NaN();
  metrics.grad_norm = std::numeric_limits<double>::infinity();
  const auto json = ordered_json::parse(to_json(metrics));
  EXPECT_TRUE(json["mfu"].is_null());
  EXPECT_TRUE(json["mfu_causal"].is_null());
  EXPECT_TRUE(json["loss"].is_null());
  EXPECT_TRUE(json["grad_norm"].is_null());
}

TEST(ReadMetrics, KnowsWhichStepsWereEvaluated) {
  const TemporaryFolder folder;
  MetricsWriter writer(folder / "m.jsonl");
  writer.write(Sample());
  auto evaluated = Sample();
  evaluated.eval_loss = 2.5;
  writer.write(evaluated);
  const std::vector<StepMetrics> records = read_metrics(folder / "m.jsonl", 3);
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[0].eval_loss, std::nullopt);
  EXPECT_EQ(records[1].eval_loss, 2.5);
}

TEST(TitanLine, IsTorchtitansLine) {
  auto metrics = Sample();
  metrics.mfu = 38.987;
  EXPECT_EQ(titan_line(metrics, 4),
            "step:  3  loss:  7.65432  grad_norm:  1.2500  memory:  1.50GiB(12.50%)  "
            "tps: 1,234,000  tflops: 1,234.57  mfu: 38.99%");
}

TEST(TitanLine, SaysWhereTheMfuIsNotKnown) {
  EXPECT_TRUE(titan_line(Sample(), 4).ends_with("mfu: N/A"));
}

TEST(TitanLine, WidensForLargeValues) {
  StepMetrics metrics;
  metrics.step = 12345;
  metrics.loss = 123.456;
  metrics.tokens_per_s = 999;
  EXPECT_EQ(titan_line(metrics, 1),
            "step: 12345  loss: 123.45600  grad_norm:  0.0000  memory:  0.00GiB(0.00%)  tps: 999  "
            "tflops: 0.00  mfu: N/A");
}

TEST(SetThroughput, DividesTheWorkAmongTheRanks) {
  StepMetrics metrics;
  metrics.step_time_s = 0.5;
  set_throughput(metrics, 4096, 4, {.per_token = 2e9, .per_token_causal = 1.5e9}, 100e12);
  EXPECT_DOUBLE_EQ(metrics.tokens_per_s, 8192);
  EXPECT_DOUBLE_EQ(metrics.tflops, 2048 * 2e9 / 1e12);
  EXPECT_DOUBLE_EQ(*metrics.mfu, 2048 * 2e9 / 100e12 * 100);
  EXPECT_DOUBLE_EQ(*metrics.mfu_causal, 2048 * 1.5e9 / 100e12 * 100);
}

TEST(SetThroughput, LeavesMfuUnknownWithoutAPeakOrTokens) {
  StepMetrics metrics;
  metrics.step_time_s = 1;
  set_throughput(metrics, 1, 1, {}, std::nullopt);
  set_throughput(metrics, 0, 1, {.per_token = 2e9}, 100e12);
  EXPECT_FALSE(metrics.mfu || metrics.mfu_causal);
}

TEST(ModelFlops, AgreesWithTorchtitansFigureForLlama8B) {
  // 8.03e9 parameters, 128256 x 4096 of them the embedding: 57.91 GFLOPs a token at 8192.
  const auto flops = model_flops(8030261248, 525336576, 32, 4096, 8192);
  EXPECT_NEAR(flops.per_token, 57.91e9, 0.01e9);
  EXPECT_NEAR(flops.per_token_causal, 51.47e9, 0.01e9);
}

TEST(PeakFlops, KnowsDevicesByTheirDriversNames) {
  EXPECT_EQ(peak_flops("NVIDIA H100 80GB HBM3"), 989e12);
  EXPECT_EQ(peak_flops("NVIDIA H100 PCIe"), 756e12);
  EXPECT_EQ(peak_flops("NVIDIA H100 NVL"), 835e12);
  EXPECT_EQ(peak_flops("NVIDIA H200"), 989e12);
  EXPECT_EQ(peak_flops("NVIDIA H20"), 148e12);
  EXPECT_EQ(peak_flops("NVIDIA A100-SXM4-80GB"), 312e12);
  EXPECT_EQ(peak_flops("NVIDIA L40S"), 362e12);
  EXPECT_EQ(peak_flops("AMD Instinct MI300X"), 1307e12);
}

TEST(PeakFlops, IsThatOfTheType) {
  EXPECT_EQ(peak_flops("NVIDIA H200", c10::kHalf), 989e12);
  EXPECT_EQ(peak_flops("NVIDIA H200", c10::kFloat), 67e12);
  EXPECT_EQ(peak_flops("NVIDIA A100-SXM4-80GB", c10::kFloat), 19.5e12);
  EXPECT_FALSE(peak_flops("NVIDIA H200", c10::kDouble));
}

TEST(PeakFlops, GuessesNothing) {
  EXPECT_FALSE(peak_flops(""));
  EXPECT_FALSE(peak_flops("NVIDIA RTX A1000"));
  EXPECT_FALSE(peak_flops("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"));
}

TEST(MemoryUse, IsWithinTheMachine) {
  const auto use = take_memory_use("cpu");
  EXPECT_GT(use.peak_bytes, 1 << 20);
  EXPECT_LT(use.peak_bytes, use.capacity_bytes);
}

TEST(MemoryUse, GrowsWithUse) {
  const auto before = peak_resident_bytes();
  const std::vector<char> touched(static_cast<std::size_t>(before) + (64 << 20), 1);
  EXPECT_GE(peak_resident_bytes(), before + (60 << 20)) << touched.size();
}

TEST(MetricsWriter, WritesALineAStepAtOnce) {
  TemporaryFolder folder;
  testing::WriteFile(folder / "m.jsonl", "an older run\n");
  MetricsWriter writer(folder / "m.jsonl");
  writer.write(Sample());
  writer.write(Sample());
  const auto line = to_json(Sample()) + "\n";
  EXPECT_EQ(testing::ReadFile(folder / "m.jsonl"), line + line);
}

TEST(MetricsWriter, WritesTheLastRecordAgainInItsPlace) {
  const testing::TemporaryFolder folder;
  MetricsWriter writer(folder / "m.jsonl");
  StepMetrics metrics = Sample();
  writer.write(metrics);
  ++metrics.step;
  writer.write(metrics);
  metrics.checkpoint_stall_s = 0.5;
  writer.write_again(metrics);
  ++metrics.step;
  writer.write(metrics);
  const std::vector<StepMetrics> records = read_metrics(folder / "m.jsonl", metrics.step);
  ASSERT_EQ(records.size(), 3U);
  EXPECT_FALSE(records[0].checkpoint_stall_s);
  EXPECT_EQ(records[1].step, records[0].step + 1);
  EXPECT_EQ(records[1].checkpoint_stall_s, 0.5);
  EXPECT_EQ(records[2].step, records[0].step + 2);
}

TEST(MetricsWriter, MakesTheFolder) {
  TemporaryFolder folder;
  MetricsWriter(folder / "a/b/m.jsonl").write(Sample());
  EXPECT_EQ(testing::ReadFile(folder / "a/b/m.jsonl"), to_json(Sample()) + "\n");
}

TEST(MetricsWriter, WritesToAPipeAndReadsNothingFromIt) {
  const TemporaryFolder folder;
  const auto pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_TRUE(read_metrics(pipe, 5).empty());
  for (const std::int64_t resumed : {0, 5}) {
    std::future<std::string> read = std::async(std::launch::async, [&] { return ReadFile(pipe); });
    {
      MetricsWriter writer(pipe, resumed);
      writer.write(Sample());
      writer.write_again(Sample());
    }
    EXPECT_EQ(read.get(), to_json(Sample()) + "\n");
  }
}

TEST(MetricsWriter, NamesAFileThatCannotBeWritten) {
  TemporaryFolder folder;
  testing::WriteFile(folder / "file", "");
  EXPECT_ERROR(MetricsWriter(folder / "file/m.jsonl"), "cannot write the metrics file");
  EXPECT_ERROR(MetricsWriter("/dev/full").write(Sample()), "has room");
}

}  // namespace
}  // namespace tessera::observe
