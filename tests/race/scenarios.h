// Trainings that run under the checker.
#pragma once

#include <functional>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "race/checked_world.h"

namespace tessera::race {

/// All ways to gather and to reduce come up within this many steps: the first has no order to
/// gather ahead by, the second waits for an update.
inline constexpr int kSteps = 3;

/// A training that uses lanes in its own way.
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

/// What the checkers of all ranks have found.
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
