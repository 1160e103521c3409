// What ranks compare, and agree on, before they continue.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/core/layout.h"
#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Ranks that must have equal copies.
struct Peers {
  comm::Communicator* group = nullptr;  ///< of these ranks
  std::vector<int> ranks;               ///< world ranks, in the order of the group
  c10::Device device;                   ///< of the group's tensors
};

/// All ranks of a mesh.
Peers peers_of(const DeviceMesh& mesh);
/// The ranks along one dimension of a mesh, through this rank.
Peers peers_along(const DeviceMesh& mesh, int dim);

/// Whether the ranks along `mesh_dim` have copies: a layout neither shards nor is partial there.
inline bool is_replicated_on(const Layout& layout, int mesh_dim) {
  return layout.sharded_dim(mesh_dim) < 0 && layout.partial_on(mesh_dim) == nullptr;
}

/// A copy of what all peers have.
struct Replica {
  std::string name;  ///< for messages: "parameter 'norm.weight'"
  at::Tensor local;  ///< plain, on this rank; undefined: this rank has none
};

/// How copies are compared.
enum class Equality : std::uint8_t {
  kBitwise,
  /// Allows the differences that another order of summation may cause: up to the square root of the
  /// type's epsilon, relative to the largest value in the block.
  kRounded,
};

/// Hashes the bytes of a plain tensor, in the order of its elements. 0 for a tensor without values.
std::int64_t hash_of_values(const at::Tensor& tensor);

/// Throws Error, on all peers, unless their replicas are equal. The message begins with `what`,
/// names the first replica that differs, the ranks, and the first element with two of its values,
/// and ends with `remedy`. All peers give as many, in the same order. Collective. What is equal
/// costs one hash of the values, which the hosts exchange: no tensor is sent, and no traffic is
/// counted.
void check_replicas(const Peers& peers, const std::vector<Replica>& replicas, Equality equality,
                    const std::string& what, const std::string& remedy);

/// The global sizes of a tensor; `local` is this rank's part by `placements` on `mesh`. Each Shard
/// must name a dimension of `local`; none may be strided. If any is sharded, the ranks exchange the
/// sizes of their parts, between the hosts. Throws Error, on every rank, if the parts are not those
/// that torch.chunk makes; `what` names the caller. Collective, but not for meta tensors, whose
/// shards count as even.
std::vector<std::int64_t> agreed_sizes(const std::string& what, const at::Tensor& local,
                                       const DeviceMesh& mesh, const Placements& placements);

// The modules whose forwards this thread is in, for messages of TESSERA_DEBUG=1.

/// `fqn`: of a module that begins its forward; it ends with pop_module_name().
void push_module_name(std::string fqn);
void pop_module_name();
/// " in 'layers.0.attn'", of the innermost module; empty if none has a name.
std::string in_module();

}  // namespace tessera::detail
TESSERA_API_END
