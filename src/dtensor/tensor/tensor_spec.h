#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/dtensor/sharding_spec.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

/// Geometry: properties of a spec's sizes and strides, computed once per spec.
struct Geometry : ShapeGeometry {
  /// Two geometries always compare equal, because geometries are compared only within equal specs.
  friend bool operator==(const Geometry&, const Geometry&) { return true; }
};

/// TensorSpec: all properties of a distributed tensor except its values. Immutable and interned, so
/// that the dispatch cache compares pointers.
struct TensorSpec {
  ShardingSpec sharding;
  std::vector<std::int64_t> sizes;    ///< global sizes of the tensor
  std::vector<std::int64_t> strides;  ///< global strides of the tensor
  c10::ScalarType dtype;
  Geometry geometry = {};  ///< properties of sizes and strides; computed by intern_spec
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};
using TensorSpecPtr = std::shared_ptr<const TensorSpec>;

/// Returns the unique spec object equal to `spec`. Thread safe.
TensorSpecPtr intern_spec(TensorSpec spec);

/// Returns the sizes of this rank's local tensor for global `sizes`. Throws Error if this rank is
/// not in the mesh.
std::vector<std::int64_t> local_sizes(const ShardingSpec& sharding, c10::IntArrayRef sizes);

/// Returns the strides of a dense tensor of `sizes`. The strides `like` determine the order of the
/// tensor's dimensions in memory (channels last, transposed). A stride of 0 stays 0.
std::vector<std::int64_t> strides_in_order_of(c10::IntArrayRef sizes, c10::IntArrayRef like);

/// Whether the strides of the local tensors imply one order of dimensions on all ranks. If a rank
/// has at most one position along a dimension, kernels choose the dimension's stride freely. Ranks
/// with more positions can then have another order.
bool shards_agree_on_stride_order(const Layout& layout, c10::IntArrayRef sizes);

/// Returns the strides of a contiguous tensor of `sizes`.
std::vector<std::int64_t> contiguous_strides(c10::IntArrayRef sizes);

/// Returns global strides with the dimensions in the order of `local_strides`. If `agreed` is
/// false, returns contiguous strides, because the order can differ between ranks (see
/// shards_agree_on_stride_order).
std::vector<std::int64_t> global_strides(c10::IntArrayRef sizes, c10::IntArrayRef local_strides,
                                         bool agreed);

/// Returns the layout of a tensor's gradient: `layout` with Replicate in place of Partial, because
/// the derivative of a sum is the same for each term.
LayoutPtr gradient_layout(LayoutPtr layout);

/// Whether `type` supports the reduction `op`. bool has no sum and no average, integers have no
/// average. Complex numbers have only sum and average (of real and imaginary parts separately).
bool is_reducible(c10::ScalarType type, ReduceOp op);

/// Throws Error unless `type` supports all reductions of `layout`. `asked`: the operation that the
/// caller requested, for the error message.
void check_partials(const Layout& layout, c10::ScalarType type, std::string_view asked);

/// Formats the placements of `layout` for messages, or the layout if placements can't express it.
std::string describe(const Layout& layout, c10::IntArrayRef sizes);
/// Formats a spec for messages: "[8, 4] on (dp=2, tp=2) as [Shard(0), Replicate()]".
std::string describe(const TensorSpec& spec);

}  // namespace tessera::detail
