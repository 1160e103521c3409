#pragma once

#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>
#include <vector>

#include "tessera/core/detail/layout.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The operation of a redistribution step.
enum class StepKind : std::uint8_t {
  kAllGather,      ///< redistributes from Shard(`dim`) over `mesh_dims` to Replicate
  kReduceScatter,  ///< redistributes from Partial over `mesh_dims` to Shard(`dim`)
  kAllReduce,      ///< redistributes from Partial over `mesh_dims` to Replicate
  kAllToAll,       ///< redistributes from Shard(`dim`) to Shard(`to_dim`)
  kSlice,          ///< redistributes from Replicate to Shard(`dim`), without communication
  /// Redistributes from Replicate to Partial over one mesh dimension, without communication. For a
  /// sum or product, coordinate 0 keeps the value, and the other ranks get 0 or 1. For kAvg, kMax
  /// and kMin, all ranks keep the value.
  kMakePartial,
  kRelabel,  ///< changes the layout on mesh dimensions of size 1, without communication
};

/// One step of a redistribution: at most one collective. The step changes only the last of the mesh
/// dimensions that shard a tensor dimension (or a Digit, see layout.h).
struct Step {
  StepKind kind;
  /// The mesh dimensions of the step's process group, in the order in which these mesh dimensions
  /// divide tensor dimension `dim` (kAllReduce: ascending). Together these mesh dimensions make the
  /// same chunks as one mesh dimension of the group's size. Empty for kRelabel.
  std::vector<int> mesh_dims;
  int dim = -1;     ///< tensor dimension that is sharded before or after the step; -1 if unused
  int to_dim = -1;  ///< target tensor dimension of kAllToAll; -1 if unused
  ReduceOp op = ReduceOp::kSum;
  LayoutPtr from = nullptr;
  LayoutPtr to = nullptr;
  /// The most bytes that any rank sends in the step, equal on all ranks. An all-reduce counts as a
  /// reduce-scatter and an all-gather.
  std::int64_t bytes = 0;
};

/// Whether a step of a redistribution is a collective.
inline bool communicates(const Step& step) {
  return step.kind == StepKind::kAllGather || step.kind == StepKind::kReduceScatter ||
         step.kind == StepKind::kAllReduce || step.kind == StepKind::kAllToAll;
}

/// The steps of a redistribution, in the order of their execution.
struct RedistributionPlan {
  std::vector<Step> steps;
  std::int64_t bytes() const;  ///< the sum of Step::bytes over all steps
};

/// Returns the cheapest steps from layout `from` to `to`, for a tensor of global `sizes` and
/// elements of `itemsize` bytes. The assumed cost of a collective is 10 us, plus 1 us per 80,000
/// bytes that a rank sends. Algorithm: shortest path over layouts. Pure and thread safe. Throws
/// Error if no sequence of steps exists, or if the meshes or numbers of dimensions differ.
RedistributionPlan plan_redistribution(LayoutPtr from, LayoutPtr to,
                                       std::span<const std::int64_t> sizes, std::int64_t itemsize);
/// Returns a redistribution plan as text with one line for each step, for messages and tests.
std::string to_string(const RedistributionPlan& plan);
/// Writes to_string(plan) to `stream`.
std::ostream& operator<<(std::ostream& stream, const RedistributionPlan& plan);

}  // namespace tessera
TESSERA_API_END
