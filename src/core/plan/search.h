// The search for the cheapest steps of a redistribution.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layout/digits.h"
#include "tessera/core/detail/layout.h"
#include "tessera/core/detail/redistribute_plan.h"

namespace tessera::plan {

/// The task of a redistribution plan: a tensor of `sizes` must get layout `to`.
struct Problem {
  LayoutPtr to = nullptr;
  std::span<const std::int64_t> sizes;
  std::int64_t itemsize = 1;  ///< number of bytes of an element
  /// Tensor dimensions that may be sharded temporarily by a mesh dimension that does not shard them
  /// in the target, to make room for another mesh dimension.
  std::vector<int> temporary_dims;

  std::int64_t size(int dim) const { return sizes[static_cast<std::size_t>(dim)]; }
  std::int64_t mesh_size(int dim) const { return detail::mesh_size(to->mesh_sizes(), dim); }
};

/// Adds to `out` all steps of every kind that may be taken from `layout`; the caller sets
/// Step::bytes. To add a kind of step, add a function in search.cpp and a line in its table.
void propose_steps(const Problem& problem, LayoutPtr layout, std::vector<Step>& out);

/// The number of bytes that the rank sends that sends most in `step` (Step::bytes).
std::int64_t step_bytes(const Problem& problem, const Step& step);
/// Whether steps of kind `kind` communicate.
bool is_collective(StepKind kind);
/// The time of `step` in microseconds. Step::bytes must be set.
double step_cost(const CostModel& model, const Step& step);
/// A lower bound of the cost from `layout` to the target: the admissible heuristic of the A*
/// search.
double least_cost(const CostModel& model, const Problem& problem, LayoutPtr layout);

}  // namespace tessera::plan
