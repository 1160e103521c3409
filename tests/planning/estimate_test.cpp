// Tests predicted times and memory, and the search over layouts, for a small convolutional network.

#include "tessera/planning/detail/search.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>

#include "planning/net.h"
#include "tessera/optim/adamw.h"
#include "tessera/planning/report.h"
#include "testing/errors.h"

namespace tessera {
namespace {

using planning::TrainingLayout;

constexpr std::int64_t kRanks = 4, kDepth = 9, kBatch = 8192;

/// Returns a function that trains a Net with `layers` layers; with kDepth layers if `layers` is 0.
planning::MakeRun run_of(const TrainingLayout& layout, std::int64_t layers) {
  return [=](const comm::WorldPtr& world) -> planning::Run {
    const DeviceMesh mesh = init_device_mesh(world, {layout.dp, layout.tp}, {"dp", "tp"});
    const fsdp::Options options{.reshard_after_forward = layout.zero == 3};
    const auto net = testing::make_deep_net(mesh, layers == 0 ? kDepth : layers, options);
    nn::to_empty(*net, at::kCPU);
    nn::init_weights(*net, /*seed=*/0);
    const auto optimizer = std::make_shared<optim::AdamW>(*net, optim::AdamWOptions{});
    return {net, mesh,
            [=] { testing::train_on(*net, *optimizer, mesh, kBatch / mesh.size("dp")); }};
  };
}

planning::RankPlan plan_first(const TrainingLayout& layout, const planning::PlanOptions& options) {
  return planning::detail::plan_rank(run_of(layout, 0), layout.dp * layout.tp, /*rank=*/0, options);
}

planning::PlanOptions on_h100s() {
  return {.machine = planning::machine_of("h100"), .device = "cuda", .tokens = kBatch};
}

double sum_of(const std::map<std::string, double>& seconds) {
  return std::accumulate(seconds.begin(), seconds.end(), 0.0,
                         [](double sum, const auto& entry) { return sum + entry.second; });
}

TEST(ExposedTime, CoversAllCommunicationIfComputeIsFree) {
  constexpr double kBandwidth = 1e9;
  planning::Machine links = testing::products_alone();
  links.flops_half = links.flops_fp32 = 1e30;
  links.link_bandwidth = links.network_bandwidth = kBandwidth;
  const planning::RankPlan plan =
      plan_first({.dp = 1, .tp = 2}, {.machine = links, .device = "cuda"});
  // In a ring all-reduce of two ranks, each rank sends as many bytes as the tensor has.
  double bytes = 0;
  for (const auto& [key, traffic] : plan.metrics.comm) {
    ASSERT_EQ(key.second, "all_reduce");
    bytes += static_cast<double>(traffic.bytes);
  }
  // Tensor parallelism has two all-reduces per layer: of the result, and of the input's gradient.
  EXPECT_GT(bytes, 2.0 * kDepth * kBatch * testing::Net::kFeatures * sizeof(float));
  const double seconds = bytes / kBandwidth;
  EXPECT_NEAR(sum_of(plan.time->exposed), seconds, 1e-6 * seconds);
  EXPECT_NEAR(plan.time->total, seconds, 1e-6 * seconds);
}

TEST(ExposedTime, IsSmallIfGathersOverlapCompute) {
  const planning::StepTime time = *plan_first({.dp = kRanks}, on_h100s()).time;
  EXPECT_LT(time.exposed.at("dp"), 0.5 * time.communication.at("dp"));
  EXPECT_NEAR(time.total, time.compute + sum_of(time.exposed), 1e-9);
}

TEST(Overlap, SlowsProductsWhenCollectivesUseMultiprocessors) {
  planning::PlanOptions options = on_h100s();
  const auto compute = [&](double taken, std::int64_t ranks) {
    options.machine->collective_multiprocessors = taken;
    return plan_first({.dp = ranks}, options).time->compute;
  };
  EXPECT_GT(compute(66, kRanks), compute(0, kRanks));
  EXPECT_LT(compute(66, kRanks), 2 * compute(0, kRanks));
  EXPECT_EQ(compute(66, 1), compute(0, 1));
}

TEST(Estimate, FromFewLayersMatchesTheWholeModel) {
  for (const TrainingLayout& layout :
       {TrainingLayout{.dp = 4, .tp = 1}, TrainingLayout{.dp = 2, .tp = 2},
        TrainingLayout{.dp = 1, .tp = 4}, TrainingLayout{.dp = 4, .tp = 1, .zero = 2}}) {
    SCOPED_TRACE(planning::detail::name_of(layout));
    const planning::RankPlan whole = plan_first(layout, on_h100s());
    const planning::Estimate found =
        planning::estimate_by_plans(run_of, kDepth, "layers", kRanks, on_h100s())(layout);
    const auto peak = static_cast<double>(whole.memory.peak_bytes);
    // Memory blocks are multiples of 512 bytes, so estimate and plan can differ by a few blocks.
    EXPECT_NEAR(static_cast<double>(found.peak_bytes), peak, 4 * 512);
    EXPECT_EQ(found.peak_moment, whole.memory.peak_moment);
    // Times differ by 0.1 %, because the number of launches is not linear in the number of layers.
    EXPECT_NEAR(found.metrics.step_time_s / whole.time->total, 1, 1e-3);
    EXPECT_NEAR(found.exposed_s / sum_of(whole.time->exposed), 1, 1e-3);
    EXPECT_NEAR(*found.metrics.mfu / *whole.metrics.mfu, 1, 1e-3);
  }
}

/// Returns a search over all layouts of four ranks. Each estimate uses plans of models with few
/// layers.
planning::SearchSpace space_of(const planning::Machine& machine) {
  planning::PlanOptions options = on_h100s();
  options.machine = machine;
  return {
      .ranks = kRanks,
      .machine = machine,
      .batch = kBatch,
      .first = {.ac = "none"},
      .fixed = {"ac"},
      .estimate = planning::estimate_by_plans(run_of, kDepth, "layers", kRanks, options),
  };
}

TEST(Search, ByPlansFindsTheFastestLayoutThatFits) {
  planning::Machine machine = planning::machine_of("h100");
  machine.reserved_bytes = 0;
  const planning::Search all = planning::search(space_of(machine));
  ASSERT_EQ(all.found.size(), 6U);
  const double fastest = plan_first(all.best().layout, on_h100s()).time->total;
  for (const planning::FoundLayout& found : all.found) {
    EXPECT_LE(fastest, (1 + 1e-6) * plan_first(found.layout, on_h100s()).time->total);
  }
  machine.memory_bytes = static_cast<double>(all.best().estimate.peak_bytes - 1);
  const planning::Search less = planning::search(space_of(machine));
  ASSERT_TRUE(less.best().fits);
  EXPECT_LE(plan_first(less.best().layout, on_h100s()).memory.peak_bytes, machine.room());
  EXPECT_GT(less.best().estimate.metrics.step_time_s, fastest);
}

TEST(Report, GivesMomentsAndSpansInJsonAndTimesInText) {
  const planning::RunPlan plan =
      planning::plan_run(run_of({.dp = 2, .tp = 2}, 0), kRanks, on_h100s());
  const planning::StepTime& time = *plan.ranks.front().time;
  EXPECT_CONTAINS(planning::to_text(plan),
                  fmt::format("step {:.3f} ms, of which operators {:.3f} ms", 1e3 * time.total,
                              1e3 * time.compute),
                  fmt::format("{:.3f} ms exposed", 1e3 * time.exposed.at("dp")));
  const auto json = nlohmann::json::parse(
      planning::to_json(plan, planning::search(space_of(planning::machine_of("h100")))));
  EXPECT_EQ(json.at("room_bytes"), planning::machine_of("h100").room());
  EXPECT_EQ(json.at("search").at("layouts").size(), 6U);
  std::int64_t highest = 0;
  std::size_t with_spans = 0;
  for (const nlohmann::json& kind : json.at("kinds")) {
    for (const nlohmann::json& moment : kind.at("moments")) {
      highest = std::max(highest, moment.at("bytes").get<std::int64_t>());
    }
    if (!kind.at("spans").is_null()) {
      ++with_spans;
      EXPECT_FALSE(kind.at("spans").at("dp").empty());
      EXPECT_TRUE(kind.at("spans").contains("waiting"));
      EXPECT_EQ(kind.at("peak_bytes"), json.at("peak_bytes"));
    }
  }
  EXPECT_EQ(with_spans, 1U);
  EXPECT_EQ(highest, json.at("peak_bytes"));
}

}  // namespace
}  // namespace tessera
