#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "plan/plan_matching.h"
#include "tessera/tensor_parallel/styles.h"

namespace tessera::tensor_parallel {

/// One entry of a plan on one module that its pattern matches.
struct Application {
  NamedModule target;
  StylePtr style;
  /// The style's placements, without parameters that an entry for a module below places.
  std::vector<std::pair<nn::SlotPtr, Placement>> parameters;
};

/// A parameter and the placement that a style gives it.
struct PlacedParameter {
  nn::SlotPtr slot;
  Placement placement;
};

/// A plan on a tree of modules. Everything is checked that can be before something is changed.
struct CheckedPlan {
  std::vector<Application> applications;    ///< in the plan's order
  std::vector<PlacedParameter> parameters;  ///< each once, in the plan's order
  /// Parameters that no entry names, which become replicated. Without those that are distributed
  /// already, or differ on each rank.
  nn::NamedSlots unnamed;
};

/// Whether the slot's parameter differs on each rank of `mesh` (ParameterSlot::set_distinct_along).
bool is_distinct_on(const nn::ParameterSlot& slot, const DeviceMesh& mesh);

/// Changes nothing and communicates nothing. Throws Error as parallelize_module() does.
CheckedPlan check_entries(nn::ModuleBase& module, const DeviceMesh& mesh,
                          const ParallelizePlan& plan);

}  // namespace tessera::tensor_parallel
