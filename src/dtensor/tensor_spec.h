#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::detail {

/// What sizes and strides imply, as c10::TensorImpl keeps it. Found once for a spec, since a tensor
/// made of it needs all of that.
struct Geometry {
  std::int64_t numel = 0;
  bool contiguous = false;
  bool channels_last = false;
  bool channels_last_contiguous = false;
  bool channels_last_3d = false;
  bool channels_last_3d_contiguous = false;
  bool non_overlapping_and_dense = false;
  /// Follows from the rest of a spec.
  friend bool operator==(const Geometry&, const Geometry&) { return true; }
};

/// Everything about a distributed tensor but its values: what an operator's result depends on.
/// Immutable and interned: equal specs are one object for as long as someone holds it, so a call is
/// looked up by pointers.
struct TensorSpec {
  ShardingSpec sharding;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  c10::ScalarType dtype;
  Geometry geometry = {};  ///< set by intern_spec
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};
using TensorSpecPtr = std::shared_ptr<const TensorSpec>;

/// The one spec equal to `spec`. Thread safe.
TensorSpecPtr intern_spec(TensorSpec spec);

/// Sizes of this rank's part. Throws Error if this rank is not in the mesh.
std::vector<std::int64_t> local_sizes(const ShardingSpec& sharding, c10::IntArrayRef sizes);

/// Strides of a dense tensor of `sizes` whose dimensions lie in memory in the order of `like`'s
/// strides (a stride of 0 stays 0).
std::vector<std::int64_t> strides_in_order_of(c10::IntArrayRef sizes, c10::IntArrayRef like);

/// Whether every rank finds the same order of dimensions in the strides of its part. Not where
/// ranks hold different numbers of positions along a dimension, some of them at most one: the
/// stride of such a dimension means nothing, and kernels choose it as they like.
bool parts_tell_order(const Layout& layout, c10::IntArrayRef sizes);

std::vector<std::int64_t> contiguous_strides(c10::IntArrayRef sizes);

/// As placements, or, where those cannot say it, as the layout itself. For messages.
std::string describe(const Layout& layout, c10::IntArrayRef sizes);
/// "[8, 4] on (dp=2, tp=2) as [Shard(0), Replicate()]", for messages.
std::string describe(const TensorSpec& spec);

}  // namespace tessera::detail
