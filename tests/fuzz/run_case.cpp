#include "fuzz/run_case.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <exception>
#include <vector>

#include "fuzz/training.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "testing/ranks.h"

namespace tessera::fuzz {
namespace {

using std::chrono::steady_clock;

constexpr std::array kVerdicts{"equal",     "refused", "not comparable", "refused late",
                               "different", "hung",    "crashed",        "no oracle"};

/// How a rank ended.
struct Ended {
  bool well = true;
  bool by_peer = false;  ///< only because another rank failed
  std::string error;
};

Ended run_rank(const Case& c, const testing::Rank& rank, Trace& trace) {
  try {
    train_distributed(c, rank, trace);
    return {};
  } catch (const comm::PeerError& error) {
    return {false, true, error.what()};
  } catch (const Error& error) {
    return {false, false, error.what()};
  } catch (const std::exception& error) {
    // libtorch's own message: the first line says what, the rest is a stack.
    const std::string text = error.what();
    return {false, false, "(libtorch) " + text.substr(0, text.find('\n'))};
  }
}

struct Runs {
  std::vector<Trace> traces;
  std::vector<Ended> ends;
  bool timed_out = false;
};

Runs run_ranks(const Case& c, std::chrono::seconds timeout) {
  const auto size = static_cast<std::size_t>(c.mesh.ranks());
  Runs runs{std::vector<Trace>(size), std::vector<Ended>(size)};
  const auto start = steady_clock::now();
  // As by default, ranks that wait for each other are found before the time-out.
  const testing::RanksOptions options{.world = {.timeout = timeout, .watchdog = timeout / 2},
                                      .deadline = 3 * timeout};
  testing::ErrorsOfRanks(
      c.mesh.ranks(),
      [&](testing::Rank& rank) {
        const auto r = static_cast<std::size_t>(rank.rank());
        runs.ends[r] = run_rank(c, rank, runs.traces[r]);
        if (!runs.ends[r].well) {
          rank.world()->abort();
        }
      },
      options);
  runs.timed_out = steady_clock::now() - start >= timeout;
  return runs;
}

/// The rank whose error the others follow.
std::size_t first_to_fail(const std::vector<Ended>& ends) {
  const auto own = std::ranges::find_if(ends, [](const Ended& e) { return !e.well && !e.by_peer; });
  const auto any = std::ranges::find_if(ends, [](const Ended& e) { return !e.well; });
  return static_cast<std::size_t>((own != ends.end() ? own : any) - ends.begin());
}

Outcome refusal(const Runs& runs) {
  const std::size_t rank = first_to_fail(runs.ends);
  const std::string text = fmt::format("rank {}: {}", rank, runs.ends[rank].error);
  if (runs.timed_out) {
    return {Verdict::kHung, text};
  }
  const bool late = std::ranges::any_of(runs.traces, [](const Trace& t) { return t.steps > 0; });
  return {late ? Verdict::kRefusedLate : Verdict::kRefused, text};
}

/// Compares with one rank's, and keeps what is worth saying.
class Comparison {
 public:
  Comparison(const Case& c, const Trace& oracle)
      // Clipping multiplies by a norm, which is in fp32.
      : oracle_(oracle), tolerance_(c.train.clip ? 1e-5 : 1e-9) {
    for (const double norm : oracle.grad_norms) {
      largest_gradient_ = std::max(largest_gradient_, norm);
    }
  }

  Outcome outcome(const std::vector<Trace>& traces) {
    compare_losses(traces);
    for (std::size_t rank = 0; rank < traces.size(); ++rank) {
      compare_norms(rank, traces[rank]);
      compare_parameters(rank, traces[rank]);
    }
    return text_.empty() ? Outcome{} : Outcome{Verdict::kDifferent, text_};
  }

  /// The largest difference, in multiples of what is allowed.
  double worst() const { return worst_; }

 private:
  /// Whether a difference is not allowed; NaN is not.
  bool exceeds(double difference, double allowed) {
    const double multiple = difference / allowed;
    worst_ = std::isnan(multiple) ? HUGE_VAL : std::max(worst_, multiple);
    return !(multiple <= 1);
  }

  bool differ(double a, double b, double tolerance) {
    return a != b && exceeds(std::abs(a - b), tolerance * std::max(1.0, std::abs(b)));
  }

  template <class... Parts>
  void note(fmt::format_string<Parts...> format, Parts&&... parts) {
    if (++differences_ <= 4) {
      text_ += (text_.empty() ? "" : "; ") + fmt::format(format, std::forward<Parts>(parts)...);
    }
  }

