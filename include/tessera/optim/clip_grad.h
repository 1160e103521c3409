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
  /// A mesh of all ranks that have parameters. Default: the largest root mesh of the parameters;
  /// this mesh must contain all other root meshes. Set `over` for pipeline stages with separate
  /// meshes.
  DeviceMesh over = {};
};

/// Returns the norm of all gradients together: a plain 0-d fp32 tensor, equal on every rank. Like
/// torch.nn.utils.get_total_norm. Elements with copies on several ranks count once. Experts and
/// other parameters that differ on slices of a mesh (ParameterSlot::set_distinct_along) all count.
///
/// Gradients may be plain (equal on every rank) or distributed; Partial gradients are reduced
/// first. Missing gradients count as zeros. If any rank has an infinite or NaN value, the norm is
/// infinite or NaN.
///
/// Collective over the ranks of all meshes: one all-reduce; the CPU does not wait. Without
/// distributed parameters and `over`, nothing is communicated. Throws Error for a norm_type of 0 or
/// less, and without `over` if no mesh contains all others.
at::Tensor grad_norm(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options = {});

/// Multiplies all gradients by min(1, max_norm / (norm + 1e-6)) and returns the norm (grad_norm()).
/// Like torch.nn.utils.clip_grad_norm_. Collective like grad_norm(). Throws Error for a negative
/// max_norm, and the Errors of grad_norm(); gradients are then unchanged.
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
/// the factor to Optimizer::step(factor), to save a pass over all gradients.
ClipFactor clip_factor(const std::vector<nn::SlotPtr>& parameters, double max_norm,
                       const NormOptions& options = {});

namespace detail {

/// Returns text that names the parameters with NaN or infinite gradients and, if known, the ranks
/// that computed these gradients; "" if all gradients are finite. To find these ranks, FSDP saves
/// the smallest gradient of each unit before the reduction. Equal on every rank. Collective like
/// grad_norm(). Waits for the device.
std::string describe_nonfinite(const std::vector<nn::SlotPtr>& parameters,
                               const NormOptions& options = {});

}  // namespace detail

}  // namespace tessera::optim
TESSERA_API_END
