// Tests the metrics of a step, device and memory readings, and the record of a run.

#include <sys/stat.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <future>
#include <limits>

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

TEST(ToJson, WritesKeysInOrderAndExactValues) {
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

TEST(MetricsWriter, DropsRecordsOfLaterStepsOnResume) {
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
  WriteFile(file, ReadFile(file) + R"({"step": 5, "lo)");
  MetricsWriter writer(file, /*resumed=*/2);
  EXPECT_EQ(ReadFile(file), first_two);
  metrics.step = 3;
  writer.write(metrics);
  EXPECT_EQ(ReadFile(file), first_two + to_json(metrics) + "\n");
}

TEST(ToJson, WritesNullForUnknownOrNonfiniteValues) {
  auto metrics = Sample();
  auto json = ordered_json::parse(to_json(metrics));
  EXPECT_FALSE(json.contains("loss_scale") || json.contains("peak_active_bytes"));
  metrics.loss_scale = 32768.0;
  metrics.skipped = true;
  metrics.peak_active_bytes = std::int64_t{1} << 29;
  metrics.loss = std::numeric_limits<double>::quiet_NaN();
  metrics.grad_norm = std::numeric_limits<double>::infinity();
  json = ordered_json::parse(to_json(metrics));
  EXPECT_EQ(json["loss_scale"].get<double>(), 32768.0);
  EXPECT_TRUE(json["skipped"].get<bool>());
  EXPECT_EQ(json["peak_active_bytes"], std::int64_t{1} << 29);
  for (const char* key : {"mfu", "mfu_causal", "loss", "grad_norm"}) {
    EXPECT_TRUE(json[key].is_null()) << key;
  }
}

TEST(TitanLine, MatchesTorchtitan) {
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
  StepMetrics unknown{.step_time_s = 1};
  set_throughput(unknown, 1, 1, {}, std::nullopt);
  set_throughput(unknown, 0, 1, {.per_token = 2e9}, 100e12);
  EXPECT_FALSE(unknown.mfu || unknown.mfu_causal);
}

TEST(ModelFlops, AgreesWithTorchtitanForLlama8B) {
  // Llama 3 8B: 8.03e9 parameters, of which 128256 x 4096 belong to the embedding.
  const auto flops = model_flops(8030261248, 525336576, 32, 4096, 8192);
  EXPECT_NEAR(flops.per_token, 57.91e9, 0.01e9);
  EXPECT_NEAR(flops.per_token_causal, 51.47e9, 0.01e9);
}

TEST(PeakFlops, RecognizesDriverNamesAndNeverGuesses) {
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

TEST(MemoryUse, IsWithinTheMachineAndGrowsWithUse) {
  const MemoryUse before = take_memory_use("cpu");
  EXPECT_GT(before.peak_bytes, 1 << 20);
  EXPECT_LT(before.peak_bytes, before.capacity_bytes);
  const std::vector<char> touched(static_cast<std::size_t>(before.peak_bytes) + (64 << 20), 1);
  EXPECT_GE(take_memory_use("cpu").peak_bytes, before.peak_bytes + (60 << 20)) << touched.size();
}

TEST(MetricsWriter, WritesEachStepImmediatelyAndCreatesTheFolder) {
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
  WriteFile(folder / "notes", "dear diary\n");
  EXPECT_ERROR(MetricsWriter(folder / "notes", 2), "notes' has a line that is not a record");
  EXPECT_EQ(ReadFile(folder / "notes"), "dear diary\n");
}

TEST(MetricsWriter, WritesToAPipeWithoutReading) {
  const TemporaryFolder folder;
  const auto pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const std::int64_t resumed : {0, 5}) {
    std::future<std::string> read = std::async(std::launch::async, [&] { return ReadFile(pipe); });
    MetricsWriter(pipe, resumed).write(Sample());
    EXPECT_EQ(read.get(), to_json(Sample()) + "\n");
  }
}

TEST(MeasuredPeak, IsEqualOnAllRanksWithoutSideEffects) {
  const auto draw = [] { return at::randn({4}); };
  at::manual_seed(3);
  const at::Tensor expected = draw();
  at::manual_seed(3);
  RunRanks(3, [](Rank& rank) {
    const comm::TrafficTable before = rank.world()->traffic().table();
    const double peak = measure_peak_flops(*rank.world(), c10::kFloat);
    EXPECT_TRUE(rank.world()->traffic().since(before).empty());
    EXPECT_GT(peak, 1e7);
    EXPECT_LT(peak, 1e15);
    const at::Tensor both = at::full({1}, peak, at::kDouble);
    rank.mesh({3}, {"dp"}).group().all_reduce(both, ReduceOp::kMax)->wait();
    EXPECT_EQ(both.item<double>(), peak);
  });
  EXPECT_TRUE(draw().equal(expected));
}

TEST_ON_MESH(ShardingTable, ListsPlainParametersAndLocalParts, {2, 2}, {"dp", "tp"}) {
  nn::Linear linear(3, 5);
  EXPECT_EQ(sharding_table(linear)[0].dump(),
            R"({"name":"weight","sizes":[5,3],"placements":"-","local_sizes":[5,3],)"
            R"("local_bytes":60})");
  const auto& weight = linear.slot("weight");
  weight->set(distribute_tensor(weight->get().detach(), mesh, {Shard{0}, Shard{1}}));
  const auto& bias = linear.slot("bias");
  bias->set_persistent(distribute_tensor(bias->get().detach(), mesh["dp"], {Shard{0}}));
  const auto table = sharding_table(linear);
  const bool first_row = rank.rank() < 2, first_column = rank.rank() % 2 == 0;
  EXPECT_EQ(table[0]["sizes"].dump(), "[5,3]");
  EXPECT_EQ(table[0]["placements"], "dp: Shard(0), tp: Shard(1)");
  EXPECT_EQ(table[0]["local_sizes"][0], first_row ? 3 : 2);
  EXPECT_EQ(table[0]["local_sizes"][1], first_column ? 2 : 1);
  EXPECT_EQ(table[0]["local_bytes"], 4 * (first_row ? 3 : 2) * (first_column ? 2 : 1));
  EXPECT_EQ(table[1]["placements"], "dp: Shard(0)");
}

TEST_ON_RANKS(ShardingTable, ShowsLayoutsThatPlacementsCannotExpress, 2) {
  nn::Linear linear(3, 6);
  const auto layout = Layout::intern({2}, {{Digit{3, {0}}, Digit{2, {}}}});
  const auto local = at::zeros({rank.rank() == 0 ? 4 : 2});
  linear.slot("bias")->set(
      DistributedTensor::from_local(local, {rank.mesh({2}, {"dp"}), layout}, {6}));
  EXPECT_EQ(sharding_table(linear)[1]["placements"], "[3:m0 x 2]");
}

TEST(TensorMemory, CountsLiveBytesAndThePeakSinceTheLastCall) {
  count_tensor_memory();
  const std::int64_t before = *tensor_bytes();
  take_peak_tensor_bytes();
  const at::Tensor kept = at::empty({3});
  at::empty({100});
  EXPECT_EQ(*tensor_bytes() - before, 12);
  EXPECT_EQ(*take_peak_tensor_bytes() - before, 412);
  EXPECT_EQ(*take_peak_tensor_bytes() - before, 12);
}

TEST(TensorMemory, ReportsEachBlockInMultiplesOfTheGranularity) {
  std::vector<TensorBlock> told;
  count_tensor_memory(
      {.granularity = 512, .observer = [&](const TensorBlock& block) { told.push_back(block); }});
  at::empty({129});
  at::zeros({0, 5});
  at::empty({128});
  count_tensor_memory();
  ASSERT_EQ(told.size(), 4U);
  EXPECT_EQ(told[0].bytes, 1024);
  EXPECT_EQ(told[2].bytes, 512);
  EXPECT_EQ(told[1].number, told[0].number);
  EXPECT_TRUE(told[1].freed);
  EXPECT_EQ(told[2].number, told[0].number + 1);
}

TEST(TensorMemory, CanReserveATebibyte) {
  count_tensor_memory({.reserve_only = true});
  const std::int64_t before = *tensor_bytes();
  {
    const at::Tensor large = at::empty({std::int64_t{1} << 38});
    EXPECT_EQ(*tensor_bytes() - before, std::int64_t{1} << 40);
    large[1] = 2;
    EXPECT_EQ(large[1].item<float>(), 2);
  }
  EXPECT_EQ(*tensor_bytes(), before);
  count_tensor_memory();
}

// The weighted mean of the ranks' values 0, 10 and 20, with the weights 1, 2 and 3.
constexpr double kMeanOfAll = 80.0 / 6;

TEST(MeanMetric, CoversAllRanksBetweenSyncAndUnsync) {
  for (const int ranks : {1, 3}) {
    RunRanks(ranks, [&](Rank& rank) {
      MeanMetric mean;
      EXPECT_TRUE(std::isnan(mean.compute()));
      mean.update(10.0 * rank.rank(), rank.rank() + 1);
      const nlohmann::json own = mean.state_dict();
      mean.sync(*rank.world());
      EXPECT_DOUBLE_EQ(mean.compute(), ranks == 3 ? kMeanOfAll : 0);
      EXPECT_EQ(mean.state_dict(), own);
      EXPECT_ERROR(mean.update(1), "call unsync() first");
      EXPECT_ERROR(mean.sync(*rank.world()), "sync()", "call unsync()");
      mean.unsync();
      EXPECT_EQ(mean.compute(), 10.0 * rank.rank());
      EXPECT_ERROR(mean.unsync(), "call sync()");
      mean.reset();
      EXPECT_TRUE(std::isnan(mean.compute()));
    });
  }
}

TEST(MeanMetric, IsSavedUnsynchronizedAndLoadedOnAnyRankCount) {
  const TemporaryFolder dir;
  const auto filled = [] {
    auto linear = std::make_unique<nn::Linear>(2, 3);
    nn::init_weights(*linear, 1);
    return linear;
  };
  RunRanks(3, [&](Rank& rank) {
    MeanMetric mean;
    mean.update(10.0 * rank.rank(), rank.rank() + 1);
    mean.sync(*rank.world());
    checkpoint::save(*rank.world(), dir.path(), 1,
                     {.model = *filled(), .rank_states = {{"mean", &mean}}});
  });
  for (const int ranks : {1, 2, 3}) {
    RunRanks(ranks, [&](Rank& rank) {
      MeanMetric mean;
      const auto model = filled();
      checkpoint::load(*rank.world(), dir.path(),
                       {.model = *model, .rank_states = {{"mean", &mean}}});
      if (ranks == 3) {
        EXPECT_EQ(mean.compute(), 10.0 * rank.rank());
      }
      mean.sync(*rank.world());
      EXPECT_DOUBLE_EQ(mean.compute(), kMeanOfAll);
    });
  }
}

// These tests parse the event files with their own code. Python tests use TensorBoard's reader.

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

TEST(TitanScalars, UseTorchtitanNamesAndUnits) {
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
  const Scalars fewer = titan_scalars(StepOfSevenSeconds(), 1, "cpu");
  for (const char* tag : {"mfu(%)", "validation_metrics/loss", "memory/max_active(GiB)",
                          "memory/max_reserved(GiB)", "loss_scale"}) {
    EXPECT_EQ(ValueOf(fewer, tag), -1) << tag;
  }
  EXPECT_EQ(ValueOf(fewer, "memory/max_resident(GiB)"), 3);
}

TEST(TensorBoardWriter, KeepsOlderFilesAndReportsWriteErrors) {
  const TemporaryFolder folder;
  TensorBoardWriter first(folder / "tb");
  first.write(1, {{"loss", 2.5}});
  const std::string before = testing::ReadFile(first.path());
  TensorBoardWriter second(folder / "tb");
  second.write(1, {{"loss", 1.5}});
  EXPECT_NE(first.path(), second.path());
  EXPECT_EQ(testing::ReadFile(first.path()), before);
  EXPECT_EQ(testing::ReadFile(second.path()).size(), before.size());
  testing::WriteFile(folder / "file", "");
  EXPECT_ERROR(TensorBoardWriter(folder / "file"), "cannot write the TensorBoard file",
               "Not a directory; pass a writable folder");
}

}  // namespace
}  // namespace tessera::observe
