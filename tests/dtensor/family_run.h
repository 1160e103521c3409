#pragma once

#include <string>

#include "family_table.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::testing {

/// What ran: results and gradients of the reals, whole (undefined where there is none), how they
/// lay, and what was communicated.
struct Outcome {
  Tensors results, gradients;
  std::string lie_of_results, lie_of_gradients;
  std::string forward, backward;
};

/// Runs an operation forward and backward on operands that lie as `lies` says. Collective.
Outcome run_as(const Operation& operation, const char* lies, const DeviceMesh& mesh);

/// What is to come of it: of plain tensors, or, of random numbers, of replicated ones.
Outcome expected_of(const Operation& operation, const DeviceMesh& mesh);

}  // namespace tessera::testing
