#include "examples/bench_mfu/measure.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/core/error.h"

namespace bench {

using nlohmann::json;

namespace {

std::string program(const char* name) {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / name).string();
}

/// Runs a program to its end, with what it prints in `log`. Its exit code; 128 if a signal ended
/// it.
int run(std::vector<std::string> command, const std::filesystem::path& log) {
  std::vector<char*> arguments;
  for (std::string& argument : command) {
    arguments.push_back(argument.data());
  }
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC, 0644);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  pid_t child = 0;
  const int failed =
      posix_spawn(&child, command.front().c_str(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  TESSERA_CHECK(failed == 0, "can't start ", command.front(),
                "; build it beside bench_mfu: cmake --build BUILD --target llama_train llama_plan "
                "tessera-run");
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

/// The first line that looks like a message: later ones are those of ranks that waited.
std::string error_in(const std::filesystem::path& log) {
  std::ifstream in(log);
  std::string last;
  for (std::string line; std::getline(in, line);) {
    if (line.find("llama_train: ") != std::string::npos ||
        line.find("llama_plan: ") != std::string::npos) {
      return line;
    }
    last = line.empty() ? last : line;
  }
  return last.empty() ? "it said nothing" : last;
}

std::vector<std::string> run_flags(const Trial& trial, const BenchOptions& o) {
  std::vector<std::string> flags{"--config", trial.config.string(),
                                 "--dp",     std::to_string(trial.mesh.dp),
                                 "--cp",     std::to_string(trial.mesh.cp),
                                 "--tp",     std::to_string(trial.mesh.tp),
                                 "--batch",  std::to_string(trial.batch),
                                 "--seq",    std::to_string(trial.seq),
                                 "--steps",  std::to_string(o.steps),
                                 "--ac",     trial.ac,
                                 "--device", o.device};
  for (const std::string& flag : o.flags) {
    if (!flag.empty()) {
      flags.push_back(flag);
    }
  }
  return flags;
}

/// FLOPs of a step on all ranks, as llama_plan counts them in the operators of that step. It prints
/// them with a machine only, and they are the same for any.
double flops_of_step(std::vector<std::string> flags, const std::filesystem::path& folder) {
  const std::filesystem::path plan = folder / "plan.json";
  flags.insert(flags.begin(), program("llama_plan"));
  flags.insert(flags.end(), {"--gpu", "h100", "--json", plan.string()});
  const int code = run(flags, folder / "plan.log");
  TESSERA_CHECK(code == 0, error_in(folder / "plan.log"));
  std::ifstream in(plan);
  const json ranks = json::parse(in).at("kinds");
  double flops = 0;
  for (const json& kind : ranks) {
    flops += kind.at("ranks").get<double>() * kind.at("flops").get<double>();
  }
  return flops;
}

std::vector<json> counted_steps(const std::filesystem::path& metrics, std::int64_t warmup) {
  std::ifstream in(metrics);
  std::vector<json> steps;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with('{')) {
      steps.push_back(json::parse(line));
    }
  }
  steps.erase(steps.begin(), steps.begin() + std::min<std::ptrdiff_t>(warmup, std::ssize(steps)));
  TESSERA_CHECK(!steps.empty(), "the run has no step after the warm-up in ", metrics.string());
  return steps;
}

/// The step whose time is the median: all figures are of this one, so that they fit together.
json middle_step(std::vector<json> steps) {
  const auto middle = steps.begin() + std::ssize(steps) / 2;
  std::ranges::nth_element(steps, middle, {},
                           [](const json& step) { return step.at("step_time_s").get<double>(); });
  return *middle;
}

std::int64_t most(const std::vector<json>& steps, const char* key) {
  std::int64_t most = 0;
  for (const json& step : steps) {
    most = std::max(most, step.at(key).get<std::int64_t>());
  }
  return most;
}

Figures figures_of(const std::vector<json>& steps, double flops, std::int64_t ranks) {
  const json step = middle_step(steps);
  Figures figures{.step_time_s = step.at("step_time_s"),
                  .tokens_per_s = step.at("tokens_per_s"),
                  .reserved_bytes = most(steps, "peak_memory_bytes")};
  if (step.contains("peak_active_bytes")) {
    figures.active_bytes = most(steps, "peak_active_bytes");
  }
  if (!step.at("mfu").is_null()) {
    figures.mfu = step.at("mfu").get<double>();
    figures.mfu_causal = step.at("mfu_causal").get<double>();
    figures.peak_flops = step.at("tflops").get<double>() * 1e12 / (*figures.mfu / 100);
    figures.hfu =
        100 * flops / (figures.step_time_s * static_cast<double>(ranks)) / *figures.peak_flops;
  }
  return figures;
}

/// The step of a trial on PyTorch, as options.peer runs it.
PeerFigures measure_peer(const Trial& trial, const BenchOptions& o, bool compiled,
                         const std::filesystem::path& folder) {
  PeerFigures figures{.name = compiled ? "compiled" : "eager"};
  const std::filesystem::path log = folder / ("peer-" + figures.name + ".log");
  std::vector<std::string> command{"/usr/bin/env",
                                   "python3",
                                   o.peer,
                                   "--config",
                                   trial.config.string(),
                                   "--ac",
                                   trial.ac,
                                   "--batch",
                                   std::to_string(trial.batch),
                                   "--seq",
                                   std::to_string(trial.seq),
                                   "--warm",
                                   std::to_string(o.warmup),
                                   "--steps",
                                   std::to_string(o.steps - o.warmup),
                                   "--device",
                                   o.device};
  if (compiled) {
    command.emplace_back("--compile");
  }
  try {
    TESSERA_CHECK(trial.mesh.ranks() == 1, "--peer runs one rank, not ", trial.mesh.ranks());
    TESSERA_CHECK(trial.ac != "selective", "--peer has no --ac selective");
    TESSERA_CHECK(run(command, log) == 0, error_in(log));
    const json step = middle_step(counted_steps(log, /*warmup=*/0));
    figures.step_time_s = step.at("step_time_s");
    figures.tokens_per_s = step.at("tokens_per_s");
  } catch (const tessera::Error& error) {
    figures.error = error.what();
  } catch (const json::exception& error) {
    figures.error = error.what();
  }
  return figures;
}

}  // namespace