  /// The ranks of a tensor-parallel group have the same part of the batch, and the same loss of it.
  void compare_losses(const std::vector<Trace>& traces) {
    for (std::size_t i = 0; i < oracle_.losses.size(); ++i) {
      double sum = 0;
      for (const Trace& trace : traces) {
        sum += trace.losses[i];
      }
      const double mean = sum / static_cast<double>(traces.size());
      if (differ(mean, oracle_.losses[i], tolerance_)) {
        note("loss {} is {:.12g}, not {:.12g}", i, mean, oracle_.losses[i]);
      }
    }
  }

  void compare_norms(std::size_t rank, const Trace& trace) {
    for (std::size_t i = 0; i < oracle_.grad_norms.size(); ++i) {
      if (differ(trace.grad_norms[i], oracle_.grad_norms[i], 1e-5)) {
        note("gradient norm {} of rank {} is {:.8g}, not {:.8g}", i, rank, trace.grad_norms[i],
             oracle_.grad_norms[i]);
      }
    }
  }

  void compare_parameters(std::size_t rank, const Trace& trace) {
    for (const auto& [name, expected] : oracle_.parameters) {
      const at::Tensor& found = trace.parameters.at(name);
      const double difference = (found - expected).abs().max().item<double>();
      const double largest = expected.abs().max().item<double>();
      // A gradient that is zero but for rounding is as wrong as the largest one is rounded.
      if (exceeds(difference, tolerance_ * std::max({1.0, largest, largest_gradient_}))) {
        note("{} of rank {} differs by {:.3g} of {:.3g}, with gradients of {:.3g}", name, rank,
             difference, largest, largest_gradient_);
      }
    }
  }

  const Trace& oracle_;
  double tolerance_;
  double largest_gradient_ = 0;
  double worst_ = 0;
  int differences_ = 0;
  std::string text_;
};

}  // namespace

std::string to_string(Verdict verdict) {
  return kVerdicts[static_cast<std::size_t>(verdict)];
}

Verdict verdict_of(const std::string& text) {
  const auto found = std::ranges::find(kVerdicts, text);
  TESSERA_CHECK(found != kVerdicts.end(), "'", text, "' is no verdict");
  return static_cast<Verdict>(found - kVerdicts.begin());
}

namespace {

/// The process's own generator, from which plain random operators draw.
void seed_libtorch(std::uint64_t seed) {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.set_current_seed(seed);
}

/// Whether training gets out of hand, so that rounding decides what becomes of it.
bool explodes(const Trace& oracle) {
  constexpr double kMost = 1e6;  // with rounding to 1e-16, 1e-10 of a parameter
  return !std::ranges::all_of(oracle.losses, [](double x) { return std::isfinite(x); }) ||
         !std::ranges::all_of(oracle.grad_norms, [](double x) { return x < kMost; });
}

/// How different one rank is from itself, as worst() says, once last bits of its weights are
/// others: the most of a few runs.
double worst_of_rounding(const Case& c, const Trace& oracle) {
  constexpr std::uint64_t kRuns = 16;
  double worst = 0;
  for (std::uint64_t flips = 1; flips <= kRuns; ++flips) {
    Trace flipped;
    seed_libtorch(c.seed);
    testing::RunRanks(1, [&](testing::Rank&) { train_alone(c, flipped, flips); });
    Comparison comparison(c, oracle);
    comparison.outcome({flipped});
    worst = std::max(worst, comparison.worst());
  }
  return worst;
}

/// The bounds of a comparison hold where rounding does not grow. Where it does, it goes further on
/// some processors: a mesh that is little worse than one rank with itself says nothing.
Outcome compared(const Case& c, const Trace& oracle, const std::vector<Trace>& traces) {
  Comparison comparison(c, oracle);
  Outcome outcome = comparison.outcome(traces);
  if (outcome.verdict != Verdict::kDifferent) {
    return outcome;
  }
  const double rounding = worst_of_rounding(c, oracle);
  outcome.what +=
      fmt::format("; {:.3g} times what is allowed, one rank with other last bits {:.3g}",
                  comparison.worst(), rounding);
  constexpr double kLittle = 2;
  if (comparison.worst() <= kLittle * rounding) {
    outcome.verdict = Verdict::kNotComparable;
  }
  return outcome;
}

}  // namespace

Outcome run_case(const Case& c, std::chrono::seconds timeout) {
  Trace oracle;
  seed_libtorch(c.seed);
  try {
    testing::RunRanks(1, [&](testing::Rank&) { train_alone(c, oracle); });
  } catch (const Error& error) {
    return {Verdict::kRefused, error.what()};  // on one rank too
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return {Verdict::kNoOracle, text.substr(0, text.find('\n'))};
  }
  if (explodes(oracle)) {
    return {Verdict::kNotComparable, ""};
  }
  seed_libtorch(c.seed);
  const Runs runs = run_ranks(c, timeout);
  const bool well = std::ranges::all_of(runs.ends, [](const Ended& e) { return e.well; });
  return well ? compared(c, oracle, runs.traces) : refusal(runs);
}

}  // namespace tessera::fuzz
