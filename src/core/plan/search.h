// The search for the cheapest steps of a redistribution.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "layout/digits.h"
#include "tessera/core/layout.h"
#include "tessera/core/redistribute_plan.h"

namespace tessera::plan {

// The nodes of the planner's search. SearchState knows which moves are legal and where they lead;
// the functions below turn moves into steps and compute costs.

using Digits = std::vector<Digit>;

/// The task of a redistribution plan: a tensor of `sizes` must get layout `to`.
struct Problem {
  LayoutPtr to = nullptr;
  std::span<const std::int64_t> sizes;
  std::int64_t itemsize = 1;  ///< bytes of an element
  /// Tensor dimensions that a mesh dimension may shard for a few steps although the target does not
  /// shard them so, to make room for another mesh dimension.
  std::vector<int> temporary_dims;

  std::int64_t size(int dim) const { return sizes[static_cast<std::size_t>(dim)]; }
  std::int64_t mesh_size(int dim) const { return detail::mesh_size(to->mesh_sizes(), dim); }
};

/// A tensor dimension to which mesh dimensions may be appended, and its digits afterwards.
struct Destination {
  int dim = 0;
  Digits digits;
};

/// The last mesh dimensions of a digit. Only these can be removed, because the chunks of inner mesh
/// dimensions are within those of outer ones.
struct Tail {
  int dim = 0;
  std::size_t digit = 0;
  std::vector<int> mesh_dims;
};

/// A node of the planner's search: a layout on the way to the target.
///
/// A mesh dimension is settled if it, and all mesh dimensions before it in its tensor dimension,
/// are at their place in the target. No step moves a settled mesh dimension, which keeps the search
/// small.
class SearchState {
 public:
  SearchState(const Problem& problem, LayoutPtr layout);

  const LayoutPtr& layout() const { return layout_; }
  const Problem& problem() const { return problem_; }
  bool is_settled(int mesh_dim) const { return settled_[static_cast<std::size_t>(mesh_dim)]; }
  /// Whether all mesh dimensions that shard tensor dimension `dim` now are settled.
  bool is_settled_dim(int dim) const { return complete_[static_cast<std::size_t>(dim)]; }
  bool is_replicated_on(int mesh_dim) const;

  /// The mesh dimensions that one collective may remove from a digit: the last one, if it is not
  /// settled, or several that form one flattened group.
  std::vector<Tail> tails() const;
  /// Sets of mesh dimensions that are partial with the same reduction and may be reduced now.
  std::vector<std::vector<int>> reducible_sets() const;
  /// `mesh_dims` in their order in the target.
  std::vector<int> in_final_order(std::vector<int> mesh_dims) const;
  /// The place of `mesh_dims`, in this order, in the target; nullopt if they cannot be moved there
  /// yet.
  std::optional<Destination> final_destination(std::span<const int> mesh_dims) const;
  /// The final destination, if `mesh_dims` can be moved there, and the temporary ones.
  std::vector<Destination> destinations(std::span<const int> mesh_dims) const;

  // The functions below return the layout after a step.
  LayoutPtr after_all_gather(const Tail& tail) const;
  LayoutPtr after_all_to_all(const Tail& tail, const Destination& destination) const;
  /// The layout after `mesh_dims`, replicated or partial before, shard the destination (slice,
  /// reduce-scatter).
  LayoutPtr after_shard(std::span<const int> mesh_dims, const Destination& destination) const;
  LayoutPtr after_all_reduce(std::span<const int> mesh_dims) const;
  LayoutPtr after_make_partial(PartialDim made) const;

 private:
  void settle(int dim);
  Layout::Dims without(const Tail& tail) const;
  bool fits_several_digits(int dim, const std::vector<int>& present) const;
  bool is_group(int dim, const Digits& digits, std::span<const int> mesh_dims) const;

  const Problem& problem_;
  LayoutPtr layout_;
  std::vector<bool> settled_;  // for each mesh dimension
  // for each tensor dimension: all mesh dimensions that shard it are settled
  std::vector<bool> complete_;
};

// The steps among which the planner's search chooses.

/// Adds to `out` all steps of every kind that may be taken from `state`; the caller sets
/// Step::bytes. To add a kind of step, add a function in search.cpp and a line in its table.
void propose_steps(const SearchState& state, std::vector<Step>& out);

// The costs by which the planner's search ranks steps and layouts.

/// The most bytes that one rank sends in `step` (Step::bytes), computed for the coordinate with the
/// largest local tensor.
std::int64_t step_bytes(const Problem& problem, const Step& step);
/// Whether steps of this kind communicate.
bool is_collective(StepKind kind);
/// The time of `step` in microseconds. Step::bytes must be set.
double step_cost(const CostModel& model, const Step& step);
/// A lower bound of the cost from `state` to the target; the search's admissible heuristic.
double least_cost(const CostModel& model, const SearchState& state);

}  // namespace tessera::plan
