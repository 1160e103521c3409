// All-gathers of encoded shards (float8 and its scales, say), which extensions make, instead of
// values. A group still needs one collective: the encoded tensors of all parameters are packed as
// bytes, whatever their types, and sent as numbers of 8 bytes. GatheredState encodes in the lane of
// the gather and decodes in the compute lane.

#include "parameter_group/encoded_gather.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "parameter_group/flat_buffer_layout.h"
#include "tessera/core/detail/rounding.h"
#include "tessera/core/error.h"

namespace tessera::fsdp {
namespace {

/// view(dtype) of a byte tensor needs an offset that the element's size divides.
std::int64_t aligned(std::int64_t bytes) {
  return detail::round_up(bytes, kTensorAlignment);
}

std::int64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.nbytes());
}

std::vector<std::int64_t> stacked(std::int64_t ranks, at::IntArrayRef sizes) {
  std::vector<std::int64_t> result{ranks};
  result.insert(result.end(), sizes.begin(), sizes.end());
  return result;
}

/// An extension that only casts, so that encode() and decode() have one path. For a parameter
/// without an extension in a group where another has one.
AllGatherExtension send_values(c10::ScalarType dtype) {
  return {.pre_all_gather = [dtype](const at::Tensor& shard) -> EncodedShard {
            return {.tensors = {shard.to(dtype)}};
          },
          .post_all_gather = [](const std::vector<at::Tensor>& tensors,
                                const std::any&) { return tensors.front(); }};
}

}  // namespace

std::optional<EncodedGather> EncodedGather::of(const std::vector<ShardedParameter>& parameters,
                                               c10::ScalarType dtype) {
  if (std::ranges::none_of(parameters,
                           [](const auto& each) { return each.extension().has_value(); })) {
    return std::nullopt;
  }
  EncodedGather gather;
  for (const ShardedParameter& parameter : parameters) {
    const std::optional<AllGatherExtension>& extension = parameter.extension();
    gather.parameters_.push_back({.name = parameter.name(),
                                  .shape = parameter.shape(),
                                  .extension = extension ? *extension : send_values(dtype),
                                  .pieces = {},
                                  .metadata = {}});
  }
  return gather;
}

/// As large as rank 0's.
at::Tensor EncodedGather::padded(const at::Tensor& shard, const ShardShape& shape) {
  if (!shape.dim || shard.size(*shape.dim) == shape.parts * shape.chunk()) {
    return shard;
  }
  const at::Tensor rows = shape.by_parts(shard);
  // constant_pad_nd takes pairs from the last dimension backwards; the last pair is that of the
  // rows, and pads only their end.
  std::vector<std::int64_t> pad(static_cast<std::size_t>(2 * (shard.dim() - *shape.dim)), 0);
  pad.back() = shape.chunk() - rows.size(*shape.dim + 1);
  return at::constant_pad_nd(rows, pad).flatten(*shape.dim, *shape.dim + 1);
}

at::Tensor EncodedGather::encode(const std::vector<at::Tensor>& shards) {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    EncodedShard encoded = parameter.extension.pre_all_gather(padded(shards[i], parameter.shape));
    // Stays on this rank: what other ranks need is in the tensors.
    parameter.metadata = std::move(encoded.metadata);
    parameter.pieces.clear();
    for (at::Tensor& tensor : encoded.tensors) {
      const std::int64_t numel = bytes_of(tensor);
      parameter.pieces.push_back({std::move(tensor), bytes});
      bytes += aligned(numel);
    }
  }
  // Zeros, so that padding between pieces is the same in every run.
  at::Tensor all = at::zeros({bytes}, at::dtype(at::kByte).device(shards.front().device()));
  for (const Parameter& parameter : parameters_) {
    for (const Piece& piece : parameter.pieces) {
      all.narrow(0, piece.offset, bytes_of(piece.tensor))
          .view(piece.tensor.scalar_type())
          .view(piece.tensor.sizes())
          .copy_(piece.tensor);
    }
  }
  return all.view(at::kLong);
}

void EncodedGather::decode(const at::Tensor& numbers, const std::vector<at::Tensor>& unsharded) {
  const at::Tensor gathered = numbers.view(at::kByte);
  const std::int64_t ranks = gathered.size(0);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    std::vector<at::Tensor> tensors;
    // Exchanged, since pieces hold the encoded shard: it is freed before the others are decoded.
    for (const Piece& piece : std::exchange(parameter.pieces, {})) {
      tensors.push_back(gathered.narrow(1, piece.offset, bytes_of(piece.tensor))
                            .view(piece.tensor.scalar_type())
                            .view(stacked(ranks, piece.tensor.sizes())));
    }
    const at::Tensor shards = parameter.extension.post_all_gather(tensors, parameter.metadata);
    assemble(parameter, shards, unsharded[i]);
  }
}

void EncodedGather::drop_metadata() {
  for (Parameter& parameter : parameters_) {
    parameter.metadata.reset();
  }
}

void EncodedGather::assemble(const Parameter& parameter, const at::Tensor& shards,
                             const at::Tensor& unsharded) {
  const ShardShape& shape = parameter.shape;
  const std::vector<std::int64_t> expected = stacked(shape.ranks, shape.shard_sizes(0));
  TESSERA_CHECK(shards.defined() && shards.sizes() == at::IntArrayRef(expected),
                "post_all_gather of parameter '", parameter.name, "' returned ",
                shards.defined() ? detail::concat("sizes ", shards.sizes()) : "no tensor",
                "; return the padded shards of all ranks, of sizes ", at::IntArrayRef(expected));
  if (!shape.dim) {
    unsharded.copy_(shards.select(0, 0));
    return;
  }
  // Without the padding of short ranks.
  for (std::int64_t rank = 0; rank < shape.ranks; ++rank) {
    const at::Tensor padded = shape.by_parts(shards.select(0, rank));
    shape.rows_of(unsharded, rank).copy_(padded.narrow(*shape.dim + 1, 0, shape.rows(rank)));
  }
}

}  // namespace tessera::fsdp
