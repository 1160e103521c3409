#include "options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <memory>

#include "command_line/devices.h"
#include "command_line/place.h"
#include "command_line/settings.h"
#include "command_line/torchrun_only.h"
#include "command_line/words.h"
#include "tessera/core/error.h"

namespace tessera::run {
namespace {

// A slip of the keyboard should not start a million processes.
constexpr int kMostRanks = 4096;

// CLI11's own usage line knows neither "--" nor the program behind it.
class Help : public CLI::Formatter {
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: tessera-run --nproc N [--nnodes M --node-rank R --rdzv HOST:PORT] [--] PROGRAM "
           "ARGS...\n       tessera-run --explain DIR\n";
  }
};

void declare_ranks(CLI::App& app) {
  app.add_option("--nproc,--nproc-per-node",
                 "Ranks to start on this node (1); auto: one a GPU, or without GPUs one a core; "
                 "gpu, cpu: one of each")
      ->option_text("N");
  declare_place(app);
  app.add_option("--restarts,--max-restarts",
                 "How often the job is started again after a rank has failed (0)")
      ->option_text("N");
}

void declare_times(CLI::App& app) {
  app.add_option("--timeout", "Seconds until a rank gives up on a peer (TESSERA_TIMEOUT, or 600)")
      ->option_text("S");
  app.add_option("--watchdog",
                 "Seconds until a wait is reported; 0: never (TESSERA_WATCHDOG, or 30)")
      ->option_text("S");
  app.add_option("--grace,--shutdown-timeout",
                 "Seconds that the ranks have to end after SIGTERM or Ctrl-C (5); then they are "
                 "killed")
      ->option_text("S");
}

void declare_outputs(CLI::App& app) {
  app.add_option("--run-dir",
                 "Where the ranks write down what they do (TESSERA_RUN_DIR, or a temporary folder, "
                 "kept if the job fails)")
      ->option_text("DIR");
  app.add_option("--explain",
                 "Read such a folder: which rank left the common order, and what each did last")
      ->option_text("DIR");
  app.add_option("--log-dir",
                 "Write what the ranks print to files in a new folder there, one each; alone it is "
                 "with --tee 3")
      ->option_text("DIR");
  app.add_option("--tee,-t",
                 "What goes to files too: 1 output, 2 errors, 3 both; or 0:3,2:1 for "
                 "local ranks 0 and 2")
      ->option_text("WHAT");
  app.add_option("--redirects,-r", "What goes to files alone, in the same words")
      ->option_text("WHAT");
  app.add_option("--local-ranks-filter", "Show the outputs of these local ranks alone")
      ->option_text("0,2");
}

// Ranks are programs, started as they are, and their ends are noticed at once: that is what these
// ask torchrun for.
void declare_fulfilled(CLI::App& app) {
  app.add_flag("--no-python")->group("");
  app.add_option("--monitor-interval")->group("");
  app.add_option("--start-method")->group("");
}

int read_nproc(const CLI::App& app) {
  const auto setting = find_setting(app, "--nproc", "PET_NPROC_PER_NODE");
  if (!setting) {
    return 1;
  }
  if (setting->value == "cpu") {
    return usable_cores();
  }
  if (setting->value == "gpu" || setting->value == "auto") {
    const int gpus = count_gpus();
    TESSERA_CHECK(gpus > 0 || setting->value == "auto", setting->text,
                  ", but this node has no GPU: give a number, or cpu");
    return gpus > 0 ? gpus : usable_cores();
  }
  return integer_of(*setting, 1, kMostRanks);
}

// All ranks have one launcher: the launchers of several nodes would have to agree.
int read_restarts(const CLI::App& app, int nnodes) {
  const auto setting = find_setting(app, "--restarts", "PET_MAX_RESTARTS");
  const int restarts = setting ? integer_of(*setting, 0, std::numeric_limits<int>::max()) : 0;
  TESSERA_CHECK(restarts == 0 || nnodes == 1, setting->text,
                " is for the ranks of one node: with --nnodes ", nnodes,
                " leave it to the batch system");
  return restarts;
}

// As text, as the ranks will read it.
std::string read_seconds(const CLI::App& app, const char* option, bool may_be_zero) {
  const auto setting = find_setting(app, option);
  if (setting) {
    seconds_of(*setting, may_be_zero);
  }
  return setting ? setting->value : "";
}

std::chrono::duration<double> read_grace(const CLI::App& app) {
  const auto setting = find_setting(app, "--grace", "PET_SHUTDOWN_TIMEOUT");
  if (!setting) {
    return Options().grace;
  }
  constexpr double kLongest = 1e6;
  const double seconds = seconds_of(*setting, /*may_be_zero=*/true);
  TESSERA_CHECK(seconds <= kLongest, setting->text, " is more than ", kLongest, " seconds");
  return std::chrono::duration<double>(seconds);
}

LogOptions read_logs(const CLI::App& app) {
  LogOptions logs;
  const auto folder = find_setting(app, "--log-dir", "PET_LOG_DIR");
  const auto redirects = find_setting(app, "--redirects", "PET_REDIRECTS");
  const auto tee = find_setting(app, "--tee", "PET_TEE");
  logs.folder = folder ? folder->value : "";
  logs.redirects = redirects ? Streams(*redirects) : Streams();
  logs.tee = tee ? Streams(*tee) : Streams();
  if (folder && !redirects && !tee) {
    logs.tee = Streams::all();
  }
  if (const auto shown = find_setting(app, "--local-ranks-filter", "PET_LOCAL_RANKS_FILTER")) {
    logs.shown = local_ranks(*shown);
  }
  return logs;
}

std::string value_of(const CLI::App& app, const char* option, const char* variable) {
  const auto setting = find_setting(app, option, variable);
  return setting ? setting->value : "";
}

Options read_options(const CLI::App& app) {
  refuse_torchrun_only(app);
  Options options;
  options.nproc = read_nproc(app);
  const Place place = read_place(app);
  options.nnodes = place.nnodes;
  options.node_rank = place.node_rank.value_or(0);
  options.is_numbered = place.node_rank.has_value();
  options.host = place.host;
  options.port = place.port;
  options.job_id = value_of(app, "--rdzv-id", "PET_RDZV_ID");
  options.timeout = read_seconds(app, "--timeout", /*may_be_zero=*/false);
  options.watchdog = read_seconds(app, "--watchdog", /*may_be_zero=*/true);
  options.run_dir = value_of(app, "--run-dir", "TESSERA_RUN_DIR");
  options.logs = read_logs(app);
  options.grace = read_grace(app);
  options.restarts = read_restarts(app, place.nnodes);
  return options;
}

// False where --help was asked for and printed.
bool parse(CLI::App& app, std::vector<std::string> words) {
  try {
    std::ranges::reverse(words);  // as CLI11 takes them
    app.parse(words);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return false;
  } catch (const CLI::ParseError& error) {
    fail(error.what(), " (tessera-run --help lists the options)");
  }
  return true;
}

}  // namespace

std::optional<Options> parse_options(int argc, const char* const* argv) {
  CLI::App app(
      "Runs PROGRAM as the ranks of one job and ends them all when one fails. Takes "
      "torchrun's options and variables too.",
      "tessera-run");
  app.formatter(std::make_shared<Help>());
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  declare_ranks(app);
  declare_times(app);
  declare_outputs(app);
  declare_fulfilled(app);
  declare_torchrun_only(app);
  const Words words = split_words(app, argc, argv);
  if (!parse(app, words.own)) {
    return std::nullopt;
  }
  if (const auto folder = find_setting(app, "--explain")) {
    Options options;
    options.explain = folder->value;
    return options;
  }
  TESSERA_CHECK(!words.program.empty() && !words.program.front().empty(),
                "no program was given: tessera-run --nproc N PROGRAM ARGS...");
  Options options = read_options(app);
  options.program = words.program;
  return options;
}

}  // namespace tessera::run
