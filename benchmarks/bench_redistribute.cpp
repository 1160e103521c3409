// What the planner moves for every pair of placements, a line each: mesh, sizes, from, to,
// collectives, bytes that one rank sends, separated by tabs. bench_redistribute.py puts PyTorch's
// beside them.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "tessera/core/redistribute_plan.h"

namespace {

using namespace tessera;
using Sizes = std::vector<std::int64_t>;

constexpr std::int64_t kFloat = 4;

std::vector<Placements> placement_lists(std::size_t mesh_ndim) {
  const std::vector<Placement> single{Replicate{}, Shard{0}, Shard{1}, Partial{}};
  std::vector<Placements> lists{{}};
  for (std::size_t m = 0; m < mesh_ndim; ++m) {
    std::vector<Placements> longer;
    for (const auto& list : lists) {
      for (const auto& placement : single) {
        longer.push_back(list);
        longer.back().push_back(placement);
      }
    }
    lists = std::move(longer);
  }
  if (mesh_ndim == 2) {  // the inner mesh dimension applied first: FSDP over tensor parallelism
    lists.push_back({StridedShard{0, 2}, Shard{0}});
    lists.push_back({StridedShard{1, 2}, Shard{1}});
  }
  return lists;
}

bool communicates(const Step& step) {
  return step.bytes > 0;
}

void print_pairs(const Sizes& mesh, const Sizes& sizes) {
  for (const auto& from : placement_lists(mesh.size())) {
    for (const auto& to : placement_lists(mesh.size())) {
      if (from == to || std::ranges::any_of(to, [](const auto& p) { return is_partial(p); })) {
        continue;
      }
      const auto plan = plan_redistribution(to_layout(mesh, from, sizes),
                                            to_layout(mesh, to, sizes), sizes, kFloat);
      fmt::print("{}\t{}\t{}\t{}\t{}\t{}\n", fmt::join(mesh, " "), fmt::join(sizes, " "),
                 to_string(from), to_string(to), std::ranges::count_if(plan.steps, communicates),
                 plan.bytes());
    }
  }
}

}  // namespace

int main() {
  for (const Sizes& sizes : {Sizes{8, 8}, Sizes{7, 5}}) {
    print_pairs({4}, sizes);
    print_pairs({2, 2}, sizes);
  }
}
