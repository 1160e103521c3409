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

/// Properties that follow from the sizes and strides of a spec, computed once for each spec.
struct Geometry : ShapeGeometry {
  /// Returns true, so that a comparison of two specs ignores their Geometry.
  friend bool operator==(const Geometry&, const Geometry&) { return true; }
};

/// All properties of a distributed tensor except its values. Interned (equal specs are one
/// immutable object), so that the dispatch cache compares addresses.
struct TensorSpec {
  ShardingSpec sharding;
  std::vector<std::int64_t> sizes;    ///< global sizes
  std::vector<std::int64_t> strides;  ///< global strides
  c10::ScalarType dtype;
  Geometry geometry = {};  ///< set by intern_spec()
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};
using TensorSpecPtr = std::shared_ptr<const TensorSpec>;

/// Returns the interned object that equals `spec`. Thread safe.
TensorSpecPtr intern_spec(TensorSpec spec);

/// Returns the sizes of this rank's local tensor for global `sizes`. Throws Error if this rank is
/// not in the mesh.
std::vector<std::int64_t> local_sizes(const ShardingSpec& sharding, c10::IntArrayRef sizes);

/// Returns the strides of a dense tensor of `sizes`, in the dimension order of the strides `like`.
/// A stride of 0 in `like` stays 0.
std::vector<std::int64_t> strides_in_order_of(c10::IntArrayRef sizes, c10::IntArrayRef like);

/// Whether the strides of local tensors give the same dimension order on all ranks. A dimension of
/// local size 0 or 1 can have any stride.
bool shards_agree_on_stride_order(const Layout& layout, c10::IntArrayRef sizes);

std::vector<std::int64_t> contiguous_strides(c10::IntArrayRef sizes);

/// Returns global strides with the order of `local_strides`. If `agreed` is false (see
/// shards_agree_on_stride_order()), returns contiguous strides, because ranks may have different
/// orders of local strides.
std::vector<std::int64_t> global_strides(c10::IntArrayRef sizes, c10::IntArrayRef local_strides,
                                         bool agreed);

/// Returns the layout of a tensor's gradient: `layout` with Replicate in place of Partial, because
/// the derivative of a sum is the same for each term.
LayoutPtr gradient_layout(LayoutPtr layout);

/// Whether the dtype `type` supports the reduction `op`. bool has no sum and no average, integers
/// have no average, and complex numbers have only these two.
bool is_reducible(c10::ScalarType type, ReduceOp op);

/// Throws Error unless the dtype `type` supports all reductions of `layout`. `asked`: name of the
/// operation in the error message.
void check_partials(const Layout& layout, c10::ScalarType type, std::string_view asked);

/// Formats the placements of `layout` for messages. Formats the layout's own notation if no list of
/// placements can express `layout`.
std::string describe(const Layout& layout, c10::IntArrayRef sizes);
/// Formats a spec for messages: "[8, 4] on (dp=2, tp=2) as [Shard(0), Replicate()]".
std::string describe(const TensorSpec& spec);

}  // namespace tessera::detail
