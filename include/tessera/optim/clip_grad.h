#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"

TESSERA_API_BEGIN
namespace tessera::optim {

/// Which norm, over which ranks.
struct NormOptions {
  /// p of (sum |x|^p)^(1/p); any p > 0, infinity for max |x|.
  double norm_type = 2.0;
  /// Throw Error, on every rank, if the norm is infinite or not a number, with
  /// describe_nonfinite(). The host then waits for the device.
  bool error_if_nonfinite = false;
  /// The mesh whose ranks together hold all parameters. Default: the largest of the meshes that the
  /// parameters' meshes are slices of; it must contain the others. Needed where no rank knows all
  /// of them, as with pipeline stages that each have their own mesh.
  DeviceMesh over = {};
  /// Mesh dimensions along which slices of the mesh hold different parameters instead of copies:
  /// "pp" for pipeline stages on mesh["dp"] of (pp, dp), "ep" for experts on mesh["edp"] of (ep,
  /// edp). A parameter on such a slice is counted at every coordinate of these dimensions, and only
  /// at coordinate 0 of the other dimensions that the slice lacks. Names of dimensions of `over` or
  /// of the mesh that was sliced; an unknown name is an Error, on every rank. Not needed for FSDP's
  /// parameters with their own mesh (Options::parameter_mesh), whose slots record it.
  std::vector<std::string> distinct_along = {};
};

/// The norm of all gradients together. Each element of the global tensors is counted once, by one
/// of the ranks that hold it. A value that is infinite or not a number shows on every rank, also if
/// it is in a copy that is not counted. Gradients may be plain (the same on every rank) or
/// distributed on any meshes of one world; pending sums are reduced first. Parameters without a
/// gradient count as zeros.
///
/// Collective over the ranks of all meshes together, whether they have gradients or not: one
/// all-reduce of one or two numbers, for which the host does not wait. Returns a plain 0-d fp32
/// tensor, the same on every rank; without `over`, and of parameters that are all plain, it is
/// each rank's own norm, and nothing is communicated. torch.nn.utils.get_total_norm.
///
/// Throws Error, before anything is communicated, for a norm_type that is not above 0, for an
/// unknown name in distinct_along, and, without `over`, for meshes where none holds all others.
at::Tensor grad_norm(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options = {});

/// Which gradients are not finite, for a message: "rank 1 brought what is not finite to the
/// reduction of parameter 'head.bias'"; if no rank is known to be the source, as for parameters
/// that are not FSDP's, "not finite on rank 0 is that of parameter 'head.weight'"; "" if all are
/// finite. For that, FSDP keeps the smallest gradient of each unit, from the step's last reduction.
/// The same on every rank. Collective as grad_norm(); waits for the device, so it is for a step
/// that has failed.
std::string describe_nonfinite(const std::vector<nn::SlotPtr>& parameters,
                               const NormOptions& options = {});

/// Multiplies all gradients by min(1, max_norm / (norm + 1e-6)), where norm is grad_norm(), and
/// returns the norm before clipping. Collective like grad_norm(). Throws Error for a negative
/// max_norm, and what grad_norm() throws; no gradient is scaled then.
/// torch.nn.utils.clip_grad_norm_.
at::Tensor clip_grad_norm_(const std::vector<nn::SlotPtr>& parameters, double max_norm,
                           const NormOptions& options = {});

/// What clip_grad_norm_() would multiply by and return, on the device of the gradients.
struct ClipFactor {
  at::Tensor norm;    ///< plain, 0-d fp32
  at::Tensor factor;  ///< plain, 0-d fp64
};

/// As clip_grad_norm_(), but leaves the gradients as they are: Optimizer::step(factor) multiplies
/// them as it reads them, which saves a pass over all of them.
ClipFactor clip_factor(const std::vector<nn::SlotPtr>& parameters, double max_norm,
                       const NormOptions& options = {});

}  // namespace tessera::optim
TESSERA_API_END
