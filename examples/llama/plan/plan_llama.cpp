#include "examples/llama/plan/plan_llama.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "examples/llama/same_start.h"
#include "examples/llama/scalar_type.h"
#include "examples/llama/train/planned_run.h"
#include "examples/llama/train/setup.h"
#include "tessera/core/process.h"

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

bool is_given(const TrainOptions& options, const char* flag) {
  return std::ranges::find(options.given, flag) != options.given.end();
}

}  // namespace

planning::RunPlan plan_llama(const TrainOptions& options,
                             const std::optional<planning::Machine>& machine) {
  return planning::plan_run(run_of(options), options.ranks(), plan_options(options, machine));
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
