// Where each shard is in a flat buffer, and the copies between such buffers and unsharded tensors.
// A flat buffer of one rank has the padded shards one after another, aligned; a gathered one has a
// row of that form for each rank. Nothing here communicates.

#include "parameter_group/flat_buffer_layout.h"

#include <algorithm>
#include <utility>

#include "tessera/core/detail/rounding.h"
#include "tessera/kernels/detail/pack.h"

namespace tessera::fsdp {
namespace {

/// A piece of an unsharded tensor and its place in the buffer, of equal sizes.
struct Piece {
  at::Tensor unsharded;
  at::Tensor packed;
};

/// The rows of ranks [first, last), which are all full, split on dimension 0: one piece.
Piece full_rows(const at::Tensor& unsharded, const at::Tensor& buffer, const Segment& segment,
                std::int64_t ranks) {
  // As (ranks, rows, ...): on both sides a strided view of the same shape, and no copy is needed to
  // build it.
  std::vector<std::int64_t> sizes = segment.shape.sizes;
  sizes[0] = segment.shape.chunk();
  sizes.insert(sizes.begin(), ranks);
  const at::Tensor packed = buffer.narrow(0, 0, ranks)
                                .narrow(1, segment.offset, segment.shape.padded_numel())
                                .unflatten(1, at::IntArrayRef(sizes).slice(1));
  return {unsharded.narrow(0, 0, ranks * sizes[1]).unflatten(0, {ranks, sizes[1]}), packed};
}

Piece rows_of(const at::Tensor& unsharded, const at::Tensor& buffer, const Segment& segment,
              std::int64_t rank) {
  const ShardShape& shape = segment.shape;
  return {shape.rows_of(unsharded, rank),
          shape.by_parts(shard_of(buffer.select(0, rank), segment, rank))};
}

/// Ranks whose shards are full, split on dimension 0, are one strided copy; others one each.
std::vector<Piece> pieces_of(const at::Tensor& unsharded, const at::Tensor& buffer,
                             const Segment& segment) {
  const ShardShape& shape = segment.shape;
  std::vector<Piece> pieces;
  std::int64_t rank = 0;
  if (shape.splits_rows() && shape.padded_numel() > 0) {
    // Ranks with a full chunk; at most one after them has fewer rows, the others none.
    rank = shape.sizes[0] / shape.chunk();
    pieces.push_back(full_rows(unsharded, buffer, segment, rank));
  }
  // Empty ranks come last, as in torch.chunk, so the loop may end at the first.
  for (; rank < shape.ranks && shape.numel(rank) > 0; ++rank) {
    pieces.push_back(shape.dim ? rows_of(unsharded, buffer, segment, rank)
                               : Piece{unsharded, shard_of(buffer.select(0, rank), segment, rank)});
  }
  return pieces;
}

/// Clears the rest of a segment's room: that of the short rank, and of the empty ranks behind it at
/// once. All before them are full.
void clear_padding(const at::Tensor& buffer, const Segment& segment) {
  const ShardShape& shape = segment.shape;
  const std::int64_t room = shape.padded_numel();
  std::int64_t filled = shape.ranks;
  while (room > 0 && filled > 0 && shape.numel(filled - 1) == 0) {
    --filled;
  }
  if (filled < shape.ranks) {
    buffer.narrow(0, filled, shape.ranks - filled).narrow(1, segment.offset, room).zero_();
  }
  if (const std::int64_t used = filled > 0 ? shape.numel(filled - 1) : room; used < room) {
    buffer.select(0, filled - 1).narrow(0, segment.offset + used, room - used).zero_();
  }
}

std::int64_t end_of(const Segment& segment) {
  return segment.offset + segment.shape.padded_numel();
}

/// The wider of two types aligns in fewer elements, so that the narrower one decides.
c10::ScalarType narrower(c10::ScalarType a, c10::ScalarType b) {
  return c10::elementSize(a) < c10::elementSize(b) ? a : b;
}

}  // namespace

std::vector<Segment> segments_of(const std::vector<ShardShape>& shapes, c10::ScalarType dtype) {
  const std::int64_t unit = kTensorAlignment / static_cast<std::int64_t>(c10::elementSize(dtype));
  std::vector<Segment> segments;
  for (const ShardShape& shape : shapes) {
    // Padded, so that the offsets are the same on every rank and one collective fits all.
    segments.push_back({shape, flat_numel(segments),
                        detail::round_up(shape.padded_numel(), unit) - shape.padded_numel()});
  }
  return segments;
}

std::int64_t flat_numel(const std::vector<Segment>& segments) {
  return segments.empty() ? 0 : end_of(segments.back()) + segments.back().gap;
}

void clear_gaps(const at::Tensor& buffer, const std::vector<Segment>& segments) {
  for (const Segment& segment : segments) {
    if (segment.gap > 0) {
      buffer.narrow(-1, end_of(segment), segment.gap).zero_();
    }
  }
}

at::Tensor shard_of(const at::Tensor& flat, const Segment& segment, std::int64_t rank) {
  // A view without the padding.
  return flat.narrow(0, segment.offset, segment.shape.numel(rank))
      .view(segment.shape.shard_sizes(rank));
}

FlatBufferLayout::FlatBufferLayout(const std::vector<ShardShape>& shapes, c10::ScalarType dtype,
                                   const MixedPrecisionPolicy& policy, const ShardHome& home,
                                   c10::Device device)
    : dtype_(dtype),
      // Integers and booleans are not computed with in a floating-point type.
      compute_dtype_(c10::isFloatingType(dtype) ? policy.param_dtype.value_or(dtype) : dtype),
      // As FSDP2: without reduce_dtype a reduction has the computation's type.
      reduce_dtype_(c10::isFloatingType(dtype) ? policy.reduce_dtype.value_or(compute_dtype_)
                                               : compute_dtype_),
      // One layout for the shards and for what is sent of them.
      segments_(segments_of(shapes, narrower(dtype_, compute_dtype_))),
      home_(home),
      device_(device) {}

bool FlatBufferLayout::splits_rows() const {
  return std::ranges::all_of(segments_,
                             [](const Segment& segment) { return segment.shape.splits_rows(); });
}

/// One call for all pieces: on a GPU a kernel, not one for each piece.
void unpack(const at::Tensor& gathered, const std::vector<Segment>& segments,
            const std::vector<at::Tensor>& unsharded) {
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    std::vector<Piece> pieces = pieces_of(unsharded[i], gathered, segments[i]);
    if (!segments[i].shape.dim && !pieces.empty()) {
      pieces.erase(pieces.begin() + 1, pieces.end());  // every rank sent the same
    }
    for (Piece& piece : pieces) {
      to.push_back(std::move(piece.unsharded));
      from.push_back(std::move(piece.packed));
    }
  }
  kernels::copy_all(to, from);
}

void pack(const std::vector<at::Tensor>& unsharded, const std::vector<Segment>& segments,
          const at::Tensor& buffer) {
  clear_gaps(buffer, segments);
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    // A parameter that this rank did not use: zeros, as its peers expect.
    if (!unsharded[i].defined()) {
      buffer.narrow(1, segments[i].offset, segments[i].shape.padded_numel()).zero_();
      continue;
    }
    clear_padding(buffer, segments[i]);
    for (Piece& piece : pieces_of(unsharded[i], buffer, segments[i])) {
      to.push_back(std::move(piece.packed));
      from.push_back(std::move(piece.unsharded));
    }
  }
  kernels::copy_all(to, from);
}

}  // namespace tessera::fsdp
