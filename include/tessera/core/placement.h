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

/// How the local values of a Partial tensor combine into its value.
enum class ReduceOp : std::uint8_t { kSum, kAvg, kMax, kMin, kProduct };

/// Whether reductions `a` over one mesh dimension and `b` over another may be computed in either
/// order. True for equal reductions, and for sum and average.
bool commute(ReduceOp a, ReduceOp b);

/// Every coordinate of the mesh dimension has the same values.
struct Replicate {
  friend bool operator==(const Replicate&, const Replicate&) = default;
};

/// Tensor dimension `dim` is divided as by torch.chunk: the last coordinates may have fewer
/// positions or none.
struct Shard {
  std::int64_t dim = 0;
  friend bool operator==(const Shard&, const Shard&) = default;
};

/// Every coordinate has a term of the global shape; the tensor is the reduction of the terms with
/// `op`.
struct Partial {
  ReduceOp op = ReduceOp::kSum;
  friend bool operator==(const Partial&, const Partial&) = default;
};

/// PyTorch's _StridedShard: the dimension is divided into `split_factor` chunks, and each chunk is
/// sharded. It is only parsed and printed; a Layout has an order of mesh dimensions instead.
struct StridedShard {
  std::int64_t dim = 0;
  std::int64_t split_factor = 1;
  friend bool operator==(const StridedShard&, const StridedShard&) = default;
};

/// How a tensor is distributed over one mesh dimension; a list with one placement for each mesh
/// dimension describes a tensor. Value types without shared state. PyTorch's Placement.
using Placement = std::variant<Replicate, Shard, Partial, StridedShard>;
/// One placement for each mesh dimension, outermost first.
using Placements = std::vector<Placement>;

/// Whether a placement is Replicate.
inline bool is_replicate(const Placement& p) {
  return std::holds_alternative<Replicate>(p);
}
/// Whether a placement is a Partial, of any reduction.
inline bool is_partial(const Placement& p) {
  return std::holds_alternative<Partial>(p);
}
/// True for a Shard of any dimension, false for a StridedShard.
inline bool is_shard(const Placement& p) {
  return std::holds_alternative<Shard>(p);
}
/// Whether a placement is Shard{dim}; negative dimensions are compared as written.
inline bool is_shard(const Placement& p, std::int64_t dim) {
  return p == Placement(Shard{dim});
}

/// The reduction's name: "sum", "avg", "max", "min" or "product".
std::string to_string(ReduceOp op);
/// The placement in PyTorch's notation: Shard(0), Replicate(), Partial(sum), _StridedShard(dim=0,
/// sf=2).
std::string to_string(const Placement& placement);
/// The placements as text, in brackets and comma-separated.
std::string to_string(const Placements& placements);
/// Writes to_string(op).
std::ostream& operator<<(std::ostream& stream, ReduceOp op);
/// Writes to_string(placement).
std::ostream& operator<<(std::ostream& stream, const Placement& placement);
/// Writes to_string(placements).
std::ostream& operator<<(std::ostream& stream, const Placements& placements);
/// The inverse of to_string; also accepts Shard(dim=0), S(0), R, P. Throws Error on anything else.
Placement parse_placement(std::string_view text);

}  // namespace tessera
TESSERA_API_END
