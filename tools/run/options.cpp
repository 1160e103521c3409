#include "options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "command_line/devices.h"
#include "command_line/place.h"
#include "command_line/settings.h"
#include "tessera/core/error.h"

namespace tessera::run {
namespace {

// A command line's words in two: the launcher's own, and the program with its arguments.

struct Words {
  std::vector<std::string> own;
  std::vector<std::string> program;  ///< and its arguments, as they were given
};

// torchrun has both forms of every name.
std::string with_dashes(const std::string& word) {
  const auto equals = std::min(word.find('='), word.size());
  std::string name = word.substr(0, equals);
  if (name.starts_with("--")) {
    std::replace(name.begin(), name.end(), '_', '-');
  }
  return name + word.substr(equals);
}

// Whether the option's value is the next word: not in --name=value, nor in -n3.
bool takes_next(const CLI::App& app, const std::string& word) {
  const CLI::Option* option = app.get_option_no_throw(word);
  return option != nullptr && option->get_expected_max() > 0;
}

/// The program begins behind the first "--", or as with torchrun at the first word that is neither
/// an option of `app` nor an option's value. Names of options in `own` have dashes, also where they
/// were written with underscores.
Words split_words(const CLI::App& app, int argc, const char* const* argv) {
  Words words;
  int next = 1;
  for (; next < argc && argv[next][0] == '-' && std::string_view(argv[next]) != "--"; ++next) {
    words.own.push_back(with_dashes(argv[next]));
    if (takes_next(app, words.own.back())) {
      TESSERA_CHECK(next + 1 < argc, argv[next],
                    " has no value behind it (tessera-run --help lists the options)");
      words.own.emplace_back(argv[++next]);
    }
  }
  if (next < argc && std::string_view(argv[next]) == "--") {
    ++next;
  }
  words.program.assign(argv + next, argv + argc);
  return words;
}

// Options of torchrun's that tessera-run cannot do: a command line that has one is refused, with
// what to do instead.

struct TorchrunOnly {
  const char* names;
  const char* variable;
  bool has_value;
  const char* advice;
};

constexpr TorchrunOnly kTorchrunOnly[] = {
    {"--module,-m", "PET_MODULE", false,
     "tessera-run starts programs: write python3 -m MODULE behind the options"},
    {"--run-path", "PET_RUN_PATH", false,
     "tessera-run starts programs: write python3 SCRIPT behind the options"},
    {"--local-addr", "PET_LOCAL_ADDR", true,
     "ranks find this node's address by that of node 0: leave it out, or set GLOO_SOCKET_IFNAME to "
     "the network interface"},
    {"--signals-to-handle", "PET_SIGNALS_TO_HANDLE", true,
     "every signal that ends a job and SIGUSR1 and SIGUSR2 reach the ranks: leave it out"},
    {"--numa-binding", nullptr, true, "leave it out, and start the program by numactl"},
    {"--virtual-local-rank", "PET_VIRTUAL_LOCAL_RANK", false,
     "a rank takes the GPU of its LOCAL_RANK: leave it out"},
    {"--role", "PET_ROLE", true, "all ranks have one role: leave it out"},
    {"--event-log-handler", "PET_EVENT_LOG_HANDLER", true,
     "it names a part of Python's torch: leave it out"},
    {"--logs-specs", nullptr, true, "it names a part of Python's torch: leave it out"},
    {"--log-line-prefix-template", "PET_LOG_LINE_PREFIX_TEMPLATE", true,
     "the lines of a rank begin with [rank N]: leave it out"},
    {"--print-completion", nullptr, true, "leave it out; tessera-run --help lists the options"},
    {"--duplicate-stdout-filters", "PET_DUPLICATE_STDOUT_FILTERS", true,
     "leave it out, and search the files that --tee writes"},
    {"--duplicate-stderr-filters", "PET_DUPLICATE_STDERR_FILTERS", true,
     "leave it out, and search the files that --tee writes"},
};

std::string first_name(const TorchrunOnly& option) {
  const std::string names = option.names;
  return names.substr(0, names.find(','));
}

/// So that their values are not taken for the program. --help does not list them.
void declare_torchrun_only(CLI::App& app) {
  for (const auto& option : kTorchrunOnly) {
    (option.has_value ? app.add_option(option.names) : app.add_flag(option.names))->group("");
  }
}

/// Throws Error where one is given, on the command line or as PET_<NAME>.
void refuse_torchrun_only(const CLI::App& app) {
  for (const auto& option : kTorchrunOnly) {
    const auto setting = option.has_value ? find_setting(app, first_name(option), option.variable)
                                          : find_switch(app, first_name(option), option.variable);
    TESSERA_CHECK(!setting, setting->text, " is torchrun's alone; ", option.advice);
  }
}

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
  app.add_option("--log-size",
                 "MiB of such a file (256), after which it is FILE.1 and the next begins; the last "
                 "three stay. 0: one file")
      ->option_text("MIB");
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

int read_restarts(const CLI::App& app) {
  const auto setting = find_setting(app, "--restarts", "PET_MAX_RESTARTS");
  return setting ? integer_of(*setting, 0, std::numeric_limits<int>::max()) : 0;
}

// KEY=SECONDS,...: torchrun's names of the two times that launchers have.
void read_meeting_times(const CLI::App& app, Options& options) {
  if (const auto timeout = find_setting(app, "--timeout", "TESSERA_TIMEOUT")) {
    options.join_timeout =
        std::chrono::duration<double>(seconds_of(*timeout, /*may_be_zero=*/false));
  }
  const auto setting = find_setting(app, "--rdzv-conf", "PET_RDZV_CONF");
  std::istringstream pairs(setting ? setting->value : "");
  for (std::string pair; std::getline(pairs, pair, ',');) {
    const std::size_t equals = std::min(pair.find('='), pair.size());
    const std::string key = pair.substr(0, equals);
    TESSERA_CHECK(key == "join_timeout" || key == "last_call_timeout", setting->text,
                  " has the key '", key,
                  "', which is torchrun's alone; join_timeout and last_call_timeout are known");
    const std::chrono::duration<double> seconds(
        seconds_of({pair.substr(std::min(equals + 1, pair.size())), setting->text}, true));
    (key == "join_timeout" ? options.join_timeout : options.last_call) = seconds;
  }
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
  return std::chrono::duration<double>(seconds_of(*setting, /*may_be_zero=*/true));
}

LogOptions read_logs(const CLI::App& app, int nproc) {
  LogOptions logs;
  const auto folder = find_setting(app, "--log-dir", "PET_LOG_DIR");
  const auto redirects = find_setting(app, "--redirects", "PET_REDIRECTS");
  const auto tee = find_setting(app, "--tee", "PET_TEE");
  TESSERA_CHECK(!folder || !folder->value.empty(), "--log-dir names no folder: its value is empty");
  logs.folder = folder ? folder->value : "";
  logs.redirects = redirects ? Streams(*redirects, nproc) : Streams();
  logs.tee = tee ? Streams(*tee, nproc) : Streams();
  if (const auto size = find_setting(app, "--log-size")) {
    logs.file_bytes = std::int64_t{integer_of(*size, 0, std::numeric_limits<int>::max())} << 20;
  }
  if (folder && !redirects && !tee) {
    logs.tee = Streams::all();
  }
  if (const auto shown = find_setting(app, "--local-ranks-filter", "PET_LOCAL_RANKS_FILTER")) {
    logs.shown = local_ranks(*shown, nproc);
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
  constexpr int kMost = std::numeric_limits<int>::max();
  TESSERA_CHECK(options.nproc <= kMost / place.nnodes, "--nnodes ", place.nnodes, " of --nproc ",
                options.nproc, " are more than ", kMost, " ranks: give fewer nodes");
  options.nnodes = place.nnodes;
  options.min_nodes = place.min_nodes;
  options.place_is_shared = place.nnodes > 1;
  options.node_rank = place.node_rank.value_or(0);
  options.is_numbered = place.node_rank.has_value();
  options.host = place.host;
  options.port = place.port;
  options.job_id = value_of(app, "--rdzv-id", "PET_RDZV_ID");
  options.timeout = read_seconds(app, "--timeout", /*may_be_zero=*/false);
  options.watchdog = read_seconds(app, "--watchdog", /*may_be_zero=*/true);
  options.run_dir = value_of(app, "--run-dir", "TESSERA_RUN_DIR");
  options.logs = read_logs(app, options.nproc);
  options.grace = read_grace(app);
  options.restarts = read_restarts(app);
  read_meeting_times(app, options);
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
    TESSERA_CHECK(!options.explain.empty(),
                  "--explain names no folder: give the one that the watchdog or tessera-run named");
    return options;
  }
  TESSERA_CHECK(!words.program.empty() && !words.program.front().empty(),
                "no program was given: tessera-run --nproc N PROGRAM ARGS...");
  Options options = read_options(app);
  options.program = words.program;
  return options;
}

}  // namespace tessera::run
