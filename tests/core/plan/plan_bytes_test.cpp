// No plan sends more bytes than PyTorch's: its greedy planner, re-told here, priced by the same
// formulas on the padded buffers that it calls its collectives with.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/layout/oracle.h"
#include "tessera/core/redistribute_plan.h"

namespace tessera {
namespace {

using testing::Indices;
using testing::pos;

/// PyTorch's default planner (gen_transform_infos_nocache): inner to outer, then outer to inner,
/// one mesh dimension at a time.
class Greedy {
 public:
  Greedy(Indices mesh, Indices sizes, Placements from, Placements to)
      : mesh_(std::move(mesh)),
        sizes_(std::move(sizes)),
        now_(std::move(from)),
        to_(std::move(to)) {}

  std::int64_t elements() {
    for (std::size_t m = mesh_.size(); m-- > 0;) {
      go(m, mesh_.size() > 1 && must_replicate(m) ? Placement(Replicate{}) : to_[m]);
    }
    for (std::size_t m = 0; m < mesh_.size(); ++m) {
      go(m, to_[m]);
    }
    return sent_;
  }

 private:
  static std::vector<std::size_t> outer_shards(const Placements& list, std::int64_t dim,
                                               std::size_t end) {
    std::vector<std::size_t> out;
    for (std::size_t m = 0; m < end; ++m) {
      if (is_shard(list[m], dim)) {
        out.push_back(m);
      }
    }
    return out;
  }

  bool must_replicate(std::size_t m) const {
    const auto* shard = std::get_if<Shard>(&to_[m]);
    return shard && outer_shards(now_, shard->dim, m) != outer_shards(to_, shard->dim, m);
  }

  /// The largest local size of `dim` before mesh dimension `m` is applied.
  std::int64_t local(std::int64_t dim, std::size_t m) const {
    auto size = sizes_[pos(dim)];
    for (std::size_t i = 0; i < mesh_.size(); ++i) {
      if (i != m && is_shard(now_[i], dim)) {
        size = (size + mesh_[i] - 1) / mesh_[i];
      }
    }
    return size;
  }

  std::int64_t numel(std::size_t m) const {
    std::int64_t out = 1;
    for (std::size_t d = 0; d < sizes_.size(); ++d) {
      out *= local(static_cast<std::int64_t>(d), m);
    }
    return out;
  }

  /// Elements of a tensor of `whole` elements with `dims` cut in `mesh_[m]` padded chunks.
  std::int64_t padded(std::size_t m, std::initializer_list<std::int64_t> dims) const {
    auto out = numel(m);
    for (const auto dim : dims) {
      const auto size = local(dim, m);
      if (size == 0) {
        return 0;
      }
      out = out / size * ((size + mesh_[m] - 1) / mesh_[m]);
    }
    return out;
  }

  void go(std::size_t m, const Placement& target) {
    const auto here = now_[m];
    if (here == target) {
      return;
    }
    const auto others = mesh_[m] - 1;
    const auto* source = std::get_if<Shard>(&here);
    const auto* wanted = std::get_if<Shard>(&target);
    if (source && wanted) {
      sent_ += padded(m, {source->dim, wanted->dim}) * others;
    } else if (source) {
      sent_ += padded(m, {source->dim}) * others;
    } else if (is_partial(here) && wanted) {
      sent_ += padded(m, {wanted->dim}) * others;
    } else if (is_partial(here)) {
      sent_ += 2 * (numel(m) - numel(m) / mesh_[m]);
    }
    now_[m] = target;
  }

  Indices mesh_;
  Indices sizes_;
  Placements now_;
  Placements to_;
  std::int64_t sent_ = 0;
};

Placements placements(const std::vector<int>& codes) {
  Placements out;
  for (const int code : codes) {
    if (code == 0) {
      out.emplace_back(Replicate{});
    }
    if (code == 1) {
      out.emplace_back(Partial{});
    }
    if (code > 1) {
      out.emplace_back(Shard{code - 2});
    }
  }
  return out;
}

/// All pairs of placement lists (nothing becomes partial, which PyTorch refuses).
void check_all_pairs(const Indices& mesh, const Indices& sizes, const CostModel& model) {
  const auto lists =
      testing::all_lists(static_cast<int>(mesh.size()), 2 + static_cast<int>(sizes.size()));
  for (const auto& source : lists) {
    for (const auto& target : lists) {
      if (std::find(target.begin(), target.end(), 1) != target.end()) {
        continue;
      }
      const auto from = placements(source);
      const auto to = placements(target);
      const auto plan = plan_redistribution(to_layout(mesh, from, sizes),
                                            to_layout(mesh, to, sizes), sizes, 4, model);
      EXPECT_LE(plan.bytes(), 4 * Greedy(mesh, sizes, from, to).elements())
          << to_string(from) << " to " << to_string(to) << "\n"
          << to_string(plan);
    }
  }
}

const CostModel kLatencyCounts{.latency_us = 1e6, .bytes_per_us = 1e3};
const CostModel kBytesCount{.latency_us = 1e-3, .bytes_per_us = 1};

TEST(PlanBytes, NeverMoreThanPyTorchOn4) {
  for (const Indices& sizes : {Indices{8, 8}, Indices{7, 5}, Indices{3, 9}, Indices{0, 4}}) {
    check_all_pairs({4}, sizes, {});
  }
}

TEST(PlanBytes, NeverMoreThanPyTorchOn2x2) {
  for (const Indices& sizes : {Indices{8, 8}, Indices{7, 5}, Indices{1, 16}, Indices{4, 6, 3}}) {
    check_all_pairs({2, 2}, sizes, {});
    check_all_pairs({2, 2}, sizes, kLatencyCounts);
    check_all_pairs({2, 2}, sizes, kBytesCount);
  }
}

TEST(PlanBytes, NeverMoreThanPyTorchOn4x2And2x4And2x8) {
  for (const Indices& mesh : {Indices{4, 2}, Indices{2, 4}, Indices{2, 8}, Indices{3, 2}}) {
    for (const Indices& sizes : {Indices{16, 32}, Indices{7, 13}}) {
      check_all_pairs(mesh, sizes, {});
      check_all_pairs(mesh, sizes, kLatencyCounts);
      check_all_pairs(mesh, sizes, kBytesCount);
    }
  }
}

TEST(PlanBytes, NeverMoreThanPyTorchOnThreeMeshDimensions) {
  check_all_pairs({2, 2, 2}, {8, 16}, {});
  check_all_pairs({2, 3, 2}, {7, 5}, {});
}

}  // namespace
}  // namespace tessera
