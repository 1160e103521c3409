#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/observe/verify.h"
#include "verify/seen_run.h"

namespace tessera::observe {

/// How far rounding alone moves the tensors of one rank's run, in the order of SeenRun.
struct Noise {
  std::vector<double> outputs, gradients;
};
/// Raises `noise` to at least the largest difference of `run` from `other`, a run of the same step.
/// Infinity for a tensor that one of the two lacks, or has in other sizes.
void raise_noise(Noise& noise, const SeenRun& run, const SeenRun& other);

/// Compares this rank's run on the mesh with its run on one rank. The same report on every rank.
/// Collective over `mesh`. Throws Error, on every rank, if the ranks did not call the same modules.
VerifyReport judge(const SeenRun& on_mesh, const SeenRun& one_rank, const Noise& noise,
                   const DeviceMesh& mesh, const VerifyOptions& options);

}  // namespace tessera::observe
