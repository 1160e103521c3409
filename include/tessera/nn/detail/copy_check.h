#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/export.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"

TESSERA_API_BEGIN
namespace tessera::nn::detail {

// The origin of a parameter is the full tensor that was split into the parameter's shards, or the
// seed from which the shards were generated. Ranks compare origins to detect ranks that have
// sharded different full tensors. The values of the shards would not show this error.

/// The origins of a module's own parameters. The object is attached to the module.
struct Origins {
  struct Origin {
    std::int64_t number = 0;  ///< hash that identifies the origin; never 0
    /// The parameter's tensor (with FSDP the shard) when the origin was recorded.
    tessera::detail::TensorIdentity tensor = nullptr;
    std::uint64_t version = 0;  ///< version counter of `tensor` when the origin was recorded
  };
  std::unordered_map<const ParameterSlot*, Origin> of;
};

std::int64_t origin_of_seed(std::uint64_t seed);
/// Returns the origin hash of the tensor `whole`: a hash of up to about 16 elements per dimension.
/// Two independent random tensors differ in all these elements.
std::int64_t origin_of_values(at::Tensor whole);

/// Records the origin hash of the parameter in `slot`.
void note_origin(const ParameterSlot& slot, std::int64_t number);
/// Returns the origin hash that note_origin() recorded for the parameter in `slot`. Returns 0 if
/// this rank has no shard, or if the parameter's values were written after note_origin(), for
/// example by a load.
std::int64_t origin_of(const ParameterSlot& slot);

/// Compares the origins of parameters between ranks. Returns "", or a message such as "the shards
/// of ... on rank 0 and rank 2 are parts of different tensors". All ranks of the mesh pass the same
/// parameters as pairs (name for messages, origin). Collective, in CPU memory. Throws Error, on all
/// ranks, if ranks pass different numbers of parameters.
std::string different_origins(const DeviceMesh& mesh,
                              const std::vector<std::pair<std::string, std::int64_t>>& origins);

/// Returns a number that grows with each write to `tensor` or its local tensor (the sum of
/// autograd's version counters); 0 for a tensor that was made in inference mode.
std::uint64_t written_version(const at::Tensor& tensor);

// Checks that copies of a tensor on different slices of a mesh are equal. Example: a mesh (dp, tp),
// and a parameter that is sharded over tp, but not by FSDP over dp. Each coordinate of dp has a
// copy of this parameter. The copies' gradients are not reduced over dp, so the copies become
// different if the ranks have different data.

/// A tensor that is compared with copies on other ranks.
struct CopiedTensor {
  std::string name;  ///< the tensor's name for messages: "the gradient of parameter 'norm.weight'"
  const ParameterSlot* slot = nullptr;
  at::Tensor values = {};  ///< this rank's local tensor; undefined if this rank has no shard
  /// Whether all shards of the tensor must have equal values, as the shards of a step counter do.
  bool same_for_all_parts = false;
  /// Whether the copies may differ by rounding, because ranks computed sums in different orders.
  bool rounded = false;
};

/// Options of check_copies().
struct CopyCheck {
  std::string what = {};  ///< the caller's name, for the message: "clip_grad_norm_"
  /// The mesh of the ranks on which plain tensors with equal names are copies of each other. If
  /// undefined, these ranks are all ranks that take part in the check.
  DeviceMesh root = {};
};

/// Throws Error, on all ranks of `peers`, if a tensor differs from its copy on another rank of
/// `peers`. The message names the tensor, two ranks with different copies, the mesh dimension along
/// which these ranks differ, and the call that would reduce the tensor over this dimension. Copies
/// are tensors of the same name on ranks with the same coordinates in meshes of equal sizes.
/// Collective over `peers`, in CPU memory: one exchange of hashes, and an exchange of texts if
/// hashes differ.
void check_copies(const tessera::detail::Peers& peers, const std::vector<CopiedTensor>& tensors,
                  const CopyCheck& check);

/// Returns for each dimension of the root mesh (the mesh from which `mesh` was sliced) whether
/// ranks of `mesh` have different coordinates along the dimension. This rank must be in the root
/// mesh.
std::vector<bool> dims_in_root(const DeviceMesh& mesh);

}  // namespace tessera::nn::detail
TESSERA_API_END
