#include "options.h"

#include <sched.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string_view>
#include <system_error>

#include "tessera/core/error.h"

namespace tessera::run {
namespace {

// A slip of the keyboard should not start a million processes.
constexpr int kMostRanks = 4096;

// CLI11's own usage line knows neither "--" nor the program behind it.
class Help : public CLI::Formatter {
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: tessera-run --nproc N [--nnodes M --node-rank R --rdzv HOST:PORT] -- PROGRAM "
           "ARGS...\n       tessera-run --explain DIR\n";
  }
};

// GPUs that this process may use.
int count_gpus() {
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible != nullptr) {
    const std::string_view list(visible);
    return list.empty() || list.starts_with('-')
               ? 0
               : 1 + static_cast<int>(std::ranges::count(list, ','));
  }
  int gpus = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", error)) {
    const std::string name = entry.path().filename().string();
    gpus += name.starts_with("nvidia") && name.size() > 6 &&
                    name.find_first_not_of("0123456789", 6) == std::string::npos
                ? 1
                : 0;
  }
  return gpus;
}

int ranks_by_devices() {
  cpu_set_t cores;
  const bool known = sched_getaffinity(0, sizeof cores, &cores) == 0;
  const int gpus = count_gpus();
  return gpus > 0 ? gpus : std::max(known ? CPU_COUNT(&cores) : 1, 1);
}

// HOST:PORT, where an IPv6 address stands in brackets.
void set_rendezvous(Options& options, std::string_view address) {
  const auto colon = address.rfind(':');
  TESSERA_CHECK(colon != std::string_view::npos && colon > 0, "--rdzv ", address,
                " names no port: write HOST:PORT");
  const auto digits = address.substr(colon + 1);
  const auto* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, options.port);
  TESSERA_CHECK(error == std::errc() && stop == end && options.port > 0 && options.port < 65536,
                "--rdzv ", address, " has no port from 1 to 65535 after the colon");
  auto host = address.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  options.host = host;
}

// `seconds` as the ranks will read it.
void check_seconds(const char* option, const std::string& seconds, bool may_be_zero) {
  double value = 0;
  const char* end = seconds.data() + seconds.size();
  const auto [stop, error] = std::from_chars(seconds.data(), end, value);
  const bool right =
      error == std::errc() && stop == end && (value > 0 || (may_be_zero && value == 0));
  TESSERA_CHECK(seconds.empty() || right, option, " ", seconds, " is no number of seconds ",
                may_be_zero ? "from 0 on" : "above 0");
}

// What the ranks have in common is one launcher: those of several nodes would have to agree.
void check_restarts(const Options& options) {
  TESSERA_CHECK(options.restarts >= 0, "--restarts ", options.restarts,
                " is out of range: at least 0");
  TESSERA_CHECK(options.restarts == 0 || options.nnodes == 1, "--restarts ", options.restarts,
                " is for the ranks of one node: with --nnodes ", options.nnodes,
                " leave it to the batch system");
}

// What one option says about another; CLI11 checks each alone.
void check(const Options& options, bool rendezvous_given) {
  TESSERA_CHECK(options.nproc != 0, "--nproc is missing: give the number of ranks on this node");
  TESSERA_CHECK(options.nproc >= 1 && options.nproc <= kMostRanks, "--nproc ", options.nproc,
                " is out of range: give the number of ranks on this node, 1 to ", kMostRanks);
  check_seconds("--timeout", options.timeout, /*may_be_zero=*/false);
  check_seconds("--watchdog", options.watchdog, /*may_be_zero=*/true);
  TESSERA_CHECK(options.nnodes >= 1, "--nnodes ", options.nnodes, " is out of range: at least 1");
  TESSERA_CHECK(options.node_rank >= 0 && options.node_rank < options.nnodes, "--node-rank ",
                options.node_rank, " is out of range: 0 to ", options.nnodes - 1, " with --nnodes ",
                options.nnodes);
  constexpr double kLongestGrace = 1e6;
  TESSERA_CHECK(options.grace.count() >= 0 && options.grace.count() <= kLongestGrace, "--grace ",
                options.grace.count(), " is no number of seconds from 0 to ", kLongestGrace);
  check_restarts(options);
  TESSERA_CHECK(options.nnodes == 1 || rendezvous_given, "--nnodes ", options.nnodes,
                " needs --rdzv HOST:PORT, a port of node 0 that every node can reach");
}

}  // namespace

std::optional<Options> parse_options(int argc, const char* const* argv) {
  const auto* const* last = argv + argc;
  // What stands behind the first "--" is the program's: CLI11 does not see it, so that a program
  // may have options of the same names. Without a "--" the separator is the end.
  const auto* const* separator =
      std::find_if(argv, last, [](std::string_view word) { return word == "--"; });

  Options options;
  std::string rendezvous;
  double grace = options.grace.count();
  CLI::App app("Runs PROGRAM as the ranks of one job and ends them all when one fails.",
               "tessera-run");
  app.formatter(std::make_shared<Help>());
  app.add_option("--nproc", options.nproc,
                 "Ranks to start on this node; auto: one a GPU, or without GPUs one a core")
      ->transform([](const std::string& text) {
        return text == "auto" ? std::to_string(ranks_by_devices()) : text;
      });
  app.add_option("--nnodes", options.nnodes, "Nodes of the job");
  app.add_option("--node-rank", options.node_rank, "Which of the nodes this one is, from 0");
  app.add_option("--rdzv", rendezvous, "Where the ranks meet: a free port of node 0");
  app.add_option("--timeout", options.timeout,
                 "Seconds until a rank gives up on a peer (TESSERA_TIMEOUT, or 600)");
  app.add_option("--watchdog", options.watchdog,
                 "Seconds until a wait is reported; 0: never (TESSERA_WATCHDOG, or 30)");
  app.add_option("--grace", grace,
                 "Seconds that the ranks have to end after SIGTERM or Ctrl-C (5); then they are "
                 "killed");
  app.add_option("--restarts", options.restarts,
                 "How often the job is started again after a rank has failed (0)");
  app.add_option("--run-dir", options.run_dir,
                 "Where the ranks write down what they do (TESSERA_RUN_DIR, or a temporary folder, "
                 "kept if the job fails)");
  app.add_option("--explain", options.explain,
                 "Read such a folder: which rank left the common order, and what each did last");
  try {
    app.parse(static_cast<int>(separator - argv), argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    fail(error.what(), " (tessera-run --help lists the options)");
  }
  if (!options.explain.empty()) {
    return options;
  }
  TESSERA_CHECK(last - separator >= 2, "no program was given: tessera-run --nproc ", options.nproc,
                " -- PROGRAM ARGS...");
  options.program.assign(separator + 1, last);
  if (const char* folder = std::getenv("TESSERA_RUN_DIR");
      folder != nullptr && options.run_dir.empty()) {
    options.run_dir = folder;
  }
  options.grace = std::chrono::duration<double>(grace);
  if (!rendezvous.empty()) {
    set_rendezvous(options, rendezvous);
  }
  check(options, !rendezvous.empty());
  return options;
}

}  // namespace tessera::run
