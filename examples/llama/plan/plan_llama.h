// Plans a Llama's run, searches its training layouts, and gives the flags of one.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "examples/llama/train/options/train_options.h"
#include "tessera/comm/trace.h"
#include "tessera/planning/calibrate.h"
#include "tessera/planning/page.h"
#include "tessera/planning/plan.h"
#include "tessera/planning/search.h"

namespace llama {

/// A plan of each kind of rank. Throws tessera::Error for what llama_train refuses.
tessera::planning::RunPlan plan_llama(const TrainOptions& options,
                                      const std::optional<tessera::planning::Machine>& machine);
/// Collectives of one kind that a module causes in a step.
struct ModuleTraffic {
  std::string module;  ///< "model.layers.*.mlp": all layers together; "": outside of the model
  bool backward = false;
  std::string group, collective;  ///< "tp", "all_gather"
  tessera::comm::Traffic traffic;
};
/// What rank 0 sends in the second step of the run, in the order of the step.
std::vector<ModuleTraffic> plan_modules(const TrainOptions& options);
/// A table with a line for each.
std::string to_text(const std::vector<ModuleTraffic>& modules);
/// Makes steps of the run on this CPU. Collective over `world`.
tessera::planning::Machine calibrate_llama(const TrainOptions& options,
                                           const tessera::comm::WorldPtr& world);
/// Training layouts of `gpus` ranks. What was given as a flag stays as it is.
tessera::planning::Search search_llama(const TrainOptions& options,
                                       const tessera::planning::Machine& machine,
                                       std::int64_t gpus);
/// As flags: "--dp 64 --tp 8 --ac full --zero 3"; with --cp and --accumulate where they are
/// above 1.
std::string flags_of(const tessera::planning::TrainingLayout& layout);
/// The run with this layout.
TrainOptions with(TrainOptions options, const tessera::planning::TrainingLayout& layout);
/// What the page says of a run.
tessera::planning::PageOptions page_of(const TrainOptions& options);

}  // namespace llama
