// The ranks' findings, each on its own tensors, and their combined result.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/observe/verify.h"

namespace tessera::observe {

/// How one tensor of this rank on the mesh compares with that of one rank.
struct Finding {
  std::string name, fqn;            ///< of SeenTensor
  std::string layout;               ///< on the mesh; or why there is nothing to compare
  std::vector<std::int64_t> at{};   ///< the element that is off by most
  std::string value{}, recorded{};  ///< there, on the mesh and on one rank
  double distance = 0;              ///< infinity: they can't be compared
  double largest = 0;               ///< value of one rank's tensor
  double epsilon = 0;               ///< of the coarser type
  double noise = 0;                 ///< how far rounding moves it on one rank
};

/// The findings of all ranks on tensors of one kind.
struct Together {
  std::vector<VerifyDifference> differences;  ///< in the order of rank 0
  double largest = 0;                         ///< distance that is none, as a share of the kind's
                                              ///< largest value
};

/// The same on every rank. Collective over `mesh`.
Together put_together(const std::vector<Finding>& own, const DeviceMesh& mesh);

}  // namespace tessera::observe
