#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fuzz/choices.h"
#include "fuzz/run_case.h"

namespace tessera::fuzz {

/// Which cases are run. Case k of a seed is the same in every search.
struct SearchOptions {
  std::uint64_t seed = 1;
  std::int64_t first = 0;
  std::int64_t cases = 100;
  int processes = 2;
  double seconds = 0;  ///< no chunk of cases begins later than this after the start; 0: all run
  Choices::Labels fixed{};  ///< decisions that are not drawn
  /// No step of a case takes a second: what waits this long waits for a peer that isn't coming.
  int timeout = 20;
  bool shrink = true;  ///< look for the fewest decisions that a fault needs
};

struct Result {
  std::int64_t index = 0;
  Outcome outcome;
  Choices::Labels decisions;  ///< of a fault: the fewest that were found to be enough
};

/// Runs one case in this process.
Result run_one(const SearchOptions& options, std::int64_t index);

/// The fewest of `decisions` with which `is_faulty` stays true, dropping one after another.
Choices::Labels shrink(Choices::Labels decisions,
                       const std::function<bool(const Choices::Labels& fixed)>& is_faulty);

/// Runs the cases first, first + 1, ... in this process and writes a line before and after each,
/// for the search that has started this process.
void run_as_worker(const SearchOptions& options);

/// Runs the cases in separate processes (this program, with --worker), so that a crash or a
/// rank that waits for ever is one case's outcome.
std::vector<Result> search(const SearchOptions& options);

/// What was found: counts, each kind of fault once, and the refusals by their texts.
std::string report(const SearchOptions& options, const std::vector<Result>& results, bool refusals);

}  // namespace tessera::fuzz
