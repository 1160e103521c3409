#pragma once

#include <string>

#include "family_table.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::testing {

/// What an operation gave: full results and gradients of the reals (undefined where there is none),
/// their layouts, and what was communicated.
struct Outcome {
  Tensors results, gradients;
  std::string layout_of_results, layout_of_gradients;
  std::string forward, backward;
};

/// Runs an operation forward and backward on operands with these layouts. Collective.
Outcome run_as(const Operation& operation, const char* layouts, const DeviceMesh& mesh);

/// The oracle: the operation on plain tensors, or on replicated ones if it draws random numbers.
Outcome expected_of(const Operation& operation, const DeviceMesh& mesh);

}  // namespace tessera::testing
