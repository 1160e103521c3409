// Compares training on one rank with training on a mesh: random models, meshes, tensor-parallel
// plans and options. Without arguments, runs a short search as a GoogleTest. Usage:
//   fuzz_test --seed 7 --cases 5000            runs many cases
//   fuzz_test --seed 7 --only 123              runs one case
//   fuzz_test --seed 7 --only 123 --set mesh=1x1x2,heads=4

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fuzz/case.h"
#include "tessera/core/error.h"
#include "testing/errors.h"

namespace tessera::fuzz {
namespace {

/// A search over cases. A case depends only on the seed and the case's index.
struct SearchOptions {
  std::uint64_t seed = 1;
  std::int64_t first = 0;
  std::int64_t cases = 100;
  int processes = 2;
  double seconds = 0;       ///< `seconds`: after this time, no chunk of cases begins; 0: no limit
  Choices::Labels fixed{};  ///< `fixed`: decisions with a fixed option
  /// Seconds until a collective counts as a hang. A whole case takes less than one second.
  int timeout = 20;
};

struct Result {
  std::int64_t index = 0;
  Outcome outcome;
  Choices::Labels decisions;
};

using std::chrono::steady_clock;

// The number of cases that a process runs. Starting a process takes as long as ten cases, because
// libtorch is loaded.
constexpr std::int64_t kChunk = 25;

std::uint64_t seed_of(const SearchOptions& options, std::int64_t index) {
  return options.seed * 1'000'003 + static_cast<std::uint64_t>(index);
}

std::string one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  std::ranges::replace(text, '\t', ' ');
  return text;
}

struct Drawn {
  Case what;
  Choices::Labels made;
};

Drawn draw(const SearchOptions& options, std::int64_t index) {
  const std::uint64_t seed = seed_of(options, index);
  Choices choices(seed, options.fixed);
  Drawn drawn{draw_case(seed, choices), {}};
  drawn.made = choices.made();
  return drawn;
}

/// A child process that runs this program with --worker. line() returns its next output line.
class Worker {
 public:
  Worker(const SearchOptions& options, std::int64_t first, std::int64_t cases) {
    // The command runs in a shell, where /proc/self/exe would be the shell.
    const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
    const std::string command = fmt::format(
        "exec '{}' --worker --seed {} --first {} --cases {} --timeout {} --set '{}' 2>&1", program,
        options.seed, first, cases, options.timeout, to_string(options.fixed, ","));
    pipe_ = popen(command.c_str(), "r");
    TESSERA_CHECK(pipe_ != nullptr, "cannot start ", program);
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker() { pclose(pipe_); }

  std::optional<std::string> line() {
    std::string text;
    for (int c = std::fgetc(pipe_); c != EOF; c = std::fgetc(pipe_)) {
      if (c == '\n') {
        return text;
      }
      text.push_back(static_cast<char>(c));
    }
    return std::nullopt;
  }

 private:
  std::FILE* pipe_;
};

/// Parses names and labels, "a=b,c=d". A name without a label gets "", the simplest option.
Choices::Labels labels_of(const std::string& text) {
  Choices::Labels labels;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    const std::size_t equals = part.find('=');
    labels[part.substr(0, equals)] = equals == std::string::npos ? "" : part.substr(equals + 1);
  }
  return labels;
}

/// Parses the lines that run_as_worker() prints: "@begin INDEX" and "@end
/// INDEX<tab>VERDICT<tab>DECISIONS<tab>TEXT". Other lines come from libtorch or from an abort.
class WorkerLines {
 public:
  explicit WorkerLines(std::vector<Result>& results) : results_(results) {}

  /// Reads a line. Returns true after an "@end" line, which appends a result to `results`.
  bool take(const std::string& line) {
    if (line.starts_with("@begin ")) {
      running_ = std::stoll(line.substr(7));
      rest_.clear();
    } else if (line.starts_with("@end ")) {
      std::istringstream in(line.substr(5));
      std::string index, verdict, decisions, text;
      std::getline(in, index, '\t');
      std::getline(in, verdict, '\t');
      std::getline(in, decisions, '\t');
      std::getline(in, text);
      results_.push_back({std::stoll(index), {verdict_of(verdict), text}, labels_of(decisions)});
      running_.reset();
      return true;
    } else {
      rest_ = line;
      hung_ = hung_ || line.starts_with("RunRanks: ");
    }
    return false;
  }