Result measure(const Trial& trial, const BenchOptions& options, const std::filesystem::path& folder,
               const std::filesystem::path& tokens) {
  std::filesystem::create_directories(folder);
  const std::vector<std::string> flags = run_flags(trial, options);
  std::vector<std::string> command{program("tessera-run"), "--nproc",
                                   std::to_string(trial.mesh.ranks()), "--",
                                   program("llama_train")};
  command.insert(command.end(), flags.begin(), flags.end());
  command.insert(command.end(), {"--tokens", tokens.string(), "--peak-flops", options.peak_flops,
                                 "--metrics", (folder / "metrics.jsonl").string()});
  Result result{.trial = trial};
  try {
    // Has llama_train report peak_active_bytes on a CPU, too.
    setenv("TESSERA_COUNT_MEMORY", "1", 1);
    const double flops = flops_of_step(flags, folder);
    const int code = run(command, folder / "run.log");
    TESSERA_CHECK(code == 0, error_in(folder / "run.log"));
    result.figures = figures_of(counted_steps(folder / "metrics.jsonl", options.warmup), flops,
                                trial.mesh.ranks());
  } catch (const tessera::Error& error) {
    result.error = error.what();
  } catch (const json::exception& error) {
    result.error = error.what();
  }
  for (const bool compiled : {false, true}) {
    if (!options.peer.empty()) {
      result.peers.push_back(measure_peer(trial, options, compiled, folder));
    }
  }
  return result;
}

void write_tokens(const std::filesystem::path& path, std::int64_t count) {
  constexpr std::int32_t kMagic = 20240520;
  constexpr std::int64_t kPeriod = 61;
  std::array<std::int32_t, 256> header{kMagic, 1, static_cast<std::int32_t>(count)};
  std::vector<std::uint16_t> tokens;
  for (std::int64_t i = 0; i < count; ++i) {
    tokens.push_back(static_cast<std::uint16_t>(i % kPeriod));
  }
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(header.data()), sizeof(header));
  out.write(reinterpret_cast<const char*>(tokens.data()), std::ssize(tokens) * 2);
  out.close();
  TESSERA_CHECK(out, "can't write ", path.string(), "; give --out a folder that may be written");
}

}  // namespace bench
