#pragma once

#include <ATen/core/Tensor.h>

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
  /// they lie on, which must hold the others. Needed where no rank knows them all (the stages of a
  /// pipeline).
  DeviceMesh over = {};
};

/// The norm of all gradients together, each element of the global tensors counted once: by one of
/// the ranks that hold it. Gradients may be plain (the same on every rank), or distributed on any
/// meshes of one world; those that are pending sums are reduced first. Parameters without a
/// gradient count as zeros.
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
