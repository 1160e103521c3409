#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/core/layout.h"

namespace tessera {

enum class StepKind : std::uint8_t {
  kAllGather,      ///< `dim` is gathered over `mesh_dims`
  kReduceScatter,  ///< partial over `mesh_dims` becomes a shard of `dim`
  kAllReduce,      ///< partial over `mesh_dims` becomes replicated
  kAllToAll,       ///< a shard of `dim` becomes a shard of `to_dim`
  kSlice,          ///< replicated becomes a shard of `dim`: local
  /// Replicated becomes partial over one mesh dimension: coordinate 0 keeps the value, others hold
  /// the identity of `op` (kAvg: all keep the value). Local.
  kMakePartial,
  kRelabel,  ///< `from` and `to` differ only on mesh dimensions of size 1: nothing moves
};

/// One step of a redistribution: at most one collective, always on the last (innermost) mesh
/// dimensions of a tensor dimension's digit.
struct Step {
  StepKind kind;
  /// One, or several that form one flattened group, in the order that the digit has them in, and
  /// its ranks too: the group of DeviceMesh::group(mesh_dims). Their sizes divide the digit, so
  /// that the group cuts it as one mesh dimension of their product would. Ascending for kAllReduce.
  /// Never of size 1. Empty for kRelabel.
  std::vector<int> mesh_dims;
  int dim = -1;
  int to_dim = -1;
  ReduceOp op = ReduceOp::kSum;
  LayoutPtr from = nullptr;
  LayoutPtr to = nullptr;
  /// That one rank sends at most (an all-reduce counts as reduce-scatter and all-gather). A pure
  /// function of the layouts and sizes, so where it is 0 every rank knows that nothing is to be
  /// sent.
  std::int64_t bytes = 0;
};

/// Time of a collective: latency + bytes / bandwidth.
struct CostModel {
  double latency_us = 10.0;
  double bytes_per_us = 80'000.0;
};

struct Plan {
  std::vector<Step> steps;
  double cost_us = 0;
  std::int64_t bytes() const;  ///< the sum over the steps
};

/// The cheapest sequence of steps from `from` to `to` for a tensor of `sizes` with elements of
/// `itemsize` bytes: a shortest path over layouts, which sends no more bytes than PyTorch's greedy
/// planner would. Pure and deterministic: every rank finds the same plan without talking. Throws
/// Error if the layouts are of different meshes or ranks, or if no sequence exists.
Plan plan_redistribution(LayoutPtr from, LayoutPtr to, std::span<const std::int64_t> sizes,
                         std::int64_t itemsize, const CostModel& model = {});
/// One line per step.
std::string to_string(const Plan& plan);

}  // namespace tessera
