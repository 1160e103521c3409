#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "parameter/parameter_spec.h"
#include "parameter/shard_shape.h"
#include "tessera/export.h"
#include "tessera/fsdp/options.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

/// Tensors in one buffer begin at multiples of this many bytes: collectives and kernels move as
/// many at once, or a part of them.
inline constexpr std::int64_t kTensorAlignment = 64;

/// The place of a parameter's shard in a flat buffer of shards.
struct Segment {
  ShardShape shape;
  std::int64_t offset = 0;  ///< in elements
  std::int64_t gap = 0;     ///< elements between its end and the next segment, or the buffer's end
};

/// The places of shards of these shapes, one after another. Each begins at a multiple of
/// kTensorAlignment in a buffer of `dtype`, and so does each rank's part of a gathered buffer.
std::vector<Segment> segments_of(const std::vector<ShardShape>& shapes, c10::ScalarType dtype);

/// Elements of a flat buffer that holds these segments one after another.
std::int64_t flat_numel(const std::vector<Segment>& segments);

/// Clears the gaps of `buffer` (..., flat numel): they are sent with the segments, and must be the
/// same on every run.
void clear_gaps(const at::Tensor& buffer, const std::vector<Segment>& segments);

/// Rank `rank`'s shard in a flat buffer of its shards.
at::Tensor shard_of(const at::Tensor& flat, const Segment& segment, std::int64_t rank);

/// How the shards and the unsharded tensors of a group are laid out: sizes, types and devices. It
/// holds no tensor and communicates nothing; the same on every rank.
///
/// The shards are one after another in one flat buffer, each padded to rank 0's size and aligned,
/// so that with equal types the buffer itself is what an all-gather sends.
class FlatBufferLayout {
 public:
  /// `shapes`: of the parameters, at least one, all split over the same ranks; `dtype`: theirs.
  /// `device`: where this rank computes.
  FlatBufferLayout(const std::vector<ShardShape>& shapes, c10::ScalarType dtype,
                   const MixedPrecisionPolicy& policy, const ShardHome& home, c10::Device device);

  const std::vector<Segment>& segments() const { return segments_; }
  /// The types of shards, of all-gathers and computation, and of the reduction of gradients.
  c10::ScalarType dtype() const { return dtype_; }
  c10::ScalarType compute_dtype() const { return compute_dtype_; }
  c10::ScalarType reduce_dtype() const { return reduce_dtype_; }
  const ShardHome& home() const { return home_; }
  c10::Device device() const { return device_; }
  /// How many ranks hold shards.
  std::int64_t ranks() const { return segments_.front().shape.ranks; }

  /// Whether the unsharded tensors are the shards: nothing is gathered, cast or moved.
  bool shares_memory() const {
    return ranks() == 1 && compute_dtype_ == dtype_ && home_.device == device_;
  }
  /// Whether the shards have a flat buffer; without, each stays where it is.
  bool has_flat() const { return ranks() > 1 || home_.pinned; }
  /// Whether every parameter is split by rows, so that its ranks' shards one after another are its
  /// values, with padding behind them.
  bool splits_rows() const;

 private:
  c10::ScalarType dtype_;
  c10::ScalarType compute_dtype_;
  c10::ScalarType reduce_dtype_;
  std::vector<Segment> segments_;
  ShardHome home_;
  c10::Device device_;
};

/// Puts the shards of all ranks together: `gathered` (ranks, flat numel) -> `unsharded`, a
/// contiguous tensor of segment.shape.sizes for each segment. Types may differ.
void unpack(const at::Tensor& gathered, const std::vector<Segment>& segments,
            const std::vector<at::Tensor>& unsharded);

/// The inverse, into `buffer` (ranks, flat numel), casting to its type. Padding, gaps, and segments
/// whose tensor is undefined, become zeros. `unsharded` may have any strides.
void pack(const std::vector<at::Tensor>& unsharded, const std::vector<Segment>& segments,
          const at::Tensor& buffer);

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END
