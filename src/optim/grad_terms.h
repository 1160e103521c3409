#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"
#include "tessera/optim/clip_grad.h"

namespace tessera::optim {

/// The gradients of some parameters, as one rank sees them.
struct GradTerms {
  /// All local gradients, neighbours in memory joined.
  std::vector<at::Tensor> locals;
  /// Of these, what this rank counts: plain ones, which every rank has whole, and the parts of
  /// distributed ones that it counts for all ranks that hold them; and the parts that others count.
  std::vector<at::Tensor> plain, owned, copies;
  /// The ranks that hold the distributed parameters; none if all are plain.
  DeviceMesh joint;
  /// Where the first parameter lies.
  std::optional<c10::Device> device;
};

/// Collective over the meshes of gradients that are pending sums, which are reduced. The joint
/// mesh is options.over, or without one the largest. Throws Error if it does not hold the others.
GradTerms collect_grads(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options);

/// The p-norm of all gradients: plain 0-d fp64, the same on every rank of the joint mesh. One
/// all-reduce.
at::Tensor total_norm(const GradTerms& terms, double norm_type);

/// Multiplies all gradients by a 0-d fp64 tensor.
void scale_grads(const GradTerms& terms, const at::Tensor& factor);

}  // namespace tessera::optim
