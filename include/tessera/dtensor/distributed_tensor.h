#pragma once

#include <ATen/core/Tensor.h>

#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "tessera/core/layout.h"
#include "tessera/core/placement.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

/// How a tensor lies: on which mesh, and how.
struct ShardingSpec {
  DeviceMesh mesh;
  LayoutPtr layout = nullptr;
  friend bool operator==(const ShardingSpec&, const ShardingSpec&) = default;
};

/// How a redistribution communicates.
struct RedistributeOptions {
  std::optional<c10::ScalarType> forward_dtype{};  ///< cast before; the result keeps it
  /// The gradient is cast before its way back, and then to the type of the tensor.
  std::optional<c10::ScalarType> backward_dtype{};
  /// Return while the last collective is under way; the first use of the values waits for it, as
  /// does, on CPU, every later collective of a redistribution that is not asynchronous itself. A
  /// failure of a peer is thrown there. The gradient travels back in the same way.
  bool async = false;
};

struct DistributeOptions {
  /// Position in mesh.ranks() of the one rank whose values count; the others give a tensor of the
  /// same sizes and type. Collective, and no gradient. Without: all ranks hold the same values.
  std::optional<int> source{};
};

/// A tensor spread over a mesh. It *is* an at::Tensor (implicitly convertible, every at:: function,
/// autograd and torch::optim take it): global sizes outside, a local tensor inside. This handle
/// adds what is particular to it. PyTorch's DTensor.
///
/// Whatever makes or redistributes one throws Error, on every rank, for a Partial that elements of
/// its type do not have: bool has max, min and product, integers all but avg, complex numbers sum
/// and avg.
class DistributedTensor {
 public:
  DistributedTensor() = default;
  /// The typed handle of a tensor that is distributed; throws Error for a plain one.
  explicit DistributedTensor(at::Tensor tensor);

  /// Wraps this rank's part. Without `sizes` the global sizes are computed from the local ones
  /// (even shards assumed; with uneven shards pass them). No communication, but for the check of
  /// debug builds (check_agreement).
  /// Gradient: Shard -> Shard, Replicate -> Replicate, Partial -> Replicate; or as
  /// `grad_placements` say (Partial for a replicated tensor: each rank gets its own term).
  static DistributedTensor from_local(const at::Tensor& local, const DeviceMesh& mesh,
                                      const Placements& placements,
                                      std::optional<std::vector<std::int64_t>> sizes = {},
                                      std::optional<Placements> grad_placements = {});
  static DistributedTensor from_local(const at::Tensor& local, const ShardingSpec& spec,
                                      std::vector<std::int64_t> sizes);

  /// This rank's part. Gradient: the local gradient is taken to lie as `grad_placements` say
  /// (default: as this tensor, Partial as Replicate); a leaf's `.grad` ends as the leaf lies.
  at::Tensor to_local(std::optional<Placements> grad_placements = {}) const;
  /// To other placements on the same mesh. Collective if data must move. Gradient: a
  /// redistribution back (to Replicate where this tensor is Partial).
  DistributedTensor redistribute(const Placements& placements) const;
  DistributedTensor redistribute(LayoutPtr layout) const;
  DistributedTensor redistribute(const Placements& placements,
                                 const RedistributeOptions& options) const;
  /// To another mesh of the same world: of the same ranks, however arranged (one all-to-all, or
  /// none where each rank has what it will hold); or a slice of this mesh through this rank, or a
  /// mesh that this one is a slice of: the tensor is then taken to be replicated on the dimensions
  /// that the slice lacks, and so is the gradient. Throws Error for any other mesh.
  DistributedTensor redistribute(const DeviceMesh& mesh, const Placements& placements,
                                 const RedistributeOptions& options = {}) const;
  /// The whole tensor, plain, on every rank. Collective. Gradient: taken to lie as
  /// `grad_placements` say (default: the same on every rank).
  at::Tensor full_tensor(std::optional<Placements> grad_placements = {}) const;

  Placements placements() const;
  LayoutPtr layout() const;
  const ShardingSpec& spec() const;
  const DeviceMesh& mesh() const;
  const at::Tensor& tensor() const { return tensor_; }
  operator const at::Tensor&() const { return tensor_; }

 private:
  at::Tensor tensor_;
};

/// Whether a tensor is distributed. Write tessera::is_distributed: at:: has an unrelated function
/// of that name.
bool is_distributed(const at::Tensor& tensor);
/// The spec of a distributed tensor. Throws Error for a plain one.
const ShardingSpec& sharding_spec(const at::Tensor& tensor);
/// The local tensor of a distributed tensor without autograd, or the tensor itself if it is plain.
const at::Tensor& local_tensor(const at::Tensor& tensor);
/// A distributed tensor around `local` below autograd (a leaf without gradient history).
at::Tensor make_distributed(const at::Tensor& local, const ShardingSpec& spec,
                            std::vector<std::int64_t> sizes);

/// Leaves the gradient of a distributed leaf as backward makes it, possibly Partial, instead of
/// bringing it to the leaf's layout: for a caller that reduces many of them together. Returns false
/// if somebody has seen to this leaf already: another caller, or an operator that has met it.
bool leave_gradient_pending(const at::Tensor& leaf);

/// Spreads `tensor`, the same on every rank, over the mesh: each rank keeps its slice, no
/// communication. On a meta tensor: a meta local of the right shape.
/// Gradient: a redistribution to Replicate.
DistributedTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    const Placements& placements);
DistributedTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    const Placements& placements, const DistributeOptions& options);

/// Sizes, type, mesh and placements, then this rank's part and where it lies in the whole. What is
/// partial is reduced first, which is collective: call it on every rank then, or local_to_string.
/// (Streaming the plain at::Tensor handle throws: libtorch's printer reads memory that a
/// distributed tensor lacks.)
std::string to_string(const DistributedTensor& tensor);
std::ostream& operator<<(std::ostream& stream, const DistributedTensor& tensor);
/// The same, but what is partial is shown as the term that this rank holds. Never collective.
std::string local_to_string(const DistributedTensor& tensor);

/// Throws Error, on every rank, if the ranks of the tensor's mesh disagree on its sizes, type or
/// placements. Collective. In builds without NDEBUG, or with TESSERA_DEBUG=1 in the environment,
/// from_local and distribute_tensor do it themselves, and are then collective too, also where a
/// rank throws for an error of its own; TESSERA_DEBUG=0 turns that off.
void check_agreement(const DistributedTensor& tensor);

}  // namespace tessera
