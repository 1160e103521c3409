#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/export.h"
#include "tessera/nn/parameter.h"

TESSERA_API_BEGIN
namespace tessera::nn::detail {

// Checks that copies of a tensor on different slices of a mesh are equal. On a mesh (dp, tp), a
// parameter that only a tensor-parallel plan distributes, over mesh["tp"], has one copy per
// coordinate of dp. Its gradient is not reduced over dp, so copies that see different data drift
// apart. Therefore the ranks compare them.

/// A tensor that may have copies on other ranks.
struct CopiedTensor {
  std::string name;  ///< the tensor's name for messages: "the gradient of parameter 'norm.weight'"
  const ParameterSlot* slot = nullptr;
  at::Tensor values = {};  ///< this rank's local tensor; undefined if this rank has no part
  /// Whether all shards must have equal values too, as for a step count.
  bool same_for_all_parts = false;
  /// Whether copies may differ by rounding, because their sums were computed in another order.
  bool rounded = false;
};

/// Options of check_copies().
struct CopyCheck {
  std::string what = {};  ///< the caller's name, which begins the message:
                          ///< "clip_grad_norm_"
  /// Mesh dimensions along which ranks have different parameters, which are not compared.
  std::vector<std::string> distinct_along = {};
  /// Plain tensors are copies of each other if their ranks differ only along dimensions of `root`.
  /// If `root` is undefined, plain tensors on all peers are copies.
  DeviceMesh root = {};
};

/// Throws Error, on all peers, if a tensor differs from its copy on another peer. The message names
/// the tensor, two ranks, the mesh dimension between them and the call that would reduce the tensor
/// over that dimension. Two tensors are compared if their names are equal and they are at the same
/// position of meshes with the same sizes; a name that only one peer has is not compared.
/// Collective over the peers: one exchange of digests between the hosts, and a second exchange, of
/// texts, if digests differ.
void check_copies(const tessera::detail::Peers& peers, const std::vector<CopiedTensor>& tensors,
                  const CopyCheck& check);

/// For each dimension of the root of `mesh`, whether ranks of `mesh` have different coordinates
/// along the dimension. This rank must be in the root mesh.
std::vector<bool> dims_in_root(const DeviceMesh& mesh);

}  // namespace tessera::nn::detail
TESSERA_API_END
