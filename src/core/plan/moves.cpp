// Which steps may follow a layout on the way to the target. One function for each kind of step: it
// lists all candidates that make sense, and the search picks by cost. What a function leaves out is
// never planned, so that each says what it leaves out.
#include "plan/moves.h"

#include <algorithm>
#include <array>

namespace tessera::plan {
namespace {

/// Shards a replicated tensor where the target has it: a local slice.
/// Only to its final place: a slice to somewhere else would have to be gathered again.
void slice(const SearchState& state, std::vector<Step>& out) {
  for (int m = 0; m < state.layout()->mesh_ndim(); ++m) {
    if (!state.is_replicated_on(m)) {
      continue;
    }
    // Mesh dimensions in the wrong order cannot go yet: those in front of them come first.
    const auto destination = state.final_destination({&m, 1});
    if (!destination) {
      continue;
    }
    out.push_back({.kind = StepKind::kSlice,
                   .mesh_dims = {m},
                   .dim = destination->dim,
                   .from = state.layout(),
                   .to = state.after_shard({&m, 1}, *destination)});
  }
}

/// Makes a replicated tensor partial where the target is: local. A value that is replicated becomes
/// one term of the reduction, beside identities.
void make_partial(const SearchState& state, std::vector<Step>& out) {
  const auto& now = state.layout()->partial();
  for (const auto& wanted : state.problem().to->partial()) {
    // Inner mesh dimensions are reduced first (see Layout): the identities that this step adds on
    // an outer one would not survive an inner reduction that does not commute with it.
    const bool survives = std::all_of(now.begin(), now.end(), [&](const PartialDim& p) {
      return p.mesh_dim < wanted.mesh_dim || commute(p.op, wanted.op);
    });
    if (!state.is_replicated_on(wanted.mesh_dim) || !survives) {
      continue;
    }
    out.push_back({.kind = StepKind::kMakePartial,
                   .mesh_dims = {wanted.mesh_dim},
                   .op = wanted.op,
                   .from = state.layout(),
                   .to = state.after_make_partial(wanted)});
  }
}

/// For each set of mesh dimensions that may be reduced together: to its final place, and to
/// temporary ones that a later all-to-all or all-gather starts from.
void reduce_scatter(const SearchState& state, std::vector<Step>& out) {
  for (const auto& set : state.reducible_sets()) {
    const auto mesh_dims = state.in_final_order(set);
    for (const auto& destination : state.destinations(mesh_dims)) {
      out.push_back({.kind = StepKind::kReduceScatter,
                     .mesh_dims = mesh_dims,
                     .dim = destination.dim,
                     .op = state.layout()->partial_on(mesh_dims.front())->op,
                     .from = state.layout(),
                     .to = state.after_shard(mesh_dims, destination)});
    }
  }
}

/// Needs no destination: the result is replicated over the set.
void all_reduce(const SearchState& state, std::vector<Step>& out) {
  for (auto& mesh_dims : state.reducible_sets()) {
    const auto op = state.layout()->partial_on(mesh_dims.front())->op;
    const auto to = state.after_all_reduce(mesh_dims);
    out.push_back({.kind = StepKind::kAllReduce,
                   .mesh_dims = mesh_dims,
                   .op = op,
                   .from = state.layout(),
                   .to = to});
  }
}

/// Moves the last mesh dimensions of one tensor dimension to another. Within one they change their
/// order by way of another dimension or of a gather.
void all_to_all(const SearchState& state, std::vector<Step>& out) {
  for (const auto& tail : state.tails()) {
    for (const auto& destination : state.destinations(tail.mesh_dims)) {
      if (destination.dim == tail.dim) {
        continue;
      }
      out.push_back({.kind = StepKind::kAllToAll,
                     .mesh_dims = tail.mesh_dims,
                     .dim = tail.dim,
                     .to_dim = destination.dim,
                     .from = state.layout(),
                     .to = state.after_all_to_all(tail, destination)});
    }
  }
}

/// Every mesh dimension that is not settled can be gathered: so the search reaches every target, at
/// worst by a gather and a slice.
void all_gather(const SearchState& state, std::vector<Step>& out) {
  for (const auto& tail : state.tails()) {
    out.push_back({.kind = StepKind::kAllGather,
                   .mesh_dims = tail.mesh_dims,
                   .dim = tail.dim,
                   .from = state.layout(),
                   .to = state.after_all_gather(tail)});
  }
}

using Move = void (*)(const SearchState& state, std::vector<Step>& out);

// The order breaks ties between plans of equal cost: the first that was found wins.
constexpr std::array<Move, 6> kMoves{slice,      make_partial, reduce_scatter,
                                     all_reduce, all_to_all,   all_gather};

}  // namespace

/// The order of the table is part of the result: every rank must find the same plan.
void propose_steps(const SearchState& state, std::vector<Step>& out) {
  for (const auto move : kMoves) {
    move(state, out);
  }
}

}  // namespace tessera::plan
