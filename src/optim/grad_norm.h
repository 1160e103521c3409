// Collects the local gradients for a norm, and determines which of these gradients this rank
// includes in the norm.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tessera/kernels/detail/lists.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"
#include "tessera/optim/clip_grad.h"

namespace tessera::optim {

/// The gradients of some parameters on one rank, grouped by how a norm includes them.
struct GradTerms {
  /// All local gradients. Tensors that are adjacent in memory are joined in all lists of GradTerms.
  std::vector<at::Tensor> locals;
  /// Every gradient is in one of three lists: plain gradients, which are equal on every rank; local
  /// tensors that this rank includes in the norm; and copies that another rank includes.
  std::vector<at::Tensor> plain, owned, copies;
  /// The mesh of all ranks that have distributed parameters; undefined if all parameters are plain.
  DeviceMesh joint;
  /// The device of the first parameter; nullopt without parameters.
  std::optional<c10::Device> device;
};

/// Collects the gradients of `parameters`. Reduces gradients that are pending sums, which is
/// collective over their meshes. The joint mesh is options.over, by default the largest root mesh.
/// Throws Error if the joint mesh does not contain the other meshes.
GradTerms collect_grads(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options);

/// The p-norm of all gradients, the same on every rank of the joint mesh, and the factor that clips
/// the gradients to `max_norm` (undefined without max_norm). Both are plain 0-d tensors. One
/// all-reduce.
kernels::NormAndFactor total_norm(const GradTerms& terms, double p,
                                  std::optional<double> max_norm = std::nullopt);

}  // namespace tessera::optim
