// Functions that compare values between ranks, or make one decision for all ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/core/detail/layout.h"
#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_BEGIN
namespace tessera {

class DistributedTensor;

/// Throws Error, on every rank, if the ranks of the mesh have different sizes, dtypes or
/// placements. Collective. from_local and distribute_tensor make this check with
/// TESSERA_DEBUG=1, and in builds without NDEBUG unless TESSERA_DEBUG=0.
void check_agreement(const DistributedTensor& tensor);

}  // namespace tessera

namespace tessera::detail {

/// A process group whose ranks must have equal copies of tensors.
struct Peers {
  comm::Communicator* group = nullptr;  ///< process group of the ranks that must have equal copies
  std::vector<int> ranks;               ///< world rank of each member of the process group
  c10::Device device;                   ///< device of the tensors on this rank
};

/// Returns all ranks of a mesh as Peers.
Peers peers_of(const DeviceMesh& mesh);
/// Returns the ranks along mesh dimension `dim` that include this rank.
Peers peers_along(const DeviceMesh& mesh, int dim);

/// Whether the ranks along mesh dimension `mesh_dim` have equal copies: `layout` is neither sharded
/// nor partial over that mesh dimension.
inline bool is_replicated_on(const Layout& layout, int mesh_dim) {
  return layout.sharded_dim(mesh_dim) < 0 && layout.partial_on(mesh_dim) == nullptr;
}

/// This rank's copy of a tensor that must be equal on all ranks of a Peers group.
struct Replica {
  std::string name;  ///< the tensor's name for messages: "parameter 'norm.weight'"
  at::Tensor local;  ///< the copy, a plain tensor; undefined if this rank has no copy
};

/// How the copies of a tensor are compared between ranks.
enum class Equality : std::uint8_t {
  kBitwise,
  /// Permits rounding errors of sums: differences up to the square root of the dtype's epsilon,
  /// relative to the largest value among the compared values.
  kRounded,
};

/// Returns the largest difference, relative to the largest value, that Equality::kRounded permits.
double tolerance_of(c10::ScalarType type);

/// Returns a hash of a plain tensor's bytes, in element order; 0 if undefined, meta or fake.
std::int64_t hash_of_values(const at::Tensor& tensor);

/// Throws Error, on all peers, unless the replicas of all peers are equal. The message has `what`,
/// the first difference on two ranks, and `remedy`. All peers pass the same replicas in the same
/// order. Collective; equal replicas cost one exchange of hashes.
void check_replicas(const Peers& peers, const std::vector<Replica>& replicas, Equality equality,
                    const std::string& what, const std::string& remedy);

/// Returns the global sizes of a tensor with `placements` on `mesh` and this rank's local tensor
/// `local`. `what`: the caller's name. Collective if a dimension is sharded, except for meta
/// tensors, for which even shards are assumed. Throws Error, on every rank, unless the local sizes
/// are those of torch.chunk. No StridedShard is allowed.
std::vector<std::int64_t> agreed_sizes(const std::string& what, const at::Tensor& local,
                                       const DeviceMesh& mesh, const Placements& placements);

/// Whether ranks compare the sizes, dtype and placements of each new distributed tensor. If
/// TESSERA_DEBUG is set, its value decides; otherwise only builds without NDEBUG compare.
bool checks_agreement();

/// Whether TESSERA_DEBUG enables checks that need collectives in the middle of a step. Each thread
/// reads the environment variable once.
bool checks_calls();

/// Runs `work`, which must not communicate. Collective. If a rank throws, every rank throws Error
/// with the message of the first such rank. `what`: the name of `work` in the message.
void run_or_fail_together(const DeviceMesh& mesh, std::string_view what,
                          const std::function<void()>& work);

/// Throws Error, on every rank, unless `tensors`, the plain arguments of operator `what`, have the
/// same values on all ranks of the mesh. Collective.
void check_replicated(const DeviceMesh& mesh, std::string_view what,
                      const std::vector<at::Tensor>& tensors);

// With TESSERA_DEBUG=1, messages name the module whose forward this thread runs. These functions
// record the module.

/// Records that the forward of the module with FQN `fqn` begins. The caller must call
/// pop_module_name() when the forward ends.
void push_module_name(std::string fqn);
void pop_module_name();
/// Returns a text for messages that names the innermost module, such as " in 'layers.0.attn'";
/// empty if no module is recorded.
std::string in_module();

}  // namespace tessera::detail
TESSERA_API_END
