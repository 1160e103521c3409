// DistributedTensor: a tensor that is distributed over a device mesh.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "tessera/core/layout.h"
#include "tessera/core/placement.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_BEGIN
namespace tessera {

/// Options of distribute_tensor.
struct DistributeOptions {
  /// Index in mesh.ranks() of the rank whose values are used. The other ranks pass a tensor of the
  /// same sizes and type. This is collective, and without gradient. Not set: all ranks pass the
  /// same values.
  std::optional<int> source{};
};

/// A handle to a tensor that is distributed over a mesh. The tensor is an at::Tensor that reports
/// the global sizes and contains a local tensor. It converts implicitly, and every at:: function,
/// autograd and torch::optim accept it. The handle adds the functions that only distributed tensors
/// have. PyTorch's DTensor.
///
/// Collective functions must be called by all ranks of the mesh, in the same order. Thread safety
/// is that of at::Tensor: several threads may read one tensor, and a write needs a lock. Only one
/// thread of a rank may call collectives at a time.
///
/// Every function that makes or redistributes a distributed tensor throws Error, on every rank, for
/// a Partial whose reduction the type does not support: bool supports max, min and product;
/// integers all but avg; complex numbers sum and avg.
class DistributedTensor {
 public:
  DistributedTensor() = default;
  /// A handle to `tensor`, which must be distributed. Throws Error for a plain tensor.
  explicit DistributedTensor(at::Tensor tensor);

  /// A distributed tensor whose local tensor on this rank is `local`; they share memory. `sizes`:
  /// the global sizes. Without `sizes`, the ranks of a sharded tensor exchange them, which is
  /// collective, between the hosts. Throws Error if `local` does not have the sizes of this rank's
  /// shard; on every rank if the ranks exchanged sizes. Otherwise not collective, except with
  /// agreement checks (see check_agreement). Gradient: a local tensor with the same placements, but
  /// Replicate for Partial. `grad_placements` overrides these placements (Partial for a replicated
  /// tensor: each rank gets its own term); throws Error unless their parts have the same sizes.
  static DistributedTensor from_local(const at::Tensor& local, const DeviceMesh& mesh,
                                      const Placements& placements,
                                      std::optional<std::vector<std::int64_t>> sizes = {},
                                      std::optional<Placements> grad_placements = {});
  static DistributedTensor from_local(const at::Tensor& local, const ShardingSpec& spec,
                                      std::vector<std::int64_t> sizes);

  /// This rank's local tensor, which shares memory with the distributed tensor. Not collective.
  /// `grad_placements`: the placements of the local gradient in backward; default: this tensor's
  /// placements, with Replicate for Partial. The `.grad` of a leaf is redistributed to the leaf's
  /// placements. Throws Error, on all ranks, if `grad_placements` give parts of other sizes.
  at::Tensor to_local(std::optional<Placements> grad_placements = {}) const;
  /// The same tensor with other placements, or another layout, on the same mesh. Collective if data
  /// must move. The result does not share memory with this tensor. Throws Error for placements that
  /// do not match the sizes or the mesh. Gradient: redistributed back (to Replicate where this
  /// tensor is Partial).
  DistributedTensor redistribute(const Placements& placements) const;
  DistributedTensor redistribute(LayoutPtr layout) const;
  DistributedTensor redistribute(const Placements& placements,
                                 const RedistributeOptions& options) const;
  /// redistribute() in PyTorch's form. Throws Error unless `mesh` is the mesh of this tensor.
  DistributedTensor redistribute(const DeviceMesh& mesh, const Placements& placements,
                                 const RedistributeOptions& options = {}) const;
  /// The global tensor as a plain tensor, on every rank. Collective. `grad_placements`: the
  /// placements of the local gradient in backward (default: Replicate). Throws the same Errors as
  /// to_local().
  at::Tensor full_tensor(std::optional<Placements> grad_placements = {}) const;

  /// Throws Error for a layout that no list of placements describes (see to_placements).
  Placements placements() const;
  LayoutPtr layout() const;
  const ShardingSpec& spec() const;
  const DeviceMesh& mesh() const;
  const at::Tensor& tensor() const { return tensor_; }
  operator const at::Tensor&() const { return tensor_; }

 private:
  at::Tensor tensor_;
};

/// Lets the gradient of `leaf` keep the layout that backward gives it, possibly Partial; it is no
/// longer redistributed to the leaf's layout. For callers that reduce many gradients together.
/// Returns false, without effect, if another caller or the first operator that used the leaf has
/// already decided. Not collective. Throws Error for a plain tensor.
bool leave_gradient_pending(const at::Tensor& leaf);

/// Distributes `tensor`, which must be the same on every rank: each rank takes its shard. Not
/// collective, unless `options.source` is set. A shard is a copy. A tensor that is replicated on
/// all mesh dimensions shares the memory of `tensor`, so a write to one changes both; pass
/// tensor.clone() to avoid this. A meta tensor gives a meta local tensor of the right sizes.
/// Gradient: redistributed to Replicate.
DistributedTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    const Placements& placements);
/// distribute_tensor() with options.
DistributedTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    const Placements& placements, const DistributeOptions& options);

/// Text with sizes, type, mesh and placements, then this rank's values and their ranges in the
/// global tensor. A Partial tensor is reduced first, which is collective: call this on every rank,
/// or use local_to_string. (Streaming the at::Tensor itself throws: libtorch's printer reads
/// memory, and a distributed tensor has no memory of its own.)
std::string to_string(const DistributedTensor& tensor);
/// Writes to_string(tensor).
std::ostream& operator<<(std::ostream& stream, const DistributedTensor& tensor);
/// to_string(), but shows this rank's term of a Partial tensor. Not collective.
std::string local_to_string(const DistributedTensor& tensor);

/// Throws Error, on every rank, if the ranks of the tensor's mesh disagree on its sizes, type or
/// placements. Collective. In builds without NDEBUG, or with TESSERA_DEBUG=1 in the environment,
/// from_local and distribute_tensor make this check and are then collective; TESSERA_DEBUG=0 turns
/// it off.
void check_agreement(const DistributedTensor& tensor);

/// A text table of the ranks that have each block of a 1-D or 2-D tensor: one row for each range of
/// dimension 0, one column for each range of dimension 1. Not collective. Throws Error for other
/// numbers of dimensions. PyTorch's visualize_sharding.
///
///   [7, 4] on (dp=2, tp=2): Shard(0), Shard(1)
///            0:2    2:4
///   0:4      0      1
///   4:7      2      3
std::string visualize(const DistributedTensor& tensor);

}  // namespace tessera
TESSERA_API_END
