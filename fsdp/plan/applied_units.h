#pragma once

#include <string>
#include <vector>

#include "tessera/core/placement.h"
#include "tessera/fsdp/wrap_policy.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"
#include "unit/module_tree.h"

namespace tessera::fsdp {

/// A plan's decisions on a parameter. Functions cannot be compared, but their results can.
struct AppliedParameter {
  std::string fqn;
  Placement placement;
  DeviceMesh mesh;
  bool extended;  ///< gathered by an extension

  friend bool operator==(const AppliedParameter&, const AppliedParameter&) = default;
};

/// A plan's decisions on a module.
struct AppliedUnit {
  std::string line;  ///< its line in the plan's table
  DeviceMesh mesh;
  std::vector<AppliedParameter> parameters;

  friend bool operator==(const AppliedUnit&, const AppliedUnit&) = default;
};

/// The plan that was applied to a root, which keeps it.
struct AppliedUnits {
  std::vector<AppliedUnit> units;
  ModuleTree::Modules modules;  ///< that the plan made units
};

/// Throws Error, with what differs, unless they are the same.
void check_same(const std::vector<AppliedUnit>& applied, const std::vector<AppliedUnit>& now);

/// A unit's line in the table of a plan: everything except its parameters' names and the options
/// that are functions.
std::string line_of(const PlannedUnit& unit);

}  // namespace tessera::fsdp
