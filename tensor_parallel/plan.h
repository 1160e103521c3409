#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/styles.h"

namespace tessera::tensor_parallel {

/// A module below the one that a plan is applied to, whose own FQN is empty.
struct NamedModule {
  std::string fqn;
  nn::ModuleBase* module = nullptr;
};

/// One entry of a plan on one module that its pattern matches.
struct Application {
  NamedModule target;
  StylePtr style;
  /// The placements by the style, without parameters that the entry of a module below places.
  std::vector<std::pair<nn::SlotPtr, Placement>> parameters;
};

struct CheckedPlan {
  std::vector<Application> applications;                      ///< in the order of the plan
  std::vector<std::pair<nn::SlotPtr, Placement>> parameters;  ///< each once, in the same order
  /// Parameters that no entry names and that become replicated. Not those that are distributed
  /// already, or differ on each rank.
  nn::NamedSlots unnamed;
};

/// "'layers.0.q_proj'"; "the root module" for "".
std::string quoted(const std::string& fqn);

/// Whether the parameter differs on each rank of `mesh` (ParameterSlot::set_distinct_along).
bool is_distinct_on(const nn::ParameterSlot& slot, const DeviceMesh& mesh);

/// Changes nothing and communicates nothing. Throws Error as parallelize_module() does.
CheckedPlan check_plan(nn::ModuleBase& module, const DeviceMesh& mesh, const ParallelizePlan& plan);

}  // namespace tessera::tensor_parallel
