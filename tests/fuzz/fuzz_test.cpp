// A search for silent differences: random models under random plans, meshes and options, beside one
// rank. Without arguments a GoogleTest program with a short search of fixed cases; with them a
// longer one:
//   fuzz_test --seed 7 --cases 5000            search
//   fuzz_test --seed 7 --only 123              one case, shrunk if it is faulty
//   fuzz_test --seed 7 --only 123 --set mesh=1x1x2,heads=4
//   fuzz_test --cases 500 --refusals           also what was refused, by its texts

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "fuzz/run.h"
#include "testing/errors.h"

namespace tessera::fuzz {
namespace {

struct Arguments {
  SearchOptions search;
  std::int64_t only = -1;
  std::string set;
  bool worker = false, refusals = false, no_shrink = false;
};

int run_program(Arguments arguments) {
  SearchOptions& options = arguments.search;
  options.shrink = !arguments.no_shrink;
  std::istringstream in(arguments.set);
  for (std::string part; std::getline(in, part, ',');) {
    const std::size_t equals = part.find('=');
    options.fixed[part.substr(0, equals)] =
        equals == std::string::npos ? "" : part.substr(equals + 1);
  }
  if (arguments.only >= 0) {
    options.first = arguments.only;
    options.cases = 1;
  }
  if (arguments.worker) {
    run_as_worker(options);
    return 0;
  }
  const std::vector<Result> results = search(options);
  std::cout << report(options, results, arguments.refusals) << std::flush;
  const auto faulty = [](const Result& r) { return is_fault(r.outcome.verdict); };
  return std::ranges::any_of(results, faulty) ? 1 : 0;
}

std::vector<Result> search_planted(const std::string& fault) {
  SearchOptions options{.cases = 1, .processes = 1, .timeout = 2};
  options.shrink = fault == "wrong_gradient";
  options.fixed = {{"planted", fault},    {"mesh", "1x1x2"}, {"plan.none", "yes"}, {"frozen", ""},
                   {"final_norm", "rms"}, {"init", ""},      {"fsdp", "none"},     {"tied", ""}};
  return search(options);
}

TEST(Fuzz, FindsNoSilentDifference) {
  // The same cases on every machine, as many as the time allows.
  const SearchOptions options{.seed = 1, .cases = 600, .seconds = 25};
  const std::vector<Result> results = search(options);
  const auto count = [&](Verdict verdict) {
    return std::ranges::count(results, verdict, [](const Result& r) { return r.outcome.verdict; });
  };
  const auto faulty = [](const Result& r) { return is_fault(r.outcome.verdict); };
  EXPECT_TRUE(std::ranges::none_of(results, faulty)) << report(options, results, false);
  // A search finds nothing if most of its cases are refused.
  EXPECT_GT(4 * count(Verdict::kEqual), 3 * std::ssize(results)) << report(options, results, true);
}

TEST(Fuzz, DrawsTheSameCaseAgain) {
  const Result a = run_one({.seed = 3, .shrink = false}, 5),
               b = run_one({.seed = 3, .shrink = false}, 5);
  EXPECT_EQ(to_string(a.decisions), to_string(b.decisions));
  EXPECT_EQ(a.outcome.verdict, b.outcome.verdict);
}

TEST(Fuzz, ShrinksToTheDecisionsThatAFaultNeeds) {
  const Choices::Labels all{{"a", "1"}, {"b", "1"}, {"c", "1"}, {"d", "1"}};
  const auto needs_b_and_d = [](const Choices::Labels& fixed) {
    return fixed.contains("b") && fixed.contains("d") && fixed.contains(Choices::kOthers);
  };
  EXPECT_EQ(to_string(shrink(all, needs_b_and_d)), "b=1, d=1");
}

TEST(Fuzz, FindsAGradientThatIsSlightlyWrong) {
  const std::vector<Result> results = search_planted("wrong_gradient");
  ASSERT_EQ(results.size(), 1);
  EXPECT_EQ(results[0].outcome.verdict, Verdict::kDifferent);
  EXPECT_CONTAINS(results[0].outcome.what, "loss 1 is", "of rank 0 differs by");
  EXPECT_EQ(to_string(results[0].decisions), "final_norm=rms, planted=wrong_gradient");
}

// With stock AdamW, whose eps turns rounding into steps here, flipped last bits alone change
// weights by more than the tolerance.
TEST(Fuzz, TellsRoundingThatGrowsFromAWrongGradient) {
  SearchOptions options{.seed = 52, .shrink = false};
  constexpr std::int64_t kIllConditioned = 4153;
  const Result right = run_one(options, kIllConditioned);
  EXPECT_FALSE(is_fault(right.outcome.verdict)) << right.outcome.what;
  options.fixed = {{"planted", "wrong_gradient"}};
  const Result wrong = run_one(options, kIllConditioned);
  EXPECT_EQ(wrong.outcome.verdict, Verdict::kDifferent);
  EXPECT_CONTAINS(wrong.outcome.what, "one rank with other last bits");
}

TEST(Fuzz, OutlivesErrorsAfterTheFirstStepCrashesAndHangs) {
  for (const auto& [fault, verdict] : {std::pair{"late_error", Verdict::kRefusedLate},
                                       {"crash", Verdict::kCrashed},
                                       {"hang", Verdict::kHung}}) {
    SCOPED_TRACE(fault);
    const std::vector<Result> results = search_planted(fault);
    ASSERT_EQ(results.size(), 1);
    EXPECT_EQ(results[0].outcome.verdict, verdict);
    if (verdict == Verdict::kRefusedLate) {
      EXPECT_CONTAINS(results[0].outcome.what, "a planted error");
    }
  }
}

}  // namespace
}  // namespace tessera::fuzz

int main(int argc, char** argv) {
  using namespace tessera::fuzz;
  at::set_num_threads(1);
  register_operator_rules();
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
  app.add_flag("--refusals", arguments.refusals, "List what was refused, too");
  app.add_flag("--no-shrink", arguments.no_shrink);
  app.add_flag("--worker", arguments.worker, "For the search itself");
  CLI11_PARSE(app, argc, argv);
  return run_program(std::move(arguments));
}
