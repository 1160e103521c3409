#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"

namespace tessera::optim {

struct NormOptions {
  /// p of (sum |x|^p)^(1/p); any p > 0, infinity for max |x|.
  double norm_type = 2.0;
  /// Throw Error, on every rank, for a norm that is infinite or not a number. Costs a
  /// synchronisation with the device.
  bool error_if_nonfinite = false;
  /// The mesh whose ranks hold the parameters together. Default: the largest of the meshes that
  /// they lie on or are slices of, which must hold the others. Needed where no rank knows them all
  /// (the stages of a pipeline, each on a mesh of its own).
  DeviceMesh over = {};
  /// Dimensions along which slices of a mesh hold other parameters instead of copies: "pp" for
  /// pipeline stages on mesh["dp"] of (pp, dp), "ep" for experts on mesh["edp"] of (ep, edp). A
  /// parameter on a slice without them counts at each coordinate of these, but only at coordinate 0
  /// of all others that the slice lacks. Names of `over`'s dimensions or of the mesh sliced; an
  /// unknown one is an Error, on every rank. FSDP's parameters with a mesh of their own
  /// (Options::parameter_mesh) are known to differ within their unit's mesh.
  std::vector<std::string> distinct_along = {};
};

/// The norm of all gradients together, each element of the global tensors counted once: by one of
/// the ranks that hold it. A value that is infinite or not a number is seen on every rank,
/// whichever rank has it, counted or not. Gradients may be plain (the same on every rank), or
/// distributed on any meshes of one world; those that are pending sums are reduced first.
/// Parameters without a gradient count as zeros.
///
/// One all-reduce of one or two numbers over the ranks of all meshes together, no host
/// synchronisation. Collective over those ranks, whichever gradients are there. Returns a plain 0-d
/// fp32 tensor, the same on every rank. torch.nn.utils.get_total_norm.
at::Tensor grad_norm(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options = {});

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)), where norm is grad_norm(): collective
/// as that is. Returns the norm before clipping. torch.nn.utils.clip_grad_norm_.
at::Tensor clip_grad_norm_(const std::vector<nn::SlotPtr>& parameters, double max_norm,
                           const NormOptions& options = {});

}  // namespace tessera::optim
