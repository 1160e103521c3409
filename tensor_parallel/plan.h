#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/styles.h"

namespace tessera::tensor_parallel {

/// A module, and its FQN relative to the module that the plan is applied to ("" for that module
/// itself).
struct NamedModule {
  std::string fqn;
  nn::ModuleBase* module = nullptr;
};

/// One entry of a plan, applied to one module that the pattern of the entry matches.
struct Application {
  NamedModule target;
  StylePtr style;
  /// The placements that the style chooses, except for parameters that another entry, for a module
  /// inside this one, places.
  std::vector<std::pair<nn::SlotPtr, Placement>> parameters;
};

struct CheckedPlan {
  /// The plan's entries applied to modules, in the order of the plan.
  std::vector<Application> applications;
  /// The placement of each parameter that the plan names, in the order of the plan. Each parameter
  /// occurs once.
  std::vector<std::pair<nn::SlotPtr, Placement>> parameters;
  /// Parameters that no entry names and that become replicated. Excludes parameters that are
  /// already distributed or that differ on each rank.
  nn::NamedSlots unnamed;
};

/// The FQN in quotes, for messages: "'layers.0.q_proj'". For "" the text "the root module".
std::string quoted(const std::string& fqn);

/// Whether the parameter has different values on each rank of `mesh`
/// (ParameterSlot::set_distinct_along).
bool is_distinct_on(const nn::ParameterSlot& slot, const DeviceMesh& mesh);

/// Checks the plan without changes and without communication. Throws the Errors of
/// parallelize_module().
CheckedPlan check_plan(nn::ModuleBase& module, const DeviceMesh& mesh, const ParallelizePlan& plan);

}  // namespace tessera::tensor_parallel
