// Trainings that run under the checker.
#pragma once

#include <functional>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "race/checked_world.h"

namespace tessera::race {

/// The number of steps in which all ways to gather and to reduce occur: the first step has no order
/// to prefetch by, the second waits for an update.
inline constexpr int kSteps = 3;

/// A training that uses lanes in a particular way.
struct Scenario {
  std::string name;
  int ranks;
  std::function<void(CheckedRank&)> train;
};

/// For messages of GoogleTest.
inline void PrintTo(const Scenario& scenario, std::ostream* out) {
  *out << scenario.name;
}

const std::vector<Scenario>& scenarios();

/// The faults that the checkers of all ranks have found.
struct Findings {
  std::vector<std::string> faults;
  std::set<Site> sites;  ///< that were passed
};

/// `left_out`: see CheckedStreams.
Findings check(const Scenario& scenario, const Site& left_out = {});

/// Trainings of models like the trainer's: tensor parallel, recomputed, with adapters, by Muon,
/// with loss scaling, and with split sequences.
std::vector<Scenario> llama_scenarios();

}  // namespace tessera::race
