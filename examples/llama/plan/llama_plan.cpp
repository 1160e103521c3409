// Says before a run of llama_train what every rank of it will hold, send and take.

#include <c10/util/Exception.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "examples/llama/cli.h"
#include "examples/llama/named_files.h"
#include "examples/llama/plan/plan_llama.h"
#include "examples/llama/same_start.h"
#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/planning/page.h"
#include "tessera/planning/report.h"

namespace {

using namespace llama;
namespace planning = tessera::planning;

/// The flags beside llama_train's.
struct PlanFlags {
  std::string gpu, calibrate, json, html;
  std::int64_t gpus = 0;
  bool search = false;
};

void declare(CLI::App& app, PlanFlags& flags) {
  app.add_option("--gpu", flags.gpu,
                 "What the run is planned for: a100, h100, h200, b200, l40s, mi300x, or a file "
                 "with a machine's numbers")
      ->option_text("NAME|FILE.toml");
  app.add_option("--calibrate", flags.calibrate,
                 "Make a few steps of the run on this CPU, under tessera-run with all its ranks, "
                 "and write a machine of their rates, for --gpu with --device cpu")
      ->option_text("FILE.toml");
  app.add_flag(
      "--search", flags.search,
      "Choose --dp, --tp, --cp, --ac, --zero and --accumulate, those of them that are not "
      "given, for --gpus ranks: the layouts that fit, by a step's time, and the fastest in "
      "full");
  app.add_option("--gpus", flags.gpus, "The ranks of --search")->check(number_above_0());
  app.add_option("--json", flags.json, "Write the plan as JSON, too")->option_text("FILE");
  app.add_option("--html", flags.html, "Write the plan as a page with pictures, too")
      ->option_text("FILE");
}

void check(const PlanFlags& flags, const TrainOptions& options) {
  TESSERA_CHECK(options.device == "cpu" || !flags.gpu.empty(),
                "--device cuda plans for a GPU, but none is named; pass --gpu h200, for example");
  TESSERA_CHECK(flags.search || flags.gpus == 0,
                "--gpus is given without --search; pass --search, or --dp and --tp instead");
  TESSERA_CHECK(!flags.search || flags.gpus > 0,
                "--search needs the number of ranks; pass --gpus N");
  TESSERA_CHECK(!flags.search || !flags.gpu.empty(),
                "--search needs a machine, whose memory decides what fits; pass --gpu h200, for "
                "example");
  TESSERA_CHECK(flags.calibrate.empty() || flags.gpu.empty(),
                "--calibrate measures this CPU; leave out --gpu");
  std::vector<NamedFile> files = options.inputs;
  files.push_back({"--gpu", flags.gpu, /*is_read=*/true});
  files.push_back({"--calibrate", flags.calibrate});
  files.push_back({"--json", flags.json});
  files.push_back({"--html", flags.html});
  check_files_differ(files);
}

/// Better to learn before the work than after it.
void check_can_write(const char* flag, const std::string& file) {
  if (file.empty()) {
    return;
  }
  std::error_code error;
  const bool exists = std::filesystem::exists(file, error);
  const std::filesystem::path folder = std::filesystem::absolute(file).parent_path();
  const bool can = exists ? !std::filesystem::is_directory(file) && access(file.c_str(), W_OK) == 0
                          : access(folder.c_str(), W_OK | X_OK) == 0;
  TESSERA_CHECK(can, "can't write ", flag, " ", file, "; give a file in an existing folder");
}

void check_outputs(const PlanFlags& flags) {
  check_can_write("--calibrate", flags.calibrate);
  check_can_write("--json", flags.json);
  check_can_write("--html", flags.html);
}

void write_file(const char* flag, const std::string& file, const std::string& text) {
  std::ofstream out(file);
  out << text;
  out.close();
  TESSERA_CHECK(out, "can't write ", flag, " ", file, "; give a file in an existing folder");
}

/// Writes the machine of --calibrate on rank 0. Others return nullopt.
std::optional<planning::Machine> calibrated(const PlanFlags& flags, const TrainOptions& options) {
  const tessera::comm::WorldScope scope(tessera::comm::world_from_environment());
  tessera::comm::World& world = *scope.world();
  tessera::comm::run_or_fail_together(*start_group(world), c10::kCPU, [&] {
    if (world.rank() == 0) {
      check_outputs(flags);
    }
  });
  planning::Machine machine = calibrate_llama(options, scope.world());
  if (world.rank() > 0) {
    return std::nullopt;
  }
  write_file("--calibrate", flags.calibrate, planning::to_toml(machine));
  return machine;
}

/// With all four degrees, and the collectives by module. The plan's mesh has the degrees above 1.
void write_json(const planning::RunPlan& plan, const std::optional<planning::Search>& search,
                const std::vector<ModuleTraffic>& modules, const TrainOptions& o,
                const std::string& file) {
  auto json = nlohmann::ordered_json::parse(planning::to_json(plan, search));
  json["mesh"] = {{"dp_replicate", o.dp_replicate}, {"dp", o.dp}, {"cp", o.cp}, {"tp", o.tp}};
  json["modules"] = nlohmann::ordered_json::array();
  for (const auto& [module, backward, group, collective, traffic] : modules) {
    json["modules"].push_back({{"module", module},
                               {"backward", backward},
                               {"group", group},
                               {"collective", collective},
                               {"calls", traffic.calls},
                               {"bytes", traffic.bytes}});
  }
  write_file("--json", file, json.dump(2) + "\n");
}

/// With --search: prints what it finds, and sets its best layout in `options`.
std::optional<planning::Search> search_if_asked(const PlanFlags& flags,
                                                const std::optional<planning::Machine>& machine,
                                                TrainOptions& options) {
  if (!flags.search) {
    return std::nullopt;
  }
  planning::Search search = search_llama(options, *machine, flags.gpus);
  const planning::TrainingLayout& best = search.best().layout;
  std::cout << planning::to_text(search) << "\n" << flags_of(best) << ", in full:\n";
  options = with(std::move(options), best);
  return search;
}

int plan(std::vector<std::string> arguments) {
  PlanFlags flags;
  TrainOptions options = parse_plan_options(
      std::move(arguments), [&](CLI::App& app) { declare(app, flags); },
      [&] { return !flags.gpu.empty(); });
  check(flags, options);
  std::optional<planning::Machine> machine;
  if (!flags.gpu.empty()) {
    machine = planning::machine_of(flags.gpu, "--gpu");
  }
  try {
    if (flags.calibrate.empty()) {
      check_outputs(flags);
    } else {
      machine = calibrated(flags, options);
      if (!machine) {
        return 0;
      }
    }
    const std::optional<planning::Search> search = search_if_asked(flags, machine, options);
    const planning::RunPlan run = plan_llama(options, machine);
    const std::vector<ModuleTraffic> modules = plan_modules(options);
    std::cout << planning::to_text(run) << to_text(modules) << std::flush;
    if (!flags.json.empty()) {
      write_json(run, search, modules, options, flags.json);
    }
    if (!flags.html.empty()) {
      planning::write_plan_page(run, search, page_of(options), flags.html);
    }
  } catch (const c10::Error& error) {
    tessera::fail(error.what_without_backtrace());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return llama::run_program("llama_plan", argc, argv, plan);
}
