#include "examples/llama/plan/plan_llama.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <regex>

#include "examples/llama/same_start.h"
#include "examples/llama/scalar_type.h"
#include "examples/llama/train/planned_run.h"
#include "examples/llama/train/setup.h"
#include "tessera/comm/fake_world.h"
#include "tessera/core/keep_freed_memory.h"
#include "tessera/kernels/fake_mode.h"
#include "tessera/observe/memory_log.h"
#include "tessera/observe/module_watch.h"

namespace llama {

using namespace tessera;
using observe::MemoryKind;
using planning::TrainingLayout;

namespace {

/// What makes a part of the peak smaller.
std::string remedy(const TrainOptions& o, MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kParameters:
    case MemoryKind::kOptimizer:
    case MemoryKind::kGradients:
      return o.offload ? "more --dp" : "more --dp or --tp, or --offload";
    case MemoryKind::kGathered:
      return o.zero == 2 ? "--zero 3" : "more --tp";
    case MemoryKind::kReduced:
      return "more --tp, or --reduce-dtype bf16";
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
                " has no products in 8 bits; leave it out, or give flops_fp8 in a file for --gpu");
  return {.machine = machine,
          .device = o.device,
          .offload = o.offload,
          .tokens = o.batch * o.seq,
          .type = scalar_type(o.param_dtype),
          .flops = flops_of(o, read_config(o.config)),
          .remedy = [o](MemoryKind kind) { return remedy(o, kind); }};
}

planning::MakeRun run_of(const TrainOptions& options) {
  return [options](const comm::WorldPtr& world) { return planned_run(options, world); };
}

/// "model.layers.3.mlp" -> "model.layers.*.mlp".
std::string pattern_of(const std::string& fqn) {
  static const std::regex number(R"((^|\.)\d+(?=\.|$))");
  return std::regex_replace(fqn, number, "$1*");
}

/// Adds the collectives since the last event to the module that ran.
class TrafficByModule final : public observe::ActivityListener {
 public:
  explicit TrafficByModule(comm::TrafficCounter& counter) : counter_(counter) {}

  void begin() { last_ = counter_.table(); }
  std::vector<ModuleTraffic> end() {
    add_since_last();
    return std::move(modules_);
  }

 private:
  struct Running {
    std::string module;
    bool backward = false;
  };

  void entered(observe::Activity activity, const std::string& name) override {
    add_since_last();
    const bool in_backward = !running_.empty() && running_.back().backward;
    running_.push_back({pattern_of(name), in_backward || activity == observe::Activity::kBackward});
  }
  void left() override {
    add_since_last();
    running_.pop_back();
  }

  void add_since_last() {
    const Running running = running_.empty() ? Running{} : running_.back();
    for (const auto& [key, traffic] : counter_.since(last_)) {
      if (traffic.calls > 0) {
        add(running, key.first, key.second, traffic);
      }
    }
    last_ = counter_.table();
  }
  void add(const Running& running, const std::string& group, const std::string& collective,
           const comm::Traffic& traffic) {
    auto row = std::ranges::find_if(modules_, [&](const ModuleTraffic& each) {
      return each.module == running.module && each.backward == running.backward &&
             each.group == group && each.collective == collective;
    });
    if (row == modules_.end()) {
      row = modules_.insert(row, {running.module, running.backward, group, collective, {}});
    }
    row->traffic.calls += traffic.calls;
    row->traffic.bytes += traffic.bytes;
  }

  comm::TrafficCounter& counter_;
  comm::TrafficTable last_;
  std::vector<Running> running_;
  std::vector<ModuleTraffic> modules_;
};

bool is_given(const TrainOptions& options, const char* flag) {
  return std::ranges::find(options.given, flag) != options.given.end();
}

}  // namespace

planning::RunPlan plan_llama(const TrainOptions& options,
                             const std::optional<planning::Machine>& machine) {
  return planning::plan_run(run_of(options), options.ranks(), plan_options(options, machine));
}

std::vector<ModuleTraffic> plan_modules(const TrainOptions& options) {
  observe::MemoryLog log({.reserve_only = true});
  const kernels::FakeMode fake;
  const comm::WorldPtr world = comm::fake_world(/*rank=*/0, static_cast<int>(options.ranks()));
  const planning::Run run = planned_run(options, world);
  observe::ModuleWatch watch(*run.model);
  TrafficByModule traffic(world->traffic());
  watch.add(traffic);
  log.begin_step([] { return std::string(); });
  run.step();
  log.begin_step([] { return std::string(); });
  traffic.begin();
  const observe::ModuleWatch::Scope scope(watch);
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

planning::Machine calibrate_llama(const TrainOptions& options, const comm::WorldPtr& world) {
  check_same_start(*world, options.shared, model_config(options));
  keep_freed_memory();  // as llama_train
  return planning::calibrate(run_of(options), world, plan_options(options, std::nullopt));
}

planning::Search search_llama(const TrainOptions& o, const planning::Machine& machine,
                              std::int64_t gpus) {
  const models::LlamaConfig config = read_config(o.config);
  const std::int64_t heads = config.num_attention_heads;
  // All layers are equal unless --freeze tells them apart.
  const std::int64_t layers = o.freeze.empty() ? config.num_hidden_layers : 0;
  const auto cut_run = [&](const TrainingLayout& layout, std::int64_t few) {
    TrainOptions cut = with(o, layout);
    cut.layers = few;
    return run_of(cut);
  };
  return planning::search({.ranks = gpus,
                           .machine = machine,
                           .dp_replicate = o.dp_replicate,
                           .batch = o.batch,
                           .sequence = o.seq,
                           .first = {o.dp, o.tp, o.cp, o.ac, o.zero, o.accumulate},
                           .fixed_dp = is_given(o, "--dp"),
                           .fixed_tp = is_given(o, "--tp"),
                           .fixed_cp = is_given(o, "--cp"),
                           .fixed_ac = is_given(o, "--ac"),
                           .fixed_zero = is_given(o, "--zero") || o.reshard_last,
                           .fixed_accumulate = is_given(o, "--accumulate"),
                           .allows_tp = [heads](std::int64_t tp) { return heads % tp == 0; },
                           // What llama_train refuses with --cp is left out.
                           .allows_cp =
                               [&](std::int64_t cp) {
                                 return o.seq % (2 * cp) == 0 && o.dropout == 0 &&
                                        o.lora_dropout == 0;
                               },
                           .estimate = planning::estimate_by_plans(
                               cut_run, {layers, "model.layers"}, gpus, plan_options(o, machine)),
                           .batch_name = "--batch",
                           .text = flags_of});
}

std::string flags_of(const TrainingLayout& layout) {
  const auto above_1 = [](const char* flag, std::int64_t value) {
    return value > 1 ? fmt::format(" {} {}", flag, value) : "";
  };
  return fmt::format("--dp {} --tp {}{} --ac {} --zero {}{}", layout.dp, layout.tp,
                     above_1("--cp", layout.cp), layout.ac, layout.zero,
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

planning::PageOptions page_of(const TrainOptions& o) {
  return {.name = std::filesystem::path(o.config).stem().string(),
          .settings = fmt::format(
              "dp {}{} × tp {}, --batch {} --seq {} --ac {} --zero {}", o.dp * o.dp_replicate,
              o.cp > 1 ? fmt::format(" × cp {}", o.cp) : "", o.tp, o.batch, o.seq, o.ac, o.zero),
          .layers = read_config(o.config).num_hidden_layers,
          .configuration = o.listing};
}

}  // namespace llama
