#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tessera {

/// How the values of a Partial tensor combine into the true one.
enum class ReduceOp : std::uint8_t { kSum, kAvg, kMax, kMin, kProduct };

/// Whether a tensor that is partial with `a` on one mesh dimension and with `b` on another may be
/// reduced in either order: equal reductions, and sums with averages.
bool commute(ReduceOp a, ReduceOp b);

/// Every coordinate of the mesh dimension holds the whole tensor.
struct Replicate {
  friend bool operator==(const Replicate&, const Replicate&) = default;
};

/// Tensor dimension `dim` is split as torch.chunk splits it; trailing coordinates may hold nothing.
struct Shard {
  std::int64_t dim = 0;
  friend bool operator==(const Shard&, const Shard&) = default;
};

/// Every coordinate holds a term; the tensor is their reduction.
struct Partial {
  ReduceOp op = ReduceOp::kSum;
  friend bool operator==(const Partial&, const Partial&) = default;
};

/// PyTorch's _StridedShard, accepted and printed at the edge only (Layout has an order instead):
/// the dimension is cut in `split_factor` pieces, and each of them is sharded.
struct StridedShard {
  std::int64_t dim = 0;
  std::int64_t split_factor = 1;
  friend bool operator==(const StridedShard&, const StridedShard&) = default;
};

/// What one mesh dimension does to a tensor. A list of them, one per mesh dimension, describes it.
using Placement = std::variant<Replicate, Shard, Partial, StridedShard>;
using Placements = std::vector<Placement>;

inline bool is_replicate(const Placement& p) {
  return std::holds_alternative<Replicate>(p);
}
inline bool is_partial(const Placement& p) {
  return std::holds_alternative<Partial>(p);
}
/// A Shard of any dimension.
inline bool is_shard(const Placement& p) {
  return std::holds_alternative<Shard>(p);
}
inline bool is_shard(const Placement& p, std::int64_t dim) {
  return p == Placement(Shard{dim});
}

/// "sum", "avg", "max", "min" or "product".
std::string to_string(ReduceOp op);
/// As PyTorch writes it: Shard(0), Replicate(), Partial(sum), _StridedShard(dim=0, sf=2).
std::string to_string(const Placement& placement);
/// The placements in brackets, comma-separated.
std::string to_string(const Placements& placements);
/// The inverse of to_string; also accepts Shard(dim=0), S(0), R, P. Throws Error on anything else.
Placement parse_placement(std::string_view text);

}  // namespace tessera
