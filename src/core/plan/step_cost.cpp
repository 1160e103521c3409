// What steps cost: bytes by the sizes of real shards, time by the CostModel, and the lower bound
// that guides the search. Bytes are those of the rank that sends most, as a collective takes as
// long as its slowest rank.
#include "plan/step_cost.h"

#include "layout/digits.h"
#include "tessera/core/layout_math.h"

namespace tessera::plan {
namespace {

/// A local step is a kernel launch and perhaps a copy. More than 0, so that of two plans that send
/// the same the shorter one wins.
constexpr double kLocalStepUs = 0.5;

/// The coordinate with the largest shards: torch.chunk puts short chunks last.
std::vector<std::int64_t> first_coordinate(const Problem& problem) {
  return std::vector<std::int64_t>(problem.to->mesh_sizes().size(), 0);
}

/// The coordinate with the smallest shards along `mesh_dims`.
std::vector<std::int64_t> last_coordinate(const Problem& problem,
                                          const std::vector<int>& mesh_dims) {
  auto out = first_coordinate(problem);
  for (const int m : mesh_dims) {
    out[static_cast<std::size_t>(m)] = problem.mesh_size(m) - 1;
  }
  return out;
}

/// Elements that leave a rank: all but the chunk that it keeps.
/// What stays is least on the last coordinate, whose chunk of the new dimension is the smallest.
/// `local / before` is the number of elements for each position of the dimension.
std::int64_t all_to_all_elements(const Problem& problem, const Step& step, std::int64_t local) {
  const auto size = problem.size(step.to_dim);
  const auto before = local_size(*step.from, step.to_dim, size, first_coordinate(problem));
  const auto kept =
      local_size(*step.to, step.to_dim, size, last_coordinate(problem, step.mesh_dims));
  return before == 0 ? 0 : local / before * (before - kept);
}

/// Elements that one rank sends, with ring algorithms: an all-reduce is a reduce-scatter and an
/// all-gather.
std::int64_t elements(const Problem& problem, const Step& step) {
  const auto parts = detail::mesh_product(problem.to->mesh_sizes(), step.mesh_dims);
  const auto local = local_numel(*step.from, problem.sizes, first_coordinate(problem));
  switch (step.kind) {
    case StepKind::kAllGather:
      return local * (parts - 1);
    case StepKind::kReduceScatter:  // of equal parts: short ones are padded
      return local_numel(*step.to, problem.sizes, first_coordinate(problem)) * (parts - 1);
    case StepKind::kAllReduce:
      return 2 * (local - local / parts);
    case StepKind::kAllToAll:
      return all_to_all_elements(problem, step, local);
    case StepKind::kSlice:
    case StepKind::kMakePartial:
    case StepKind::kRelabel:
      return 0;
  }
  return 0;
}

/// Mean numbers of elements: those that a rank holds at the end, and those of them that it has now.
/// Means over the ranks, which the rank that holds or receives most does not fall below. Fractions
/// are kept: to round them up could make the bound too high.
struct Shares {
  double needed = 1;
  double present = 1;
};

/// As if all cuts were even and independent. What is sharded over the same mesh dimension in
/// another tensor dimension shares only a part with what is needed, hence the second division.
Shares shares(const SearchState& state) {
  const auto& problem = state.problem();
  Shares out;
  for (const auto size : problem.sizes) {
    out.needed *= static_cast<double>(size);
  }
  out.present = out.needed;
  for (int m = 0; m < problem.to->mesh_ndim(); ++m) {
    const auto parts = static_cast<double>(problem.mesh_size(m));
    const int here = state.layout()->sharded_dim(m);
    const int there = problem.to->sharded_dim(m);
    if (there >= 0) {
      out.needed /= parts;
      out.present /= parts;
    }
    if (here >= 0 && here != there) {
      out.present /= parts;
    }
  }
  return out;
}

/// How many kinds of reduction are still to be done: each takes a separate collective.
int pending_reductions(const SearchState& state) {
  // One bit for each ReduceOp.
  unsigned ops = 0;
  for (const auto& partial : state.layout()->partial()) {
    const auto* kept = state.problem().to->partial_on(partial.mesh_dim);
    if (kept == nullptr || kept->op != partial.op) {
      ops |= 1U << static_cast<unsigned>(partial.op);
    }
  }
  return __builtin_popcount(ops);
}

/// Whether some mesh dimension has to leave its place, for which one collective is needed at least.
bool has_pending_shard(const SearchState& state) {
  for (int m = 0; m < state.layout()->mesh_ndim(); ++m) {
    if (state.layout()->sharded_dim(m) >= 0 && !state.is_settled(m)) {
      return true;
    }
  }
  return false;
}

}  // namespace

std::int64_t step_bytes(const Problem& problem, const Step& step) {
  return elements(problem, step) * problem.itemsize;
}

bool is_collective(StepKind kind) {
  return kind == StepKind::kAllGather || kind == StepKind::kReduceScatter ||
         kind == StepKind::kAllReduce || kind == StepKind::kAllToAll;
}

/// By the alpha-beta model: latency, then bytes.
double step_cost(const CostModel& model, const Step& step) {
  if (!is_collective(step.kind)) {
    return kLocalStepUs;
  }
  return model.latency_us + static_cast<double>(step.bytes) / model.bytes_per_us;
}

/// Admissible: it counts each unavoidable collective once and never more bytes than have to arrive.
/// If it were too high the search would miss the cheapest plan.
double least_cost(const CostModel& model, const SearchState& state) {
  const int reductions = pending_reductions(state);
  const int collectives = reductions + (has_pending_shard(state) ? 1 : 0);
  if (collectives == 0) {
    return 0;
  }
  const auto [needed, present] = shares(state);
  // A pending reduction makes a rank's current values useless: it receives all that it needs.
  const auto received = reductions > 0 ? needed : needed - present;
  return collectives * model.latency_us +
         received * static_cast<double>(state.problem().itemsize) / model.bytes_per_us;
}

}  // namespace tessera::plan
