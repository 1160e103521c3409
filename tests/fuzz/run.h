#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "fuzz/case.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/ranks.h"

namespace tessera::fuzz {

// x * sigmoid(x) as four operators that a user could have defined, each with a rule but the last.

at::Tensor call_operator(const std::string& name, const at::Tensor& x);

/// Gives the operators their sharding rules. Once in a process.
void register_operator_rules();

/// The style of an entry of a case's plan.
tensor_parallel::StylePtr make_style(const StyleSpec& spec);

DeviceMesh make_mesh(const MeshSpec& spec, const testing::Rank& rank);
/// The dimensions of make_mesh() that split the batch.
DeviceMesh data_mesh(const MeshSpec& spec, const DeviceMesh& mesh);

fsdp::Options fsdp_options(const FsdpSpec& spec);

/// What a rank has seen of a training run.
struct Trace {
  std::vector<double> losses;      ///< its part's: their mean over the parts is the loss
  std::vector<double> grad_norms;  ///< one a step
  std::map<std::string, at::Tensor> parameters;  ///< whole, after the last step
  int steps = 0;                                 ///< that have ended
};

/// Trains on this rank alone, on the whole batch. `flips`: of how weights begin, about half of the
/// last bits are flipped, others with each number; 0: none.
void train_alone(const Case& c, Trace& trace, std::uint64_t flips = 0);
/// Trains as one of the ranks of the case's mesh.
void train_distributed(const Case& c, const testing::Rank& rank, Trace& trace);

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
