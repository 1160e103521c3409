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

// The origin of a parameter is the full tensor or the seed from which the parameter's shards were
// made. Ranks compare origins, because shards do not show whether ranks have sharded different
// tensors.

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
/// Returns the hash that note_origin() recorded for the parameter in `slot`. Returns 0 without a
/// shard on this rank, or if the parameter was written after note_origin().
std::int64_t origin_of(const ParameterSlot& slot);

/// Compares the origins of parameters between ranks. Returns "", or a message that names a
/// parameter and two ranks. `origins`: pairs (name, origin) of the same parameters on all ranks.
/// Collective, in CPU memory. Throws Error on all ranks for different numbers of parameters.
std::string different_origins(const DeviceMesh& mesh,
                              const std::vector<std::pair<std::string, std::int64_t>>& origins);

/// Returns a number that grows with each write to `tensor` or its local tensor; 0 for an inference
/// tensor.
std::uint64_t written_version(const at::Tensor& tensor);

// Checks that copies of a tensor on different slices of a mesh are equal. Example: on a mesh (dp,
// tp), a parameter is sharded over tp but not by FSDP. Gradients are then not reduced over dp, so
// the copies become different.

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
  /// The ranks on which plain tensors with equal names are copies. Undefined means all ranks of the
  /// check.
  DeviceMesh root = {};
};

/// Throws Error, on all ranks of `peers`, if a tensor differs from its copy on another rank of
/// `peers`. Copies have the same name and the same coordinates in meshes of equal sizes. Collective
/// over `peers`, in CPU memory.
void check_copies(const tessera::detail::Peers& peers, const std::vector<CopiedTensor>& tensors,
                  const CopyCheck& check);

/// Returns, for each dimension of the root mesh of `mesh`, whether ranks of `mesh` have different
/// coordinates in this dimension. This rank must be in the root mesh.
std::vector<bool> dims_in_root(const DeviceMesh& mesh);

}  // namespace tessera::nn::detail
TESSERA_API_END
