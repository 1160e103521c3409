#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// A reduction that computes the value of a Partial tensor from the local tensors of the ranks.
enum class ReduceOp : std::uint8_t { kSum, kAvg, kMax, kMin, kProduct };

/// A placement: every rank along the mesh dimension has the same values. Like PyTorch's Replicate.
struct Replicate {
  friend bool operator==(const Replicate&, const Replicate&) = default;
};

/// Tensor dimension `dim` is divided over the mesh dimension as by torch.chunk: the last ranks can
/// have fewer positions, or none. Like PyTorch's Shard.
struct Shard {
  std::int64_t dim = 0;
  friend bool operator==(const Shard&, const Shard&) = default;
};

/// A placement: every rank along the mesh dimension has a local tensor of the full shape. The
/// distributed tensor is the local tensors' reduction by `op`. Like PyTorch's Partial.
struct Partial {
  ReduceOp op = ReduceOp::kSum;
  friend bool operator==(const Partial&, const Partial&) = default;
};

/// A placement: tensor dimension `dim` is divided into `split_factor` chunks, and each chunk is
/// sharded over the mesh dimension. Like PyTorch's _StridedShard.
struct StridedShard {
  std::int64_t dim = 0;
  std::int64_t split_factor = 1;
  friend bool operator==(const StridedShard&, const StridedShard&) = default;
};

/// How a tensor is distributed over one mesh dimension. Like PyTorch's Placement.
using Placement = std::variant<Replicate, Shard, Partial, StridedShard>;
/// How a tensor is distributed over a mesh: one placement for each mesh dimension, in the order of
/// the mesh dimensions.
using Placements = std::vector<Placement>;

/// Whether a placement is Replicate.
inline bool is_replicate(const Placement& p) {
  return std::holds_alternative<Replicate>(p);
}
/// Whether a placement is a Partial, of any reduction.
inline bool is_partial(const Placement& p) {
  return std::holds_alternative<Partial>(p);
}
/// Whether a placement is a Shard of any dimension; false for a StridedShard.
inline bool is_shard(const Placement& p) {
  return std::holds_alternative<Shard>(p);
}
/// Whether a placement is Shard{dim}. A negative `dim` is not converted: Shard{-1} is not Shard{1}.
inline bool is_shard(const Placement& p, std::int64_t dim) {
  return p == Placement(Shard{dim});
}

/// Returns the size of chunk `index` of torch.chunk: `size` positions are divided into `chunks`
/// chunks of ceil(size / chunks). The last chunks can be shorter or empty.
std::int64_t chunk_size(std::int64_t size, std::int64_t chunks, std::int64_t index);

/// Returns the reduction's name: "sum", "avg", "max", "min" or "product".
std::string to_string(ReduceOp op);
/// Returns the placement in PyTorch's notation: "Shard(0)", "Replicate()", "Partial(sum)",
/// "_StridedShard(dim=0, sf=2)".
std::string to_string(const Placement& placement);
/// Returns the placements in brackets: "[Shard(0), Replicate()]".
std::string to_string(const Placements& placements);
/// Writes to_string(op) to `stream`.
std::ostream& operator<<(std::ostream& stream, ReduceOp op);
/// Writes to_string(placement) to `stream`.
std::ostream& operator<<(std::ostream& stream, const Placement& placement);
/// Writes to_string(placements) to `stream`.
std::ostream& operator<<(std::ostream& stream, const Placements& placements);
/// Parses the text of to_string(Placement), or one of the forms "Shard(dim=0)", "S(0)", "R" and
/// "P". Throws Error for any other text.
Placement parse_placement(std::string_view text);

}  // namespace tessera
TESSERA_API_END
