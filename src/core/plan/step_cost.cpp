#include "step_cost.h"

#include "../canonical_digits.h"
#include "tessera/core/layout_math.h"

namespace tessera::plan {
namespace {

/// A local step is a copy and a kernel launch: cheap, but of two plans the shorter is better.
constexpr double kLocalStepUs = 0.5;

/// The coordinate with the largest shards.
std::vector<std::int64_t> first_coordinate(const Problem& problem) {
  return std::vector<std::int64_t>(problem.to->mesh_sizes().size(), 0);
}

/// The coordinate with the smallest shards along `mesh_dims`.
std::vector<std::int64_t> last_coordinate(const Problem& problem,
                                          const std::vector<int>& mesh_dims) {
  auto out = first_coordinate(problem);
  for (const int m : mesh_dims) out[static_cast<std::size_t>(m)] = problem.mesh_size(m) - 1;
  return out;
}

/// All but the part that a rank keeps.
std::int64_t all_to_all_elements(const Problem& problem, const Step& step, std::int64_t local) {
  const auto size = problem.size(step.to_dim);
  const auto before = local_size(*step.from, step.to_dim, size, first_coordinate(problem));
  const auto kept =
      local_size(*step.to, step.to_dim, size, last_coordinate(problem, step.mesh_dims));
  return before == 0 ? 0 : local / before * (before - kept);
}

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

/// Mean number of elements that a rank needs at the end, and of those that it has already.
struct Shares {
  double needed = 1;
  double present = 1;
};

Shares shares(const Place& place) {
  const auto& problem = place.problem();
  Shares out;
  for (const auto size : problem.sizes) out.needed *= static_cast<double>(size);
  out.present = out.needed;
  for (int m = 0; m < problem.to->mesh_ndim(); ++m) {
    const auto parts = static_cast<double>(problem.mesh_size(m));
    const int here = place.layout()->sharded_dim(m);
    const int there = problem.to->sharded_dim(m);
    if (there >= 0) out.needed /= parts;
    if (there >= 0) out.present /= parts;
    if (here >= 0 && here != there) out.present /= parts;
  }
  return out;
}

/// How many kinds of reduction are still to be done.
int pending_reductions(const Place& place) {
  unsigned ops = 0;
  for (const auto& partial : place.layout()->partial()) {
    const auto* kept = place.problem().to->partial_on(partial.mesh_dim);
    if (kept == nullptr || kept->op != partial.op) ops |= 1U << static_cast<unsigned>(partial.op);
  }
  return __builtin_popcount(ops);
}

bool has_pending_shard(const Place& place) {
  for (int m = 0; m < place.layout()->mesh_ndim(); ++m) {
    if (place.layout()->sharded_dim(m) >= 0 && !place.is_settled(m)) return true;
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

double step_cost(const CostModel& model, const Step& step) {
  if (!is_collective(step.kind)) return kLocalStepUs;
  return model.latency_us + static_cast<double>(step.bytes) / model.bytes_per_us;
}

double least_cost(const CostModel& model, const Place& place) {
  const int reductions = pending_reductions(place);
  const int collectives = reductions + (has_pending_shard(place) ? 1 : 0);
  if (collectives == 0) return 0;
  const auto [needed, present] = shares(place);
  const auto received = reductions > 0 ? needed : needed - present;
  return collectives * model.latency_us +
         received * static_cast<double>(place.problem().itemsize) / model.bytes_per_us;
}

}  // namespace tessera::plan
