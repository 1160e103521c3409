// llama_plan: plans the memory, time and communication of a llama_train run.

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "examples/llama/cli.h"
#include "examples/llama/train/options.h"
#include "examples/llama/train/run.h"
#include "tessera/comm/trace.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/kernels/fake_mode.h"
#include "tessera/planning/plan.h"
#include "tessera/planning/report.h"

namespace llama {

using namespace tessera;
using observe::MemoryKind;
using planning::TrainingLayout;

namespace {

/// Returns advice: the flags that reduce memory of kind `kind` (parameters, activations and so on).
std::string remedy(const TrainOptions& o, MemoryKind kind) {
  const char* or_ep = read_config(o.config).num_experts > 0 ? " or --ep" : "";
  switch (kind) {
    case MemoryKind::kParameters:
    case MemoryKind::kOptimizer:
    case MemoryKind::kGradients:
      return std::string("more --dp") + or_ep + (o.offload ? "" : " or --tp, or --offload");
    case MemoryKind::kGathered:
      return o.zero == 2 ? "--zero 3" : std::string("more --tp") + or_ep;
    case MemoryKind::kReduced:
      return std::string("more --tp") + or_ep + ", or --reduce-dtype bf16";
    case MemoryKind::kActivations:
      return o.ac == "full"
                 ? "more --tp (with --sp) or --cp, a smaller --batch or more --accumulate"
             : o.ac == "none" ? "--ac selective or full, or more --accumulate"
                              : "--ac full, or more --accumulate";
    default:
      return "more --accumulate, or more --tp (with --loss-parallel)";
  }
}

planning::PlanOptions plan_options(const TrainOptions& o,
                                   const std::optional<planning::Machine>& machine) {
  TESSERA_CHECK(!o.fp8 || o.device != "cuda" || !machine || machine->flops_fp8 > 0,
                "--fp8 is given, but ", machine->name,
                " does not support FP8 matrix products; leave --fp8 out, or pass a --gpu file that "
                "sets flops_fp8");
  return {.machine = machine,
          .device = o.device,
          .offload = o.offload,
          .tokens = o.batch * o.seq,
          .type = scalar_type(o.param_dtype),
          .flops = flops_of(o, read_config(o.config)),
          .remedy = [o](MemoryKind kind) { return remedy(o, kind); },
          .sizes = planned_sizes(o)};
}

planning::MakeRun run_of(const TrainOptions& options) {
  return [options](const comm::WorldPtr& world) { return planned_run(options, world); };
}

/// The bytes that one module communicates by one collective on one process group in a training
/// step.
struct ModuleTraffic {
  /// The FQN of the module, with "*" for indices: "model.layers.*.mlp". "" stands for the root
  /// module and for collectives that run outside of all modules.
  std::string module;
  bool backward = false;
  std::string group, collective;  ///< mesh dimension and collective: "tp", "all_gather"
  comm::Traffic traffic;
};

/// Replaces numbers in an FQN by "*": "model.layers.3.mlp" -> "model.layers.*.mlp".
std::string pattern_of(const std::string& fqn) {
  static const std::regex number(R"((^|\.)\d+(?=\.|$))");
  return std::regex_replace(fqn, number, "$1*");
}

/// Attributes each collective of rank 0 to a module: in forward, the innermost running module; in
/// backward and after, the module with the most recent output gradient. Adds permanent hooks to the
/// model.
class TrafficByModule {
 public:
  TrafficByModule(nn::ModuleBase& model, comm::TrafficCounter& counter) : counter_(counter) {
    nn::visit_modules(model, [this](const std::string& fqn, nn::ModuleBase& module) {
      const std::string name = pattern_of(fqn);
      module.add_forward_pre_hook([this, name](auto&, nn::TensorList) {
        count();
        running_.push_back(name);
        if (name.empty()) {  // a forward of the root module begins
          backward_.reset();
        }
      });
      module.add_forward_hook([this, name](auto&, nn::TensorList outputs) {
        for (const at::Tensor* output : outputs) {
          if (output->requires_grad()) {
            output->register_hook([this, name](const at::Tensor&) {
              count();
              backward_ = name;
            });
          }
        }
      });
      module.add_always_hook([this] {
        count();
        running_.pop_back();
      });
    });
  }
  void begin() { last_ = counter_.table(); }
  std::vector<ModuleTraffic> end() {
    count();
    return std::move(modules_);
  }

