#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/nn/module.h"

namespace tessera::optim {

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)), where norm is the L2 norm of all of
/// them together, each element of the global tensors counted once (replicas are not). Gradients may
/// be plain (the same on every rank), or distributed on meshes of one world; gradients that are
/// pending sums are reduced first.
///
/// One all-reduce of one small vector per distinct root mesh, no host synchronisation. Collective
/// over those root meshes, whichever gradients are there. Returns the norm before clipping: a plain
/// 0-d fp32 tensor, the same on every rank. torch.nn.utils.clip_grad_norm_.
at::Tensor clip_grad_norm_(const std::vector<nn::SlotPtr>& parameters, double max_norm);

}  // namespace tessera::optim
