#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/core/layout.h"

namespace tessera::plan {

using Digits = std::vector<Digit>;

/// What a plan is for.
struct Problem {
  LayoutPtr to = nullptr;
  std::span<const std::int64_t> sizes;
  std::int64_t itemsize = 1;
  /// Tensor dimensions that may hold a mesh dimension for a while, to get it out of another's way.
  std::vector<int> parking;

  std::int64_t size(int dim) const { return sizes[static_cast<std::size_t>(dim)]; }
  std::int64_t mesh_size(int dim) const { return to->mesh_sizes()[static_cast<std::size_t>(dim)]; }
};

/// Where a mesh dimension may be appended: the tensor dimension, and its digits afterwards.
struct Landing {
  int dim = 0;
  Digits digits;
};

/// The last mesh dimensions of a digit, taken off it.
struct Tail {
  int dim = 0;
  std::size_t digit = 0;
  std::vector<int> mesh_dims;
};

/// A layout on the way to the target, seen from there. A mesh dimension is settled where it and all
/// in front of it in its tensor dimension are where the target has them: it never moves again.
class Place {
 public:
  Place(const Problem& problem, LayoutPtr at);

  const LayoutPtr& layout() const { return at_; }
  const Problem& problem() const { return problem_; }
  bool is_settled(int mesh_dim) const { return settled_[static_cast<std::size_t>(mesh_dim)]; }
  /// All of it, both the order and that no other mesh dimension stands in the way.
  bool is_settled_dim(int dim) const { return complete_[static_cast<std::size_t>(dim)]; }
  /// Nothing of the tensor depends on the coordinate along `mesh_dim`.
  bool is_replicated_on(int mesh_dim) const;

  /// What a collective may take off a digit: its unsettled last mesh dimension, or several that
  /// form a flattened group.
  std::vector<Tail> tails() const;
  /// Sets of mesh dimensions that are partial with one reduction and may be reduced now.
  std::vector<std::vector<int>> reducible() const;
  /// `mesh_dims` in the order that the target has them in.
  std::vector<int> in_final_order(std::vector<int> mesh_dims) const;
  /// The final place of `mesh_dims` in this order, if it is free.
  std::optional<Landing> final_landing(std::span<const int> mesh_dims) const;
  /// The final place and the parking places.
  std::vector<Landing> landings(std::span<const int> mesh_dims) const;

  /// The layout after an edit of the digits and partial dimensions.
  LayoutPtr without(const Tail& tail) const;
  LayoutPtr moved(const Tail& tail, const Landing& landing) const;
  LayoutPtr landed(std::span<const int> mesh_dims, const Landing& landing) const;
  LayoutPtr reduced(std::span<const int> mesh_dims) const;
  LayoutPtr made_partial(PartialDim made) const;

 private:
  void settle(int dim);
  bool fits_several_digits(int dim, const std::vector<int>& present) const;
  bool is_group(int dim, const Digits& digits, std::span<const int> mesh_dims) const;

  const Problem& problem_;
  LayoutPtr at_;
  std::vector<bool> settled_;   // of each mesh dimension
  std::vector<bool> complete_;  // of each tensor dimension: all that split it are settled
};

}  // namespace tessera::plan