 private:
  void count() {
    const std::string module = !running_.empty() ? running_.back() : backward_.value_or("");
    for (const auto& [key, traffic] : counter_.since(last_)) {
      if (traffic.calls > 0) {
        add(module, running_.empty() && backward_, key.first, key.second, traffic);
      }
    }
    last_ = counter_.table();
  }
  void add(const std::string& module, bool backward, const std::string& group,
           const std::string& collective, const comm::Traffic& traffic) {
    auto row = std::ranges::find_if(modules_, [&](const ModuleTraffic& each) {
      return each.module == module && each.backward == backward && each.group == group &&
             each.collective == collective;
    });
    if (row == modules_.end()) {
      row = modules_.insert(row, {module, backward, group, collective, {}});
    }
    row->traffic.calls += traffic.calls;
    row->traffic.bytes += traffic.bytes;
  }

  comm::TrafficCounter& counter_;
  comm::TrafficTable last_;
  std::vector<std::string> running_;     ///< modules whose forward is running, innermost last
  std::optional<std::string> backward_;  ///< the current module in backward
  std::vector<ModuleTraffic> modules_;
};

bool is_given(const TrainOptions& options, const char* flag) {
  return std::ranges::find(options.given, flag) != options.given.end();
}

/// Returns a training layout as flags: "--dp 64 --tp 8 --ac full --zero 3", with --ep, --cp and
/// --accumulate if the values are above 1.
std::string flags_of(const TrainingLayout& layout, std::int64_t ep) {
  const auto above_1 = [](const char* flag, std::int64_t value) {
    return value > 1 ? fmt::format(" {} {}", flag, value) : "";
  };
  return fmt::format("--dp {} --tp {}{}{} --ac {} --zero {}{}", layout.dp, layout.tp,
                     above_1("--ep", ep), above_1("--cp", layout.cp), layout.ac, layout.zero,
                     above_1("--accumulate", layout.accumulate));
}

TrainOptions with(TrainOptions options, const TrainingLayout& layout) {
  options.dp = layout.dp;
  options.tp = layout.tp;
  options.cp = layout.cp;
  options.ac = layout.ac;
  options.zero = layout.zero;
  options.accumulate = layout.accumulate;
  return options;
}

/// Plans one rank of each planning::RankKind. With --ac auto, sets `options.ac` to the setting with
/// the least recomputation that fits into device memory, otherwise to "full". Throws Error for
/// options that llama_train rejects.
planning::RunPlan plan_llama(TrainOptions& options,
                             const std::optional<planning::Machine>& machine) {
  const auto plan = [&] {
    return planning::plan_run(run_of(options), options.ranks(), plan_options(options, machine));
  };
  if (options.ac != "auto") {
    return plan();
  }
  options.ac = "none";
  planning::RunPlan run = plan();
  const std::int64_t peak = run.largest().memory.peak_bytes;
  for (const char* ac : {"selective", "full"}) {
    if (run.fits()) {
      break;
    }
    options.ac = ac;
    run = plan();
    if (run.fits()) {
      // With all blocks checkpointed the run fits, so checkpointing fewer blocks can be enough.
      const std::int64_t blocks = read_config(options.config).num_hidden_layers;
      const std::int64_t count = planning::checkpointed_blocks(
          peak, run.largest().memory.peak_bytes, machine->room(), blocks);
      options.ac = fmt::format("{}:{}", ac, count);
      if (count < blocks) {
        if (planning::RunPlan part = plan(); part.fits()) {
          return part;
        }
      }
      options.ac = ac;
    }
  }
  return run;
}

/// Returns rank 0's collectives in the run's second step, by module, in the order of the calls.
std::vector<ModuleTraffic> plan_modules(const TrainOptions& options) {
  const kernels::FakeMode fake;
  const comm::WorldPtr world = comm::fake_world(/*rank=*/0, static_cast<int>(options.ranks()));
  const planning::Run run = planned_run(options, world);
  TrafficByModule traffic(*run.model, world->traffic());
  run.step();
  traffic.end();
  traffic.begin();
  run.step();
  return traffic.end();
}

std::string to_text(const std::vector<ModuleTraffic>& modules) {
  std::size_t width = 0;
  for (const ModuleTraffic& each : modules) {
    width = std::max(width, each.module.size());
  }
  std::string text = "collectives of rank 0 by module\n";
  for (const auto& [module, backward, group, collective, traffic] : modules) {
    text +=
        fmt::format("  {:<{}}  {:<8}  {} {}: {} call{}, {} bytes\n", module.empty() ? "-" : module,
                    width, backward ? "backward" : "forward", group, collective, traffic.calls,
                    traffic.calls == 1 ? "" : "s", traffic.bytes);
  }
  return modules.empty() ? "" : text;
}

struct ExpertPlan {
  models::ParameterCount parameters;
  /// Numbers of tokens that an expert gets in a micro-batch: the mean over the experts, the maximum
  /// from --expert-load, and the worst case (one expert gets all tokens).
  double mean_rows = 0, largest_rows = 0, most_rows = 0;
  /// The bytes that rank 0, which has the most experts, sends in the all-to-alls of one layer, in
  /// forward and backward of one micro-batch. Recomputation is not counted.
  std::int64_t all_to_all_bytes = 0;
};

/// Returns nullopt for a model without experts.
std::optional<ExpertPlan> plan_experts(const TrainOptions& o) {
  const Config config = read_config(o.config);
  if (config.num_experts == 0) {
    return std::nullopt;
  }
  const std::int64_t k = config.num_experts_per_tok;
  const std::int64_t sequences = o.batch / (o.dp * o.dp_replicate * o.ep * o.accumulate);
  const std::int64_t tokens = sequences * o.seq / o.cp, own = (tokens + o.tp - 1) / o.tp;
  const auto shared = static_cast<double>(o.ep > 1 ? o.ep * own : tokens);
  const double mean = shared * static_cast<double>(k) / static_cast<double>(config.num_experts);
  // In forward, rank 0 sends rows of its tokens to experts, and results of its experts back. In
  // backward, rank 0 sends the gradients of these rows and results.
  const std::int64_t parts = o.ep > 1 ? o.ep : o.tp;
  const std::int64_t most = (config.num_experts + parts - 1) / parts;
  const auto others = static_cast<double>(most - 1);
  const auto experts = static_cast<double>(config.num_experts);
  const double largest = std::min(mean * o.expert_load, shared);
  const double results = largest + others * (mean * experts - largest) / std::max(experts - 1, 1.0);
  const double row = static_cast<double>(config.hidden_size) *
                     static_cast<double>(elementSize(scalar_type(o.param_dtype)));
  return ExpertPlan{
      .parameters = count_parameters(config),
      .mean_rows = mean,
      .largest_rows = largest,
      .most_rows = shared,
      .all_to_all_bytes =
          parts > 1 ? std::llround(2 * row * (static_cast<double>(own * k) + results)) : 0};
}

std::string to_text(const ExpertPlan& plan) {
  return fmt::format(
      "experts: {} of {} parameters compute a token\n"
      "  rows of an expert in a micro-batch: {:.0f} on average, {:.0f} at most as planned, {:.0f} "
      "in the worst case\n"
      "  all-to-alls of a layer and micro-batch, forward and backward: {} bytes\n",
      plan.parameters.active, plan.parameters.total, plan.mean_rows, plan.largest_rows,
      plan.most_rows, plan.all_to_all_bytes);
}

/// Returns the names of the TrainingLayout fields that flags set: a search must not change these.
std::set<std::string> fixed_fields(const TrainOptions& o) {
  std::set<std::string> fixed;
  for (const std::string name : {"dp", "tp", "cp", "ac", "zero", "accumulate"}) {
    if (is_given(o, ("--" + name).c_str())) {
      fixed.insert(name);
    }
  }
  if (o.ac == "auto") {
    fixed.erase("ac");
  }
  if (o.reshard_last) {
    fixed.insert("zero");
  }
  return fixed;
}

/// Searches the training layouts of `gpus` ranks that agree with the given flags.
planning::Search search_llama(const TrainOptions& o, const planning::Machine& machine,
                              std::int64_t gpus) {
  const models::LlamaConfig config = read_config(o.config);
  const std::int64_t heads = config.num_attention_heads;
  // All layers take equal memory and time, unless only some layers are frozen or have experts.
  const bool is_even = o.freeze.empty() && config.dense_layers.empty();
  const std::int64_t layers = is_even ? config.num_hidden_layers : 0;
  const auto cut_run = [&](const TrainingLayout& layout, std::int64_t few) {
    TrainOptions cut = with(o, layout);
    cut.layers = few;
    return run_of(cut);
  };
  return planning::search({.ranks = gpus,
                           .machine = machine,
                           .dp_replicate = o.dp_replicate * o.ep,
                           .batch = o.batch,
                           .sequence = o.seq,
                           .blocks = layers,
                           .first = {o.dp, o.tp, o.cp, o.ac, o.zero, o.accumulate},
                           .fixed = fixed_fields(o),
                           .allows_tp = [heads](std::int64_t tp) { return heads % tp == 0; },
                           // The search leaves out degrees of --cp that llama_train would reject.
                           .allows_cp =
                               [&](std::int64_t cp) {
                                 return o.seq % (2 * cp) == 0 && o.dropout == 0 &&
                                        o.lora_dropout == 0;
                               },
                           .estimate = planning::estimate_by_plans(
                               cut_run, layers, "model.layers", gpus, plan_options(o, machine))});
}

struct PlanFlags {
  std::string gpu, json;
  std::int64_t gpus = 0;
  bool search = false;
  double expert_load = 1;
};

void declare(CLI::App& app, PlanFlags& flags) {
  app.add_option("--gpu", flags.gpu,
                 "GPU of the planned run: a100, h100, h200, b200, l40s, mi300x, or a TOML file "
                 "that describes a machine")
      ->option_text("NAME|FILE.toml");
  app.add_flag("--search", flags.search,
               "Choose --dp, --tp, --cp, --ac, --zero and --accumulate, if not given, for --gpus "
               "ranks; list the layouts that fit into memory, fastest first, and print the plan of "
               "the fastest layout");
  app.add_option("--gpus", flags.gpus, "Number of ranks for --search")->check(number_above_0());
  app.add_option("--expert-load", flags.expert_load,
                 "Rows of the busiest expert, divided by the mean number of rows (1)")
      ->check(number_between(1.0, 1e6));
  app.add_option("--json", flags.json,
                 "Also write the plan to a JSON file, for tools/tessera_plot.py plan FILE")
      ->option_text("FILE");
}

void check(const PlanFlags& flags, const TrainOptions& options) {
  const char* needs = flags.search               ? "--search"
                      : options.device == "cuda" ? "--device cuda"
                      : options.ac == "auto"     ? "--ac auto"
                      : options.memory           ? "--memory"
                                                 : nullptr;
  TESSERA_CHECK(needs == nullptr || !flags.gpu.empty(), needs,
                " needs the memory size of a machine; pass --gpu h200, for example");
  TESSERA_CHECK(!flags.search || options.ac.find(':') == std::string::npos,
                "--search is given with ", "--ac ", options.ac,
                ", but --search itself chooses how many blocks are recomputed; leave --ac out");
  TESSERA_CHECK(flags.search || flags.gpus == 0,
                "--gpus is given without --search; pass --search, or --dp and --tp instead");
  TESSERA_CHECK(!flags.search || flags.gpus > 0,
                "--search needs the number of ranks; pass --gpus N");
  const Config config = read_config(options.config);
  const double load = options.expert_load;
  TESSERA_CHECK(
      config.num_experts == 0 || load <= static_cast<double>(config.num_experts) /
                                             static_cast<double>(config.num_experts_per_tok),
      "--expert-load ", load, " is given for a model with ", config.num_experts,
      " experts, of which each token chooses ", config.num_experts_per_tok, "; pass at most ",
      config.num_experts, " / ", config.num_experts_per_tok);
  std::vector<NamedFile> files = options.inputs;
  files.push_back({"--gpu", flags.gpu, /*is_read=*/true});
  files.push_back({"--json", flags.json});
  check_files_differ(files);
}

/// Writes the run's plan as JSON. Adds the collectives by module, and the sizes of all mesh
/// dimensions: RunPlan::mesh has only the dimensions of more than one rank.
void write_json(const planning::RunPlan& plan, const std::optional<planning::Search>& search,
                const std::vector<ModuleTraffic>& modules, const TrainOptions& o,
                const std::string& file) {
  auto json = nlohmann::ordered_json::parse(planning::to_json(plan, search));
  json["mesh"] = {
      {"dp_replicate", o.dp_replicate}, {"dp", o.dp}, {"ep", o.ep}, {"cp", o.cp}, {"tp", o.tp}};
  json["model"] = std::filesystem::path(o.config).stem().string();
  json["layers"] = read_config(o.config).num_hidden_layers;
  json["flags"] = nlohmann::ordered_json::object();
  for (const auto& [flag, value] : o.listing) {
    json["flags"][flag] = value;
  }
  json["flags"]["--ac"] = o.ac;  // the chosen value if --ac is "auto"
  if (const std::optional<ExpertPlan> experts = plan_experts(o)) {
    json["experts"] = {{"parameters", experts->parameters.total},
                       {"active_parameters", experts->parameters.active},
                       {"mean_rows", experts->mean_rows},
                       {"largest_rows", experts->largest_rows},
                       {"most_rows", experts->most_rows},
                       {"all_to_all_bytes", experts->all_to_all_bytes}};
  }
  json["modules"] = nlohmann::ordered_json::array();
  for (const auto& [module, backward, group, collective, traffic] : modules) {
    json["modules"].push_back({{"module", module},
                               {"backward", backward},
                               {"group", group},
                               {"collective", collective},
                               {"calls", traffic.calls},
                               {"bytes", traffic.bytes}});
  }
  std::ofstream out(file);
  out << json.dump(1) << "\n";
  out.close();
  TESSERA_CHECK(out, "can't write --json ", file, "; pass a file in an existing folder");
}

/// With --search: finds the best parallel layout, prints the layout and sets it in `options`.
std::optional<planning::Search> search_if_asked(const PlanFlags& flags,
                                                const std::optional<planning::Machine>& machine,
                                                TrainOptions& options) {
  if (!flags.search) {
    return std::nullopt;
  }
  planning::Search search = search_llama(options, *machine, flags.gpus);
  const planning::TrainingLayout& best = search.best().layout;
  std::cout << planning::to_text(search) << "\n" << flags_of(best, options.ep) << ", in full:\n";
  options = with(std::move(options), best);
  return search;
}

int plan(std::vector<std::string> arguments) {
  PlanFlags flags;
  TrainOptions options = parse_plan_options(
      std::move(arguments), [&](CLI::App& app) { declare(app, flags); },
      [&] { return !flags.gpu.empty(); });
  options.expert_load = flags.expert_load;
  check(flags, options);
  std::optional<planning::Machine> machine;
  if (!flags.gpu.empty()) {
    machine = planning::machine_of(flags.gpu, "--gpu");
    if (options.memory) {
      machine->memory_bytes = *options.memory * (1 << 30);
      machine->reserved_bytes = 0;
    }
  }
  try {
    const std::optional<planning::Search> search = search_if_asked(flags, machine, options);
    const bool chooses = options.ac == "auto";
    const planning::RunPlan run = plan_llama(options, machine);
    if (chooses) {
      std::cout << "--ac auto: " << options.ac << "\n";
    }
    const std::vector<ModuleTraffic> modules = plan_modules(options);
    const std::optional<ExpertPlan> experts = plan_experts(options);
    std::cout << planning::to_text(run) << (experts ? to_text(*experts) : "") << to_text(modules)
              << std::flush;
    if (!flags.json.empty()) {
      write_json(run, search, modules, options, flags.json);
    }
  } catch (const c10::Error& error) {
    tessera::fail(error.what_without_backtrace());
  }
  return 0;
}

}  // namespace
}  // namespace llama

int main(int argc, char** argv) {
  return llama::run_program("llama_plan", argc, argv, llama::plan);
}
