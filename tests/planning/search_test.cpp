// Tests machine files, and the search over training layouts with estimates by simple formulas.

#include "tessera/planning/detail/search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

#include "tessera/core/error.h"
#include "tessera/planning/report.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera {
namespace {

using planning::FoundLayout;
using planning::TrainingLayout;

planning::Machine read_machine(const std::string& like, const std::string& text) {
  const testing::TemporaryFolder dir;
  const std::string file = dir.path() / "m.toml";
  std::ofstream(file) << "like = \"" << like << "\"\n" << text;
  return planning::machine_of(file);
}

TEST(Machine, FileOverridesAKnownMachine) {
  const planning::Machine known = planning::machine_of("h200");
  const planning::Machine machine =
      read_machine("h200", "name = \"slow\"\nnetwork_bandwidth = 1e9\n");
  EXPECT_EQ(machine.name, "slow");
  EXPECT_EQ(machine.network_bandwidth, 1e9);
  EXPECT_EQ(machine.memory_bytes, known.memory_bytes);
  EXPECT_EQ(machine.shares_from, known.shares_from);
  EXPECT_CONTAINS(read_machine("h200", "attention_share_64 = 0.4\n").shares_from,
                  known.shares_from + ", attention_share_64 of ");
  EXPECT_EQ(read_machine("h100", "product_share = 0.7\nshares_from = \"ours\"\n").shares_from,
            "ours");
  EXPECT_ERROR(planning::machine_of("h201"), "machine h201 is not known; pass a100, h100");
  EXPECT_ERROR(planning::machine_of("h201", "--gpu"), "--gpu h201 is not known");
  EXPECT_ERROR(read_machine("h100", "collective_multiprocessors = 132\n"),
               "\"collective_multiprocessors\" is 132");
}

TEST(Machine, HasRatesForDtypesAndHeadSizes) {
  planning::Machine machine = planning::machine_of("h200");
  const auto type = c10::ScalarType::Float8_e4m3fn;
  EXPECT_EQ(machine.peak_flops(type), 1979e12);
  EXPECT_EQ(machine.peak_flops(c10::kBFloat16), 989e12);
  EXPECT_EQ(planning::machine_of("a100").peak_flops(type), 312e12);
  machine.fp8_share = 0.5;
  EXPECT_EQ(machine.product_flops(type), 0.5 * 1979e12);
  const planning::Machine without = planning::machine_of("a100");
  EXPECT_EQ(without.product_flops(type), without.product_flops(c10::kBFloat16));
  machine.attention_share = 0.5;
  machine.attention_share_64 = 0.25;
  EXPECT_EQ(machine.attention_flops(c10::kBFloat16, 64), 0.25 * 989e12);
  EXPECT_EQ(machine.attention_flops(c10::kBFloat16, 128), 0.5 * 989e12);
}

/// Returns a made-up estimate: tp, activation checkpointing and ZeRO-3 cost time and save memory.
planning::Estimate estimate(const TrainingLayout& layout) {
  planning::Estimate estimate;
  const std::int64_t ac = layout.ac == "none" ? 4 : layout.ac == "selective" ? 2 : 1;
  estimate.peak_bytes = 1000 * ac / layout.tp / layout.accumulate + (layout.zero == 2 ? 100 : 0);
  estimate.metrics.step_time_s =
      static_cast<double>(layout.tp) + 1.0 / static_cast<double>(ac) + 0.01 * layout.zero;
  return estimate;
}

planning::SearchSpace space(double memory) {
  planning::Machine machine = planning::machine_of("h100");
  machine.memory_bytes = memory;
  machine.reserved_bytes = 0;
  return {.ranks = 8, .machine = machine, .batch = 16, .estimate = estimate};
}

TEST(Search, OrdersLayoutsBySpeedAndKeepsFixedOptions) {
  const planning::Search all = planning::search(space(1e6));
  EXPECT_EQ(all.found.size(), 24U);
  EXPECT_EQ(planning::detail::name_of(all.best().layout), "dp 8 × tp 1, ac none, ZeRO-2");
  planning::SearchSpace fixed = space(1e6);
  fixed.fixed = {"tp", "ac", "zero"};
  fixed.first = {.tp = 2, .ac = "full", .zero = 2};
  const planning::Search found = planning::search(fixed);
  ASSERT_EQ(found.found.size(), 1U);
  EXPECT_EQ(planning::detail::name_of(found.best().layout), "dp 4 × tp 2, ac full, ZeRO-2");
}

TEST(Search, SkipsLargerLayoutsAndTriesMicroBatches) {
  const planning::Search found = planning::search(space(600));
  for (const FoundLayout& each : found.found) {
    EXPECT_EQ(each.fits, each.estimate.peak_bytes <= 600);
  }
  EXPECT_GT(found.skipped, 0);
  EXPECT_EQ(static_cast<std::int64_t>(found.found.size()) + found.skipped, 24);
  const planning::Search small = planning::search(space(100));
  EXPECT_TRUE(small.best().fits);
  EXPECT_GT(small.best().layout.accumulate, 1);
}

TEST(Search, CheckpointsOnlyNecessaryBlocks) {
  planning::SearchSpace asked = space(3100);
  asked.fixed = {"tp"};
  asked.blocks = 10;
  const planning::Search found = planning::search(asked);
  // Peak bytes: with ZeRO-3, 4000 (ac none) or 2000 (ac selective); with ZeRO-2, 100 more.
  EXPECT_EQ(planning::detail::name_of(found.best().layout), "dp 8 × tp 1, ac selective:5, ZeRO-2");
  EXPECT_EQ(found.best().estimate.peak_bytes, 3100);
  EXPECT_EQ(planning::checkpointed_blocks(4000, 2000, 3001, 10), 5);
  EXPECT_EQ(planning::checkpointed_blocks(4000, 2000, 2999, 10), 6);
  EXPECT_EQ(planning::checkpointed_blocks(4000, 2000, 2000, 10), 10);
  EXPECT_EQ(planning::checkpointed_blocks(4000, 4000, 3000, 10), 10);
}

TEST(Search, PrefersTheSmallerOfEquallyFastLayouts) {
  planning::SearchSpace asked = space(1e6);
  asked.estimate = [](const TrainingLayout& layout) {
    planning::Estimate estimate;
    estimate.peak_bytes = layout.zero == 3 ? 100 : 200;
    estimate.metrics.step_time_s = layout.zero == 3 ? 0.1 + 1e-16 : 0.1;  // rounding error
    return estimate;
  };
  const planning::Search found = planning::search(asked);
  EXPECT_EQ(found.best().layout.zero, 3);
  EXPECT_EQ(std::ranges::count_if(found.found, &FoundLayout::frontier), 1);
}

TEST(Search, OfManyRanksEndsQuickly) {
  planning::SearchSpace asked = space(1e6);
  asked.ranks = asked.batch = 1 << 24;
  asked.fixed = {"tp"};
  EXPECT_EQ(planning::search(asked).best().layout.dp, 1 << 24);
  asked.ranks = std::int64_t{1} << 40;
  EXPECT_ERROR(planning::search(asked), "search for at most 16777216");
}

TEST(Search, SkipsRefusedLayoutsAndReportsTheReason) {
  planning::SearchSpace space_of_eight = space(1e6);
  space_of_eight.estimate = [](const TrainingLayout& layout) {
    TESSERA_CHECK(layout.tp < 8, "eight parts are too many");
    return estimate(layout);
  };
  const planning::Search found = planning::search(space_of_eight);
  EXPECT_EQ(found.refused.size(), 6U);
  EXPECT_CONTAINS(planning::to_text(found), "dp 1, tp 8: eight parts are too many");
  space_of_eight.allows_tp = [](std::int64_t) { return false; };
  EXPECT_ERROR(planning::search(space_of_eight), "8 ranks can't be laid out");
}

}  // namespace
}  // namespace tessera
