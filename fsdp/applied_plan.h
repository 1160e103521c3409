#pragma once

#include <string>
#include <vector>

#include "module_tree.h"
#include "tessera/core/placement.h"
#include "tessera/fsdp/policy.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// What a plan makes of a parameter. Functions cannot be compared, but what they answer can.
struct AppliedParameter {
  std::string fqn;
  Placement placement;
  DeviceMesh mesh;
  bool extended;  ///< gathered by an extension

  friend bool operator==(const AppliedParameter&, const AppliedParameter&) = default;
};

/// What a plan makes of a module.
struct AppliedUnit {
  std::string line;  ///< of the plan's table
  DeviceMesh mesh;
  std::vector<AppliedParameter> parameters;

  friend bool operator==(const AppliedUnit&, const AppliedUnit&) = default;
};

/// What was applied to a root, which keeps it.
struct AppliedPlan {
  std::vector<AppliedUnit> units;
  ModuleTree::Modules modules;  ///< that the plan made units
};

/// Throws Error, with what differs, unless they are the same.
void check_same(const std::vector<AppliedUnit>& applied, const std::vector<AppliedUnit>& now);

/// What a plan of `root` is made of: modules that are in no unit, or in one that root's own plan
/// made, so that the same policy gives the same plan again. Throws Error if there is none.
ModuleTree plannable_tree(const nn::ModuleBase& root, const char* asked);

}  // namespace tessera::fsdp
