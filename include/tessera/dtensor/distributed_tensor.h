// The distributed tensor.
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

/// The source of the values in distribute_tensor.
struct DistributeOptions {
  /// The position in mesh.ranks() of the rank whose values are used. The other ranks pass a tensor
  /// of the same sizes and type. Collective, and without gradient. Not set: all ranks pass the same
  /// values.
  std::optional<int> source{};
};

/// A tensor that is distributed over a mesh. It *is* an at::Tensor, with the global sizes outside
/// and a local tensor inside: it converts implicitly, and every at:: function, autograd and
/// torch::optim take it. This handle adds what only distributed tensors have. PyTorch's DTensor.
///
/// Collective functions must be called by all ranks of the mesh, in the same order. Thread safe as
/// at::Tensor is: several threads may read one tensor, and a write needs a lock. A rank's
/// collectives are called by one thread at a time.
///
/// Every function that makes or redistributes one throws Error, on every rank, for a Partial that
/// its type does not have: bool has max, min and product, integers have all but avg, complex
/// numbers have sum and avg.
class DistributedTensor {
 public:
  DistributedTensor() = default;
  /// The handle of a tensor that is distributed. Throws Error for a plain one.
  explicit DistributedTensor(at::Tensor tensor);

  /// A distributed tensor with `local` as this rank's local tensor, with which it shares memory.
  /// `sizes` are the global sizes. Without them the ranks exchange the sizes of a sharded tensor,
  /// which is collective, between the hosts. Throws Error if `local` has other
  /// sizes than this rank's shard, on every rank if they have compared. Else not collective, except
  /// in debug builds (see check_agreement). Gradient: local, with the same placements, but
  /// Replicate for Partial; or `grad_placements` (Partial for a replicated tensor: each rank gets
  /// its own term), of parts of the same sizes, else throws Error.
  static DistributedTensor from_local(const at::Tensor& local, const DeviceMesh& mesh,
                                      const Placements& placements,
                                      std::optional<std::vector<std::int64_t>> sizes = {},
                                      std::optional<Placements> grad_placements = {});
  static DistributedTensor from_local(const at::Tensor& local, const ShardingSpec& spec,
                                      std::vector<std::int64_t> sizes);

  /// This rank's local tensor, which shares memory with this one. Not collective.
  /// Gradient: local gradients are taken to have `grad_placements` (default: those of this tensor,
  /// Replicate for Partial). The `.grad` of a leaf is redistributed to the leaf's placements.
  /// Throws Error, on all ranks alike, for `grad_placements` with parts of other sizes.
  at::Tensor to_local(std::optional<Placements> grad_placements = {}) const;
  /// The same tensor with other placements, or another layout, on the same mesh. Collective if data
  /// must move. The result does not share memory with this tensor. Throws Error for placements that
  /// do not fit. Gradient: redistributed back (to Replicate where this tensor is Partial).
  DistributedTensor redistribute(const Placements& placements) const;
  DistributedTensor redistribute(LayoutPtr layout) const;
  DistributedTensor redistribute(const Placements& placements,
                                 const RedistributeOptions& options) const;
  /// As in PyTorch, throws Error unless `mesh` is the mesh of this tensor.
  DistributedTensor redistribute(const DeviceMesh& mesh, const Placements& placements,
                                 const RedistributeOptions& options = {}) const;
  /// The global tensor, as a plain one, on every rank. Collective. Gradient: local gradients are
  /// taken to have `grad_placements` (default: Replicate). Throws Error as to_local.
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

/// From now on the gradient of `leaf` keeps the layout that backward gives it, possibly Partial,
/// and is not redistributed to the layout of the leaf. For a caller that reduces many gradients
/// together. Returns false, and does nothing, if another caller or the first operator that used the
/// leaf has decided already. Not collective. Throws Error for a plain tensor.
bool leave_gradient_pending(const at::Tensor& leaf);

/// Distributes `tensor`, which is the same on every rank: each rank keeps its shard. Not
/// collective, unless `options.source` is set. A shard is a copy. A tensor that is replicated
/// on all mesh dimensions shares the memory of `tensor`, so that a write to one is a write to both:
/// pass tensor.clone() where that is not wanted. A meta tensor gives a meta local tensor of the
/// right sizes. Gradient: redistributed to Replicate.
DistributedTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    const Placements& placements);
/// The same with options.
DistributedTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    const Placements& placements, const DistributeOptions& options);

/// Sizes, type, mesh and placements, then this rank's values and their ranges in the global tensor.
/// A Partial tensor is reduced first, which is collective: call it on every rank, or use
/// local_to_string. (Streaming the at::Tensor itself throws: libtorch's printer reads memory, which
/// a distributed tensor lacks.)
std::string to_string(const DistributedTensor& tensor);
/// Writes to_string(tensor).
std::ostream& operator<<(std::ostream& stream, const DistributedTensor& tensor);
/// The same, but shows this rank's term of a Partial tensor. Not collective.
std::string local_to_string(const DistributedTensor& tensor);

/// Throws Error, on every rank, if the ranks of the tensor's mesh disagree on its sizes, type or
/// placements. Collective. In builds without NDEBUG, or with TESSERA_DEBUG=1 in the environment,
/// from_local and distribute_tensor make this check and are then collective; TESSERA_DEBUG=0 turns
/// it off.
void check_agreement(const DistributedTensor& tensor);

/// Which ranks hold which block of a tensor of one or two dimensions, as a table of text: a row for
/// each range of dimension 0, a column for each of dimension 1. Not collective. Throws Error for
/// other numbers of dimensions. PyTorch's visualize_sharding.
///
///   [7, 4] on (dp=2, tp=2): Shard(0), Shard(1)
///            0:2    2:4
///   0:4      0      1
///   4:7      2      3
std::string visualize(const DistributedTensor& tensor);

}  // namespace tessera
TESSERA_API_END
