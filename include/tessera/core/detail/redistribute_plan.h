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
  /// Redistributes from Replicate to Partial over one mesh dimension, without communication. With
  /// kAvg, kMax or kMin, all ranks keep the value. With another `op`, the rank at coordinate 0
  /// keeps the value, and the other ranks get the neutral element of `op` (0 or 1).
  kMakePartial,
  kRelabel,  ///< changes the layout on mesh dimensions of size 1, without communication
};

/// One step of a redistribution: at most one collective. In the list of mesh dimensions that shard
/// a tensor dimension (or a Digit, see layout.h), a collective changes only the last entries.
struct Step {
  StepKind kind;
  /// The mesh dimensions of the step's process group, DeviceMesh::group(mesh_dims), in the order in
  /// which the mesh dimensions divide tensor dimension `dim` (kAllReduce: ascending). The planner
  /// guarantees that several mesh dimensions divide `dim` into the same chunks as one mesh
  /// dimension of the group's size. No mesh dimension has size 1. Empty for kRelabel.
  std::vector<int> mesh_dims;
  int dim = -1;     ///< tensor dimension that is sharded before or after the step; -1 if unused
  int to_dim = -1;  ///< target tensor dimension of kAllToAll; -1 if unused
  ReduceOp op = ReduceOp::kSum;
  LayoutPtr from = nullptr;
  LayoutPtr to = nullptr;
  /// The largest number of bytes that any rank sends in the step; an all-reduce counts as a
  /// reduce-scatter and an all-gather. Equal on all ranks, so all ranks know whether data is sent.
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

/// Returns the cheapest steps from layout `from` to layout `to`, for a tensor of global `sizes`
/// with elements of `itemsize` bytes: a collective is assumed to take 10 us plus 1 us for each
/// 80,000 bytes that a rank sends. The plan is a shortest path over layouts, and never sends more
/// bytes than PyTorch's greedy planner would. Pure and thread safe: every rank computes the same
/// plan without communication. Throws Error if the layouts have different meshes or different
/// numbers of tensor dimensions, or if no sequence of steps exists.
RedistributionPlan plan_redistribution(LayoutPtr from, LayoutPtr to,
                                       std::span<const std::int64_t> sizes, std::int64_t itemsize);
/// Returns a redistribution plan as text with one line for each step, for messages and tests.
std::string to_string(const RedistributionPlan& plan);
/// Writes to_string(plan) to `stream`.
std::ostream& operator<<(std::ostream& stream, const RedistributionPlan& plan);

}  // namespace tessera
TESSERA_API_END