  /// The case that crashed or hung; nullopt if the worker finished all its cases.
  std::optional<Result> cut_off() const {
    if (!running_) {
      return std::nullopt;
    }
    return Result{*running_, {hung_ ? Verdict::kHung : Verdict::kCrashed, rest_}, {}};
  }

 private:
  std::vector<Result>& results_;
  std::optional<std::int64_t> running_;
  std::string rest_;  ///< last line that is neither @begin nor @end
  bool hung_ = false;
};

/// Describes a case's result in one line, which begins with the arguments that repeat the case.
std::string line_of(const SearchOptions& options, const Result& result) {
  return fmt::format("--seed {} --only {}: {}: {} [{}]\n", options.seed, result.index,
                     to_string(result.outcome.verdict), result.outcome.what,
                     to_string(result.decisions));
}

void announce(const SearchOptions& options, const Result& result) {
  if (is_fault(result.outcome.verdict)) {
    std::cerr << line_of(options, result);
  }
}

/// Runs cases [first, end) in child processes: a new one starts after each crash or hang.
std::vector<Result> run_chunk(const SearchOptions& options, std::int64_t first, std::int64_t end) {
  std::vector<Result> results;
  while (first < end) {
    WorkerLines lines(results);
    {
      Worker worker(options, first, end - first);
      while (const auto line = worker.line()) {
        if (lines.take(*line)) {
          announce(options, results.back());
        }
      }
    }
    auto cut_off = lines.cut_off();
    if (!cut_off) {
      break;
    }
    cut_off->decisions = draw(options, cut_off->index).made;
    first = cut_off->index + 1;
    results.push_back(std::move(*cut_off));
    announce(options, results.back());
  }
  return results;
}

Result run_one(const SearchOptions& options, std::int64_t index) {
  const Drawn drawn = draw(options, index);
  return {index, run_case(drawn.what, std::chrono::seconds(options.timeout)), drawn.made};
}

/// Runs options.cases cases, beginning with options.first. Prints a line before and after each case
/// for WorkerLines to parse.
void run_as_worker(const SearchOptions& options) {
  for (std::int64_t i = options.first; i < options.first + options.cases; ++i) {
    std::cout << "@begin " << i << std::endl;
    const Result result = run_one(options, i);
    std::cout << "@end " << i << '\t' << to_string(result.outcome.verdict) << '\t'
              << to_string(result.decisions, ",") << '\t' << one_line(result.outcome.what)
              << std::endl;
  }
}

/// Runs the cases in separate processes (this program with --worker), so that a crash or a hang
/// affects only one case.
std::vector<Result> search(const SearchOptions& options) {
  const auto start = steady_clock::now();
  const std::int64_t end = options.first + options.cases;
  std::atomic<std::int64_t> next = options.first;
  std::mutex mutex;
  std::vector<Result> results;
  const auto take_chunks = [&] {
    for (std::int64_t first = next.fetch_add(kChunk); first < end; first = next.fetch_add(kChunk)) {
      const std::chrono::duration<double> elapsed = steady_clock::now() - start;
      if (options.seconds > 0 && elapsed.count() > options.seconds) {
        return;
      }
      std::vector<Result> some = run_chunk(options, first, std::min(first + kChunk, end));
      const std::lock_guard lock(mutex);
      std::ranges::move(some, std::back_inserter(results));
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < options.processes; ++i) {
    threads.emplace_back(take_chunks);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::ranges::sort(results, {}, &Result::index);
  return results;
}

std::string report(const SearchOptions& options, const std::vector<Result>& results) {
  std::map<std::string, int> counts;
  std::string faults;
  for (const Result& result : results) {
    ++counts[to_string(result.outcome.verdict)];
    faults += is_fault(result.outcome.verdict) ? line_of(options, result) : "";
  }
  std::string text = fmt::format("{} cases:", results.size());
  for (const auto& [verdict, count] : counts) {
    text += fmt::format(" {} {}", count, verdict);
  }
  return text + "\n" + faults;
}

struct Arguments {
  SearchOptions search;
  std::int64_t only = -1;
  std::string set;
  bool worker = false;
};

int run_program(Arguments arguments) {
  SearchOptions& options = arguments.search;
  options.fixed = labels_of(arguments.set);
  if (arguments.only >= 0) {
    options.first = arguments.only;
    options.cases = 1;
  }
  if (arguments.worker) {
    run_as_worker(options);
    return 0;
  }
  const std::vector<Result> results = search(options);
  std::cout << report(options, results) << std::flush;
  const auto faulty = [](const Result& r) { return is_fault(r.outcome.verdict); };
  return std::ranges::any_of(results, faulty) ? 1 : 0;
}

TEST(Fuzz, FindsNoSilentDifference) {
  // The cases are the same on all machines. A slow machine runs fewer cases within the time limit.
  const SearchOptions options{.seed = 1, .cases = 600, .seconds = 25};
  const std::vector<Result> results = search(options);
  const auto count = [&](Verdict verdict) {
    return std::ranges::count(results, verdict, [](const Result& r) { return r.outcome.verdict; });
  };
  const auto faulty = [](const Result& r) { return is_fault(r.outcome.verdict); };
  EXPECT_TRUE(std::ranges::none_of(results, faulty)) << report(options, results);
  // At least three quarters of the cases must be comparable. The other cases test too little.
  EXPECT_GT(4 * count(Verdict::kEqual), 3 * std::ssize(results)) << report(options, results);
}

TEST(Fuzz, DrawsReproducibleCases) {
  const Result a = run_one({.seed = 3}, 5), b = run_one({.seed = 3}, 5);
  EXPECT_EQ(to_string(a.decisions), to_string(b.decisions));
  EXPECT_EQ(a.outcome.verdict, b.outcome.verdict);
}

TEST(Fuzz, FindsASlightlyWrongGradient) {
  const SearchOptions options{
      .fixed = {{"planted", "wrong_gradient"}, {"final_norm", "rms"}, {Choices::kOthers, ""}}};
  const Result result = run_one(options, 0);
  EXPECT_EQ(result.outcome.verdict, Verdict::kDifferent);
  EXPECT_CONTAINS(result.outcome.what, "loss 1 is", "of rank 0 differs by");
}

// torch::optim::AdamW amplifies rounding errors in this case. On one rank, flipped last bits of the
// initial weights change the results by more than the tolerance.
TEST(Fuzz, DistinguishesAmplifiedRoundingFromAWrongGradient) {
  SearchOptions options{.seed = 52};
  constexpr std::int64_t kIllConditioned = 4153;
  const Result right = run_one(options, kIllConditioned);
  EXPECT_FALSE(is_fault(right.outcome.verdict)) << right.outcome.what;
  options.fixed = {{"planted", "wrong_gradient"}};
  const Result wrong = run_one(options, kIllConditioned);
  EXPECT_EQ(wrong.outcome.verdict, Verdict::kDifferent);
  EXPECT_CONTAINS(wrong.outcome.what, "one rank with other last bits");
}

}  // namespace
}  // namespace tessera::fuzz

int main(int argc, char** argv) {
  using namespace tessera::fuzz;
  at::set_num_threads(1);
  if (argc == 1 || std::string(argv[1]).starts_with("--gtest")) {
    ::testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
  }
  Arguments arguments;
  CLI::App app("Searches for silent differences between meshes and one rank");
  app.add_option("--seed", arguments.search.seed);
  app.add_option("--first", arguments.search.first, "The first case");
  app.add_option("--cases", arguments.search.cases);
  app.add_option("--only", arguments.only, "This case alone");
  app.add_option("--processes", arguments.search.processes);
  app.add_option("--seconds", arguments.search.seconds, "No case begins later; 0: all run");
  app.add_option("--timeout", arguments.search.timeout, "The longest wait for peers, in seconds");
  app.add_option("--set", arguments.set,
                 "Decisions: NAME=LABEL,... ; without a label: the simplest; *: all others");
  app.add_flag("--worker", arguments.worker, "For the search itself");
  CLI11_PARSE(app, argc, argv);
  return run_program(std::move(arguments));
}
