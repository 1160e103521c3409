#include "packing.h"

#include <ATen/ops/_foreach_copy.h>

namespace tessera::fsdp {
namespace {

/// A piece of a whole tensor and its place in the buffer, of equal sizes.
struct Piece {
  at::Tensor whole;
  at::Tensor packed;
};

/// The rows of ranks [first, last), which are all full, split on dimension 0: one piece.
Piece full_rows(const at::Tensor& whole, const at::Tensor& buffer, const Segment& segment,
                std::int64_t ranks) {
  std::vector<std::int64_t> sizes = segment.shape.sizes;
  sizes[0] = segment.shape.chunk();
  sizes.insert(sizes.begin(), ranks);
  const at::Tensor packed = buffer.narrow(0, 0, ranks)
                                .narrow(1, segment.offset, segment.shape.padded_numel())
                                .unflatten(1, at::IntArrayRef(sizes).slice(1));
  return {whole.narrow(0, 0, ranks * sizes[1]).unflatten(0, {ranks, sizes[1]}), packed};
}

Piece rows_of(const at::Tensor& whole, const at::Tensor& buffer, const Segment& segment,
              std::int64_t rank) {
  const ShardShape& shape = segment.shape;
  return {whole.narrow(*shape.dim, shape.first_row(rank), shape.rows(rank)),
          shard_of(buffer.select(0, rank), segment, rank)};
}

std::vector<Piece> pieces_of(const at::Tensor& whole, const at::Tensor& buffer,
                             const Segment& segment) {
  const ShardShape& shape = segment.shape;
  std::vector<Piece> pieces;
  std::int64_t rank = 0;
  if (shape.dim == std::int64_t{0} && shape.padded_numel() > 0) {
    rank = shape.sizes[0] / shape.chunk();
    pieces.push_back(full_rows(whole, buffer, segment, rank));
  }
  for (; rank < shape.ranks && shape.numel(rank) > 0; ++rank) {
    pieces.push_back(shape.dim ? rows_of(whole, buffer, segment, rank)
                               : Piece{whole, shard_of(buffer.select(0, rank), segment, rank)});
  }
  return pieces;
}

/// What the pieces leave of a segment's room: the short rank's rest and the empty ranks.
void clear_padding(const at::Tensor& buffer, const Segment& segment) {
  const std::int64_t room = segment.shape.padded_numel();
  for (std::int64_t rank = segment.shape.ranks - 1; rank >= 0; --rank) {
    const std::int64_t used = segment.shape.numel(rank);
    if (used == room) {
      return;
    }
    buffer.select(0, rank).narrow(0, segment.offset + used, room - used).zero_();
  }
}

}  // namespace

std::int64_t flat_numel(const std::vector<Segment>& segments) {
  return segments.empty() ? 0 : segments.back().offset + segments.back().shape.padded_numel();
}

at::Tensor shard_of(const at::Tensor& flat, const Segment& segment, std::int64_t rank) {
  return flat.narrow(0, segment.offset, segment.shape.numel(rank))
      .view(segment.shape.shard_sizes(rank));
}

void unpack(const at::Tensor& gathered, const std::vector<Segment>& segments,
            const std::vector<at::Tensor>& whole) {
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    std::vector<Piece> pieces = pieces_of(whole[i], gathered, segments[i]);
    if (!segments[i].shape.dim && !pieces.empty()) {
      pieces.erase(pieces.begin() + 1, pieces.end());  // every rank sent the same
    }
    for (Piece& piece : pieces) {
      to.push_back(std::move(piece.whole));
      from.push_back(std::move(piece.packed));
    }
  }
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
}

void pack(const std::vector<at::Tensor>& whole, const std::vector<Segment>& segments,
          const at::Tensor& buffer) {
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (!whole[i].defined()) {
      buffer.narrow(1, segments[i].offset, segments[i].shape.padded_numel()).zero_();
      continue;
    }
    clear_padding(buffer, segments[i]);
    for (Piece& piece : pieces_of(whole[i], buffer, segments[i])) {
      to.push_back(std::move(piece.packed));
      from.push_back(std::move(piece.whole));
    }
  }
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
}

}  // namespace tessera::fsdp
