#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>

#include "race/checked_world.h"
#include "race/scenarios.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/linear.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/module_values.h"
#include "testing/values.h"

namespace tessera::race {

// Training under the checker: in no order of the lanes may memory be used too early or too late.

namespace {

class CheckedTraining : public ::testing::TestWithParam<Scenario> {};

TEST_P(CheckedTraining, HasNoRace) {
  const Findings findings = check(GetParam());
  EXPECT_TRUE(findings.faults.empty()) << fmt::format("{}", fmt::join(findings.faults, "\n"));
}

INSTANTIATE_TEST_SUITE_P(Ways, CheckedTraining, ::testing::ValuesIn(scenarios()),
                         [](const auto& info) { return info.param.name; });

}  // namespace

// Each wait in the code is left out in turn: the checker must find a fault.

namespace {

/// Waits whose absence is no fault here, with the reason.
const std::map<Site, std::string> kSurvivors{
    // Offloaded gradients: on a CPU the host adds them up in the lane that has computed them;
    // Offload.AddsGradientsAndCallsHooksOnceTheHostHasWaited looks at this wait.
    {"tessera::fsdp::CommContext::settle: the host after compute", "no copy to the host"}};

/// The waits of the library; the scenarios have their own.
bool is_of_library(const Site& site) {
  return site.starts_with("tessera::");
}

struct Mutation {
  std::vector<const Scenario*> passes;  ///< those that come by
  std::string found;                    ///< the first fault, and where
};

std::map<Site, Mutation> all_mutations() {
  std::map<Site, Mutation> mutations;
  for (const Scenario& scenario : scenarios()) {
    for (const Site& site : check(scenario).sites) {
      if (is_of_library(site)) {
        mutations[site].passes.push_back(&scenario);
      }
    }
  }
  return mutations;
}

TEST(Mutations, AreAllFound) {
  std::map<Site, Mutation> mutations = all_mutations();
  std::string table;
  std::size_t found = 0;
  std::vector<Site> survivors;
  for (auto& [site, mutation] : mutations) {
    for (const Scenario* scenario : mutation.passes) {
      const Findings findings = check(*scenario, site);
      if (!findings.faults.empty()) {
        mutation.found = scenario->name + ": " + findings.faults.front();
        break;
      }
    }
    table +=
        fmt::format("{}\n    {}\n", site, mutation.found.empty() ? "SURVIVES" : mutation.found);
    if (!mutation.found.empty()) {
      ++found;
    } else if (!kSurvivors.contains(site)) {
      survivors.push_back(site);
    }
  }
  fmt::print("{}{} of {} waits that are left out are found\n", table, found, mutations.size());
  EXPECT_TRUE(survivors.empty()) << fmt::format("{}", survivors.size()) << " survive";
}

}  // namespace

// The exposed communication of a timeline of operators and collectives, by a cost model. A layer's
// gather and reduction take less time than its computation.

namespace {

constexpr std::int64_t kWidth = 16, kRows = 8;
constexpr int kLayers = 8;
constexpr double kLayerMicroseconds = 100;
constexpr double kGatherMicroseconds = 40;

/// A layer's forward takes 100 us, its backward 200; its gather and its reduction take 40 us each,
/// one after the other, since they use one group.
Costs costs() {
  const double flops = 2.0 * kRows * kWidth * kWidth;
  const double bytes = 4.0 * kWidth * kWidth;
  return {.flops = flops / kLayerMicroseconds,
          .memory = 0,
          .latency = 0,
          .network = bytes / kGatherMicroseconds};
}

/// Every second layer's outputs are split, and the next one sums over its inputs.
void split_over(const DeviceMesh& tp, nn::ModuleBase& stack) {
  tensor_parallel::ParallelizePlan plan;
  for (int i = 0; i < kLayers; ++i) {
    plan.emplace_back(std::to_string(i), i % 2 == 0 ? tensor_parallel::colwise_parallel()
                                                    : tensor_parallel::rowwise_parallel());
  }
  tensor_parallel::parallelize_module(stack, tp, plan);
}

/// A stem and a head, which are parameters of the root unit, with layers between them.
struct Stack : nn::Module<Stack> {
  explicit Stack(const DeviceMesh& whole) {
    const DeviceMesh mesh = whole["dp"];
    const nn::LinearOptions options{.bias = false};
    for (int i = 0; i < kLayers + 2; ++i) {
      const std::string name = i == 0 ? "stem" : i > kLayers ? "head" : std::to_string(i - 1);
      layers.push_back(
          register_module(name, std::make_shared<nn::Linear>(kWidth, kWidth, options)));
    }
    testing::fill(*this);
    if (whole.ndim() > 1) {
      split_over(whole["tp"], *this);
    }
    for (int i = 1; i <= kLayers; ++i) {
      fsdp::fully_shard(*layers[static_cast<std::size_t>(i)], mesh);
    }
    fsdp::fully_shard(*this, mesh);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers) {
      x = (*layer)(x);
    }
    return x;
  }
  std::vector<std::shared_ptr<nn::Linear>> layers;
};

/// Microseconds by what the compute lane waited for.
using Exposed = std::map<std::string, double>;

Exposed exposed(const Timeline& timeline) {
  Exposed sums;
  for (const Span& stall : timeline.stalls()) {
    // Rounding of sums of times.
    if (stall.end - stall.begin > 1e-3) {
      sums[stall.name] += stall.end - stall.begin;
    }
  }
  return sums;
}

struct Step {
  Exposed forward;
  Exposed backward;
};

struct Recorded {
  std::vector<Step> steps;
  std::string trace;
  std::vector<std::string> faults;
};

/// Steps of rank 0 of two, or of two times `tp`.
Recorded record_steps(int count, int tp = 1) {
  Recorded recorded;
  RunRanks(2 * tp, [&](Rank& rank) {
    CheckedRank checked(rank, {}, costs());
    Stack model(tp == 1 ? checked.mesh({2}, {"dp"}) : checked.mesh({2, tp}, {"dp", "tp"}));
    checked.watch(model);
    Timeline& timeline = checked.checker().timeline();
    for (int i = 0; i < count; ++i) {
      Step step;
      timeline.mark();
      const at::Tensor loss = model(testing::uniform_values({kRows, kWidth}, 1)).sum();
      step.forward = exposed(timeline);
      timeline.mark();
      loss.backward();
      step.backward = exposed(timeline);
      if (rank.rank() == 0) {
        recorded.steps.push_back(step);
      }
    }
    if (rank.rank() == 0) {
      recorded.trace = timeline.chrome_trace(rank.rank());
      recorded.faults = checked.checker().faults();
    }
  });
  return recorded;
}

const std::string kRootsGather = "all_gather of the root unit";
const std::string kRootsReduction = "reduce_scatter of the root unit";

// The root has two layers' parameters.
TEST(Overlap, ExposesTheFirstGatherAndTheLastReductionAlone) {
  const Recorded recorded = record_steps(3);
  EXPECT_EQ(recorded.faults, std::vector<std::string>{});
  for (std::size_t step = 1; step < recorded.steps.size(); ++step) {
    const auto& [forward, backward] = recorded.steps[step];
    ASSERT_TRUE(forward.size() == 1 && forward.contains(kRootsGather))
        << ::testing::PrintToString(forward);
    EXPECT_NEAR(forward.at(kRootsGather), 2 * kGatherMicroseconds, 1);
    ASSERT_TRUE(backward.size() == 1 && backward.contains(kRootsReduction))
        << ::testing::PrintToString(backward);
    EXPECT_NEAR(backward.at(kRootsReduction), 2 * kGatherMicroseconds, 1);
  }
}

/// The exposed time of the units' collectives.
Exposed of_units(Exposed exposed) {
  std::erase_if(exposed,
                [](const auto& each) { return each.first.find("unit") == std::string::npos; });
  return exposed;
}

// The sums over tp are exposed; the gathers and reductions of layers are not.
TEST(Overlap, IsTheSameUnderTensorParallelism) {
  const Recorded recorded = record_steps(3, 2);
  EXPECT_EQ(recorded.faults, std::vector<std::string>{});
  for (std::size_t step = 1; step < recorded.steps.size(); ++step) {
    const Exposed& forward = recorded.steps[step].forward;
    EXPECT_GT(forward.size(), 1U) << ::testing::PrintToString(forward);
    const Exposed gathers = of_units(forward);
    ASSERT_TRUE(gathers.size() == 1 && gathers.contains(kRootsGather))
        << ::testing::PrintToString(gathers);
    const Exposed reductions = of_units(recorded.steps[step].backward);
    ASSERT_TRUE(reductions.size() == 1 && reductions.contains(kRootsReduction))
        << ::testing::PrintToString(reductions);
  }
}

// Without a known order, each gather waits for the memory of the unit before, and so for its
// computation. Each forward did so before the order was recorded.
TEST(Overlap, SeesWhatIsExposedWithoutAnOrder) {
  const Step first = record_steps(1).steps.front();
  // The first layer's gather uses separate memory.
  EXPECT_EQ(first.forward.size(), static_cast<std::size_t>(kLayers));
  double sum = 0;
  for (const auto& [name, microseconds] : first.forward) {
    EXPECT_TRUE(name.starts_with("all_gather of")) << name;
    sum += microseconds;
  }
  EXPECT_NEAR(sum, (kLayers + 1) * kGatherMicroseconds, 1);
}

/// TESSERA_RACE_TRACE=FILE writes the timeline for chrome://tracing or Perfetto.
TEST(Overlap, IsWrittenAsAChromeTrace) {
  const std::string trace = record_steps(2).trace;
  const auto events = nlohmann::json::parse(trace);
  ASSERT_FALSE(events.empty());
  std::map<std::string, int> lanes;
  for (const auto& event : events) {
    EXPECT_EQ(event.at("ph"), "X");
    EXPECT_GT(event.at("dur").get<double>(), 0);
    ++lanes[event.at("tid").get<std::string>()];
  }
  EXPECT_GT(lanes["compute"], 0);
  EXPECT_GT(lanes["network"], 0);
  if (const char* path = std::getenv("TESSERA_RACE_TRACE")) {
    std::ofstream(path) << trace;
  }
}

}  // namespace
}  // namespace tessera::race
