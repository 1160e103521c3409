#pragma once

#include <chrono>
#include <string>

#include "fuzz/case.h"

namespace tessera::fuzz {

/// What became of a case. The first two are as it should be, the others are faults of the library;
/// kNoOracle is one of the generator: the model doesn't run on one rank.
enum class Verdict {
  kEqual,
  kRefused,
  kNotComparable,  ///< rounding decides: training gets out of hand, or one rank with flipped last
                   ///< bits is as different from itself
  kRefusedLate,
  kDifferent,
  kHung,
  kCrashed,
  kNoOracle
};

std::string to_string(Verdict verdict);
/// The opposite; throws Error for other texts.
Verdict verdict_of(const std::string& text);
inline bool is_fault(Verdict verdict) {
  return verdict > Verdict::kNotComparable;
}

struct Outcome {
  Verdict verdict = Verdict::kEqual;
  std::string what;  ///< one line: the error, or the first differences
};

/// Trains the case's model on its ranks, as threads, and on one rank in the same precision (fp64),
/// and compares the losses, the norms of the gradients and the parameters. A collective that takes
/// `timeout` is a hang; ranks that run for thrice that end the process.
Outcome run_case(const Case& c, std::chrono::seconds timeout);

}  // namespace tessera::fuzz
