// Each wait of the code is left out in turn: the checker must find that it is missing.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "race/scenarios.h"

namespace tessera::race {
namespace {

/// Waits without which nothing is wrong, and why.
const std::map<Site, std::string> kSurvivors{
    // Offloaded gradients: on a CPU the host adds them up in the lane that has computed them;
    // Offload.AddsGradientsAndCallsHooksOnceTheHostHasWaited looks at this wait.
    {"tessera::fsdp::CommContext::settle: the host after compute", "no copy to the host"}};

/// Those of the library; the scenarios have others.
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
}  // namespace tessera::race
