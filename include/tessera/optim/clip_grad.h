#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"

TESSERA_API_BEGIN
namespace tessera::optim {

/// Options of a gradient norm.
struct NormOptions {
  /// The order p of the norm (sum |x|^p)^(1/p): any p > 0; infinity for max |x|.
  double norm_type = 2.0;
  /// Whether to throw Error, on every rank, if the norm is infinite or NaN. The message names the
  /// parameters with such gradients. The CPU then waits for the device.
  bool error_if_nonfinite = false;
  /// A mesh of all ranks that have parameters. Default: the largest of the parameters' root meshes,
  /// which must contain the others. Must be set if no rank knows all meshes, for example if each
  /// pipeline stage has its own mesh.
  DeviceMesh over = {};
};

/// Returns the norm of all gradients together. Each element of a gradient is counted once, even if
/// several ranks store the element. Slices of the root mesh, such as mesh["tp"] at each coordinate
/// of dp, can have copies of a parameter; the copies count once. Different parameters on these
/// slices (ParameterSlot::set_distinct_along, FSDP's Options::parameter_mesh) all count. An
/// infinite or NaN value on any rank makes the norm infinite or NaN on every rank. Gradients may be
/// plain (the same on every rank) or distributed on any meshes of one world; Partial gradients are
/// reduced first. Parameters without a gradient count as zeros.
///
/// Collective over the ranks of all meshes together, with or without gradients: one all-reduce of
/// one or two numbers, for which the CPU does not wait. Returns a plain 0-d fp32 tensor, equal on
/// every rank. If all parameters are plain and `over` is not set, the result is each rank's own
/// norm, and nothing is communicated. Equals torch.nn.utils.get_total_norm.
///
/// Throws Error, before any communication, for a norm_type that is not above 0, and, if `over` is
/// not set, if no mesh contains all other meshes.
at::Tensor grad_norm(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options = {});

/// Multiplies all gradients by min(1, max_norm / (norm + 1e-6)), where norm is grad_norm(), and
/// returns the norm before clipping. Collective like grad_norm(). Throws Error for a negative
/// max_norm, and the Errors of grad_norm(); then no gradient is scaled. Equals
/// torch.nn.utils.clip_grad_norm_.
at::Tensor clip_grad_norm_(const std::vector<nn::SlotPtr>& parameters, double max_norm,
                           const NormOptions& options = {});

/// The norm and the clip factor that clip_factor() returns, on the device of the gradients.
struct ClipFactor {
  at::Tensor norm;  ///< the norm before clipping: a plain 0-d fp32 tensor
  /// The clip factor: a plain 0-d fp64 tensor, NaN if the norm is NaN or infinite. See
  /// Optimizer::step(factor) for the effect of NaN.
  at::Tensor factor;
};

/// Computes the norm and the factor of clip_grad_norm_(), but does not change the gradients. Pass
/// the factor to Optimizer::step(factor), which then scales the gradients as part of the update.
/// This saves a pass over all gradients.
ClipFactor clip_factor(const std::vector<nn::SlotPtr>& parameters, double max_norm,
                       const NormOptions& options = {});

namespace detail {

/// Returns the names of parameters whose gradients have NaN or infinite values, with the ranks that
/// computed the values: "rank 1 passed non-finite values to the reduction of parameter
/// 'head.bias'". If no such rank is known: "on rank 0, these gradients are not finite: parameter
/// 'head.weight'". Returns "" if all gradients are finite. To make the ranks known, FSDP saves one
/// gradient of each unit before the reduction: the gradient with the fewest elements. The result is
/// the same on every rank. Collective like grad_norm(). Waits for the device.
std::string describe_nonfinite(const std::vector<nn::SlotPtr>& parameters,
                               const NormOptions& options = {});

}  // namespace detail

}  // namespace tessera::optim
TESSERA_API_END
