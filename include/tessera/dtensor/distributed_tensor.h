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

/// A handle to an at::Tensor that is distributed over a mesh. The at::Tensor has the global sizes
/// and contains a local tensor. The handle converts to the at::Tensor for at::
/// functions, autograd and torch::optim. Like PyTorch's DTensor.
///
/// All ranks of the mesh call collective functions in the same order. Only one thread of a rank may
/// call collectives at a time. Thread safety is that of at::Tensor.
///
/// Functions that make or redistribute distributed tensors throw Error, on every rank, for a
/// Partial placement with a reduction that the dtype does not support. bool supports max, min and
/// product. Integers support all reductions but avg. Complex dtypes support sum and avg.
class DistributedTensor {
 public:
  DistributedTensor() = default;
  /// Constructs a handle to `tensor`, which must be distributed. Throws Error for a plain tensor.
  explicit DistributedTensor(at::Tensor tensor);

  /// Returns a distributed tensor with the local tensor `local`, without a copy. `sizes`: the
  /// global sizes. Collective for a sharded tensor without `sizes`, and with TESSERA_DEBUG=1.
  /// Throws Error if `local` does not have the sizes of this rank's shard.
  ///
  /// The gradient has the tensor's placements, with Replicate in place of Partial.
  /// `grad_placements` overrides these placements and may differ only in Partial and Replicate.
  static DistributedTensor from_local(const at::Tensor& local, const DeviceMesh& mesh,
                                      const Placements& placements,
                                      std::optional<std::vector<std::int64_t>> sizes = {},
                                      std::optional<Placements> grad_placements = {});
  static DistributedTensor from_local(const at::Tensor& local, const ShardingSpec& spec,
                                      std::vector<std::int64_t> sizes);

  /// Returns this rank's local tensor, which shares memory with this tensor. Not collective.
  /// `grad_placements`: the placements of the local gradient, by default placements() with
  /// Replicate in place of Partial. Throws Error unless `grad_placements` and placements() differ
  /// only in Partial and Replicate.
  at::Tensor to_local(std::optional<Placements> grad_placements = {}) const;
  /// Returns this tensor with other placements or another layout on the same mesh. The result
  /// shares no memory with this tensor, unless the placements are equal. Collective if data must
  /// move. The gradient is redistributed to placements(), with Replicate in place of Partial.
  /// Throws Error for placements that do not match the sizes or the mesh.
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

/// Distributes `tensor`: each rank copies its shard. Without `source`, `tensor` must be equal on
/// every rank, the call is not collective, and the gradient is redistributed to Replicate. A fully
/// replicated result shares the memory of `tensor`.
///
/// `source`: an index in mesh.ranks(). All ranks then get shards of the source rank's tensor.
/// Collective, without gradient; all ranks pass equal sizes and dtypes. Like PyTorch's
/// distribute_tensor.
DistributedTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    const Placements& placements, std::optional<int> source = {});

/// Returns the sizes, dtype, mesh, placements and this rank's values, as text. Collective for a
/// Partial tensor, which is reduced first. Streaming the at::Tensor itself throws.
std::string to_string(const DistributedTensor& tensor);
/// Writes to_string(tensor).
std::ostream& operator<<(std::ostream& stream, const DistributedTensor& tensor);
}  // namespace tessera
TESSERA_API_END
