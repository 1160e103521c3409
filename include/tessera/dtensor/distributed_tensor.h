// DistributedTensor: a tensor that is distributed over a device mesh.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "tessera/core/detail/layout.h"
#include "tessera/core/placement.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_BEGIN
namespace tessera {

/// A handle to a tensor that is distributed over a mesh. The tensor is an at::Tensor that reports
/// the global sizes and contains a local tensor. The handle converts implicitly to this at::Tensor,
/// which every at:: function, autograd and torch::optim accept. The handle adds the functions that
/// only distributed tensors have. Like PyTorch's DTensor.
///
/// Collective functions must be called by all ranks of the mesh, in the same order. Thread safety
/// is that of at::Tensor: several threads may read one tensor, and a write needs a lock. Only one
/// thread of a rank may call collectives at a time.
///
/// Every function that makes or redistributes a distributed tensor throws Error, on every rank, for
/// a Partial placement whose reduction the dtype does not support. bool supports max, min and
/// product. Integers support all reductions but avg. Complex dtypes support sum and avg.
class DistributedTensor {
 public:
  DistributedTensor() = default;
  /// Constructs a handle to `tensor`, which must be distributed. Throws Error for a plain tensor.
  explicit DistributedTensor(at::Tensor tensor);

  /// Returns a distributed tensor whose local tensor on this rank is `local`, without a copy.
  /// `sizes`: the global sizes. Without `sizes`, the ranks of a sharded tensor exchange the sizes
  /// in CPU memory, which is collective. With `sizes`, from_local() is not collective, except with
  /// TESSERA_DEBUG=1, which compares sizes, dtype and placements between ranks. Throws Error if
  /// `local` does not have the sizes of this rank's shard; if the ranks exchanged sizes, every rank
  /// throws. Gradient: the local tensor's gradient has the placements of the distributed tensor,
  /// with Replicate in place of Partial. `grad_placements` overrides these placements, and may
  /// differ only in Partial and Replicate. For example, with Partial for a replicated tensor the
  /// gradient is the sum over the ranks, and each rank's local tensor gets only its own term.
  static DistributedTensor from_local(const at::Tensor& local, const DeviceMesh& mesh,
                                      const Placements& placements,
                                      std::optional<std::vector<std::int64_t>> sizes = {},
                                      std::optional<Placements> grad_placements = {});
  static DistributedTensor from_local(const at::Tensor& local, const ShardingSpec& spec,
                                      std::vector<std::int64_t> sizes);

  /// Returns this rank's local tensor, which shares memory with the distributed tensor. Not
  /// collective. `grad_placements`: the placements of the local gradient in backward; by default
  /// this tensor's placements, with Replicate in place of Partial. The `.grad` of a leaf is
  /// redistributed to the leaf's placements. Throws Error, on all ranks, unless `grad_placements`
  /// and placements() differ only in Partial and Replicate.
  at::Tensor to_local(std::optional<Placements> grad_placements = {}) const;
  /// Returns this tensor with other placements, or another layout, on the same mesh. Collective if
  /// data must move. The result shares no memory with this tensor; if this tensor has the
  /// placements already, the result is this tensor. Throws Error for placements that do not match
  /// the sizes or the mesh. The gradient is redistributed to the placements of this tensor, with
  /// Replicate in place of Partial.
  DistributedTensor redistribute(const Placements& placements,
                                 const RedistributeOptions& options = {}) const;
  DistributedTensor redistribute(LayoutPtr layout) const;
  /// Returns the global tensor as a plain tensor, on every rank. Collective. `grad_placements`: the
  /// placements of the local gradient in backward (default: Replicate). Throws the same Errors as
  /// to_local().
  at::Tensor full_tensor(std::optional<Placements> grad_placements = {}) const;

  /// Returns the placements of the tensor. Throws Error for a layout that no list of placements
  /// describes (docs/sharding.md).
  Placements placements() const;
  LayoutPtr layout() const;
  const ShardingSpec& spec() const;
  const DeviceMesh& mesh() const;
  const at::Tensor& tensor() const { return tensor_; }
  operator const at::Tensor&() const { return tensor_; }

 private:
  at::Tensor tensor_;
};

/// Distributes `tensor`: each rank takes a copy of its shard. `tensor` must be the same on every
/// rank, unless `source` is set. `source` is an index in mesh.ranks(): all ranks then get shards of
/// the tensor of this source rank, which is collective and has no gradient; all other ranks must
/// pass a tensor of the same sizes and dtype. Without `source` the call is not collective, and the
/// gradient is redistributed to Replicate. A tensor that is replicated on all mesh dimensions
/// shares the memory of `tensor`; pass tensor.clone() to avoid this. A meta tensor gives a meta
/// local tensor of the right sizes. Like PyTorch's distribute_tensor.
DistributedTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    const Placements& placements, std::optional<int> source = {});

/// Returns a text: the tensor's sizes, dtype, mesh and placements, then this rank's values and
/// their index ranges in the global tensor. A Partial tensor is reduced first, which is collective:
/// call to_string() on every rank. (Streaming the at::Tensor itself throws: libtorch's printer
/// reads memory, and a distributed tensor has no memory of its own.)
std::string to_string(const DistributedTensor& tensor);
/// Writes to_string(tensor).
std::ostream& operator<<(std::ostream& stream, const DistributedTensor& tensor);
}  // namespace tessera
TESSERA_API_END
