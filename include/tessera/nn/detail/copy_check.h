#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/export.h"
#include "tessera/nn/parameter.h"

TESSERA_API_BEGIN
namespace tessera::nn::detail {

// A tensor on a slice of a mesh has copies on the other slices: on (dp, tp), a parameter that only
// a plan has put on mesh["tp"] has a copy for each coordinate of dp. Nothing reduces its gradient
// over dp, so copies that see different data drift apart. Ranks therefore compare them.

/// A tensor of which other ranks may hold copies.
struct CopiedTensor {
  std::string name;  ///< for messages: "the gradient of parameter 'norm.weight'"
  const ParameterSlot* slot = nullptr;
  at::Tensor values = {};  ///< local; undefined if this rank has none
  /// Every rank that holds a part of the parameter must have the same values, such as a step count.
  bool same_for_all_parts = false;
  /// Whether rounding differences, of sums in another order, are allowed.
  bool rounded = false;
};

/// How copies are compared.
struct CopyCheck {
  std::string what = {};                         ///< begins the message: "clip_grad_norm_"
  std::vector<std::string> distinct_along = {};  ///< dimensions along which parameters are distinct
  /// Whether ranks that differ only along dimensions of `root` hold copies of plain tensors. No
  /// mesh: all peers do.
  DeviceMesh root = {};
};

/// Throws Error, on all peers, if a tensor differs from its copy on another peer. The message names
/// the tensor, two ranks, the mesh dimension between them and the call that would reduce over it.
/// A tensor is compared with those of the same name that are at the same position of a mesh of the
/// same sizes; a name that only one peer has is not compared. Collective over the peers: one
/// exchange of digests between the hosts; a second one, of texts, if digests differ.
void check_copies(const tessera::detail::Peers& peers, const std::vector<CopiedTensor>& tensors,
                  const CopyCheck& check);

/// The dimensions of the root of `mesh` along which its ranks differ. This rank must be in the
/// root.
std::vector<bool> dims_in_root(const DeviceMesh& mesh);

}  // namespace tessera::nn::detail
TESSERA_API_END
