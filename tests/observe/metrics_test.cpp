// The metrics of a step, the device and its memory, and the record of a run.

#include <ATen/ATen.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <future>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/observe/detail/memory.h"
#include "tessera/observe/detail/metrics_output.h"
#include "tessera/observe/metric.h"
#include "tessera/observe/metrics.h"
#include "tessera/observe/run_record.h"
#include "tessera/observe/tensorboard.h"
#include "testing/distributed.h"
#include "testing/errors.h"
#include "testing/files.h"
#include "testing/ranks.h"

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

TEST(ToJson, HasTheContractsKeysInOrderAndExactValues) {
  auto metrics = Sample();
  metrics.loss = 0.1 + 0.2;
  metrics.mfu = 51.25;
  const auto json = ordered_json::parse(to_json(metrics));
  std::vector<std::string> keys;
  for (const auto& [key, value] : json.items()) {
    keys.push_back(key);
  }
  EXPECT_EQ(keys, (std::vector<std::string>{"step", "loss", "grad_norm", "lr", "step_time_s",
                                            "data_time_s", "tokens_per_s", "tflops", "mfu",
                                            "mfu_causal", "peak_memory_bytes", "comm"}));
  EXPECT_EQ(json["step"].get<int>(), 3);
  EXPECT_EQ(json["loss"].get<double>(), 0.1 + 0.2);
  EXPECT_EQ(json["mfu"].get<double>(), 51.25);
  EXPECT_EQ(json["peak_memory_bytes"].get<std::int64_t>(), std::int64_t{3} << 29);
  EXPECT_EQ(json["comm"].dump(), R"({"dp":{"all_gather":{"calls":4,"bytes":4096},)"
                                 R"("reduce_scatter":{"calls":2,"bytes":2048}},)"
                                 R"("tp":{"all_gather":{"calls":1,"bytes":100}}})");
  EXPECT_EQ(ordered_json::parse(to_json(StepMetrics{}))["comm"].dump(), "{}");
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

TEST(ToJson, HasLossScalingAndActiveBytesWhereTheyAreKnown) {
  auto metrics = Sample();
  auto json = ordered_json::parse(to_json(metrics));
  EXPECT_FALSE(json.contains("loss_scale") || json.contains("peak_active_bytes"));
  metrics.loss_scale = 32768.0;
  metrics.skipped = true;
  metrics.peak_active_bytes = std::int64_t{1} << 29;
  json = ordered_json::parse(to_json(metrics));
  EXPECT_EQ(json["loss_scale"].get<double>(), 32768.0);
  EXPECT_TRUE(json["skipped"].get<bool>());
  EXPECT_EQ(json["peak_active_bytes"], std::int64_t{1} << 29);
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

TEST(TitanLine, IsTorchtitansLine) {
  auto metrics = Sample();
  EXPECT_TRUE(titan_line(metrics, 4).ends_with("mfu: N/A"));
  metrics.mfu = 38.987;
  EXPECT_EQ(titan_line(metrics, 4),
            "step:  3  loss:  7.65432  grad_norm:  1.2500  memory:  1.50GiB(12.50%)  "
            "tps: 1,234,000  tflops: 1,234.57  mfu: 38.99%");
  metrics = {};
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

TEST(PeakFlops, KnowsDevicesByTheirDriversNamesAndGuessesNothing) {
  for (const auto& [name, flops] :
       std::vector<std::pair<std::string, double>>{{"NVIDIA H100 80GB HBM3", 989e12},
                                                   {"NVIDIA H100 PCIe", 756e12},
                                                   {"NVIDIA H100 NVL", 835e12},
                                                   {"NVIDIA H200", 989e12},
                                                   {"NVIDIA H20", 148e12},
                                                   {"NVIDIA A100-SXM4-80GB", 312e12},
                                                   {"NVIDIA L40S", 362e12},
                                                   {"AMD Instinct MI300X", 1307e12}}) {
    EXPECT_EQ(peak_flops(name), flops) << name;
  }
  EXPECT_EQ(peak_flops("NVIDIA H200", c10::kHalf), 989e12);
  EXPECT_EQ(peak_flops("NVIDIA H200", c10::kFloat), 67e12);
  EXPECT_EQ(peak_flops("NVIDIA A100-SXM4-80GB", c10::kFloat), 19.5e12);
  EXPECT_FALSE(peak_flops("NVIDIA H200", c10::kDouble));
  for (const char* name :
       {"", "NVIDIA RTX A1000", "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"}) {
    EXPECT_FALSE(peak_flops(name)) << name;
  }
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

TEST(MetricsWriter, WritesALineAStepAtOnceAndMakesTheFolder) {
  TemporaryFolder folder;
  const auto line = to_json(Sample()) + "\n";
  WriteFile(folder / "m.jsonl", "an older run\n");
  MetricsWriter writer(folder / "m.jsonl");
  writer.write(Sample());
  writer.write(Sample());
  EXPECT_EQ(ReadFile(folder / "m.jsonl"), line + line);
  MetricsWriter(folder / "a/b/m.jsonl").write(Sample());
  EXPECT_EQ(ReadFile(folder / "a/b/m.jsonl"), line);
  WriteFile(folder / "file", "");
  EXPECT_ERROR(MetricsWriter(folder / "file/m.jsonl"), "cannot write the metrics file");
  EXPECT_ERROR(MetricsWriter("/dev/full").write(Sample()), "has room");
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
  std::istringstream lines(ReadFile(folder / "m.jsonl"));
  std::vector<ordered_json> records;
  for (std::string line; std::getline(lines, line);) {
    records.push_back(ordered_json::parse(line));
  }
  ASSERT_EQ(records.size(), 3U);
  EXPECT_FALSE(records[0].contains("checkpoint_stall_s"));
  EXPECT_EQ(records[1]["checkpoint_stall_s"], 0.5);
  EXPECT_EQ(records[2]["step"], metrics.step);
}

TEST(MetricsWriter, WritesToAPipeAndReadsNothingFromIt) {
  const TemporaryFolder folder;
  const auto pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
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

using Sizes = std::vector<std::int64_t>;

TEST(ShardingTable, ListsPlainParameters) {
  const nn::Linear linear(3, 5);
  const auto table = sharding_table(linear);
  ASSERT_EQ(table.size(), 2u);
  EXPECT_EQ(table[0].name, "weight");
  EXPECT_EQ(table[0].sizes, (Sizes{5, 3}));
  EXPECT_EQ(table[0].placements, "-");
  EXPECT_EQ(table[0].local_sizes, (Sizes{5, 3}));
  EXPECT_EQ(table[0].local_bytes, 60);
  EXPECT_EQ(table[1].name, "bias");
}

TEST(ShardingTable, ListsTheLocalPartsOfEachRank) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    nn::Linear linear(3, 5);
    const auto& slot = linear.slot("weight");
    slot->set(distribute_tensor(slot->get().detach(), mesh, {Shard{0}, Shard{1}}));
    const auto row = sharding_table(linear)[0];
    const bool first_row = rank.rank() < 2, first_column = rank.rank() % 2 == 0;
    EXPECT_EQ(row.sizes, (Sizes{5, 3}));
    EXPECT_EQ(row.placements, "dp: Shard(0), tp: Shard(1)");
    EXPECT_EQ(row.local_sizes, (Sizes{first_row ? 3 : 2, first_column ? 2 : 1}));
    EXPECT_EQ(row.local_bytes, 4 * row.local_sizes[0] * row.local_sizes[1]);
  });
}

TEST(ShardingTable, ListsTheFormThatPersists) {
  RunRanks(2, [](Rank& rank) {
    nn::Linear linear(3, 5);
    const auto& slot = linear.slot("bias");
    slot->set_persistent(
        distribute_tensor(slot->get().detach(), rank.mesh({2}, {"dp"}), {Shard{0}}));
    EXPECT_EQ(sharding_table(linear)[1].placements, "dp: Shard(0)");
  });
}

TEST(ShardingTable, ShowsTheLayoutThatPlacementsCannotSay) {
  RunRanks(2, [](Rank& rank) {
    nn::Linear linear(3, 6);
    const auto layout = Layout::intern({2}, {{Digit{3, {0}}, Digit{2, {}}}});
    const auto local = at::zeros({rank.rank() == 0 ? 4 : 2});
    linear.slot("bias")->set(
        DistributedTensor::from_local(local, {rank.mesh({2}, {"dp"}), layout}, {6}));
    const auto row = sharding_table(linear)[1];
    EXPECT_EQ(row.placements, "[3:m0 x 2]");
    EXPECT_EQ(row.local_sizes, (Sizes{rank.rank() == 0 ? 4 : 2}));
  });
}

TEST(TensorMemory, CountsLiveBytesAndThePeakSinceTheLastCall) {
  count_tensor_memory();
  const std::int64_t before = *tensor_bytes();
  take_peak_tensor_bytes();
  const at::Tensor kept = at::empty({3});
  at::empty({100});
  EXPECT_EQ(*tensor_bytes() - before, 12);
  EXPECT_EQ(*take_peak_tensor_bytes() - before, 412);
  EXPECT_EQ(*take_peak_tensor_bytes() - before, 12);  // the large one was before
}

TEST(TensorMemory, ReportsEachBlockInMultiplesOfTheGranularity) {
  std::vector<TensorBlock> told;
  count_tensor_memory(
      {.granularity = 512, .observer = [&](const TensorBlock& block) { told.push_back(block); }});
  at::empty({129});
  at::empty({128});
  count_tensor_memory();
  ASSERT_EQ(told.size(), 4U);
  EXPECT_EQ(told[0].bytes, 1024);  // of 516
  EXPECT_EQ(told[2].bytes, 512);
  EXPECT_EQ(told[1].number, told[0].number);
  EXPECT_TRUE(told[1].freed);
  EXPECT_EQ(told[2].number, told[0].number + 1);
}

TEST(TensorMemory, ReservesMoreThanAnyMachineHas) {
  count_tensor_memory({.reserve_only = true});
  const std::int64_t before = *tensor_bytes();
  {
    const at::Tensor large = at::empty({std::int64_t{1} << 38});
    EXPECT_EQ(*tensor_bytes() - before, std::int64_t{1} << 40);
    large[1] = 2;  // memory comes with the first write
    EXPECT_EQ(large[1].item<float>(), 2);
  }
  EXPECT_EQ(*tensor_bytes(), before);
  count_tensor_memory();
}

TEST(TensorMemory, AnEmptyTensorIsNoBlock) {
  std::vector<TensorBlock> told;
  count_tensor_memory({.observer = [&](const TensorBlock& block) { told.push_back(block); }});
  at::zeros({0, 5});
  count_tensor_memory();
  EXPECT_TRUE(told.empty());
}

// Metrics whose values are spread over ranks, alone and in checkpoints.

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

// That TensorBoard reads the files is tested in Python, with its own reader.

using testing::TemporaryFolder;

using Scalars = std::vector<std::pair<std::string, double>>;

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
