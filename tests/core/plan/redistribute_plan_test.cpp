#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "core/layout/oracle.h"
#include "tessera/core/detail/redistribute_plan.h"
#include "tessera/core/error.h"
#include "testing/errors.h"
#include "testing/layouts.h"

namespace tessera {
namespace {

using testing::Indices;

std::string name(const Step& step) {
  std::string mesh_dims;
  for (const int m : step.mesh_dims) {
    mesh_dims += "m" + std::to_string(m);
  }
  const auto dim = std::to_string(step.dim);
  switch (step.kind) {
    case StepKind::kAllGather:
      return "all-gather " + dim + " " + mesh_dims;
    case StepKind::kReduceScatter:
      return "reduce-scatter " + dim + " " + mesh_dims;
    case StepKind::kAllReduce:
      return "all-reduce " + mesh_dims;
    case StepKind::kAllToAll:
      return "all-to-all " + dim + ">" + std::to_string(step.to_dim) + " " + mesh_dims;
    case StepKind::kSlice:
      return "slice " + dim + " " + mesh_dims;
    case StepKind::kMakePartial:
      return "make-partial " + mesh_dims;
    case StepKind::kRelabel:
      return "relabel";
  }
  return "?";
}

using Names = std::vector<std::string>;

/// The steps for a float tensor of 64 x 32 x 16, which every mesh here divides.
Names steps(const Indices& mesh, const Placements& from, const Placements& to) {
  const Indices sizes{64, 32, 16};
  Names out;
  for (const auto& step :
       plan_redistribution(to_layout(mesh, from, sizes), to_layout(mesh, to, sizes), sizes, 4)
           .steps) {
    out.push_back(name(step));
  }
  return out;
}

const Placement R = Replicate{};
const Placement S0 = Shard{0};
const Placement S1 = Shard{1};
const Placement S2 = Shard{2};
const Placement P = Partial{};
const Placement Max = Partial{ReduceOp::kMax};

TEST(RedistributePlan, OneMeshDimension) {
  EXPECT_EQ(steps({4}, {S0}, {S0}), Names{});
  EXPECT_EQ(steps({4}, {S0}, {R}), Names{"all-gather 0 m0"});
  EXPECT_EQ(steps({4}, {S0}, {S1}), Names{"all-to-all 0>1 m0"});
  EXPECT_EQ(steps({4}, {R}, {S1}), Names{"slice 1 m0"});
  EXPECT_EQ(steps({4}, {P}, {R}), Names{"all-reduce m0"});
  EXPECT_EQ(steps({4}, {P}, {S1}), Names{"reduce-scatter 1 m0"});
  EXPECT_EQ(steps({4}, {R}, {P}), Names{"make-partial m0"});
  EXPECT_EQ(steps({4}, {P}, {P}), Names{});
  EXPECT_EQ(steps({4}, {S0}, {P}), (Names{"all-gather 0 m0", "make-partial m0"}));
  EXPECT_EQ(steps({4}, {P}, {Max}), (Names{"all-reduce m0", "make-partial m0"}));
  EXPECT_EQ(steps({1}, {S0}, {R}), Names{"relabel"});
  EXPECT_EQ(steps({1}, {P}, {S0}), Names{"relabel"});
  EXPECT_EQ(steps({1, 2}, {S0, S0}, {S0, R}), (Names{"relabel", "all-gather 0 m1", "relabel"}));
}

TEST(RedistributePlan, SeveralMeshDimensionsAreOneCollective) {
  EXPECT_EQ(steps({2, 2}, {S0, S0}, {R, R}), Names{"all-gather 0 m0m1"});
  EXPECT_EQ(steps({2, 2}, {P, P}, {R, R}), Names{"all-reduce m0m1"});
  EXPECT_EQ(steps({2, 2}, {P, P}, {S1, S1}), Names{"reduce-scatter 1 m0m1"});
  EXPECT_EQ(steps({2, 2}, {S0, S0}, {S1, S1}), Names{"all-to-all 0>1 m0m1"});
  EXPECT_EQ(steps({2, 2, 2}, {S0, S0, S0}, {R, R, R}), Names{"all-gather 0 m0m1m2"});
  EXPECT_EQ(steps({2, 2, 2}, {S0, S0, S0}, {S0, R, R}), Names{"all-gather 0 m1m2"});
}

TEST(RedistributePlan, ReducesUnlikeReductionsInnerFirstAndShardsInsteadOfTheWhole) {
  EXPECT_EQ(steps({2, 2}, {P, Max}, {R, R}), (Names{"all-reduce m1", "all-reduce m0"}));
  EXPECT_EQ(steps({2, 2}, {P, Max}, {R, Max}),
            (Names{"all-reduce m1", "all-reduce m0", "make-partial m1"}));
  EXPECT_EQ(steps({2, 2}, {P, P}, {S0, R}), (Names{"reduce-scatter 0 m0", "all-reduce m1"}));
  EXPECT_EQ(steps({2, 2}, {P, R}, {R, S0}), (Names{"slice 0 m1", "all-reduce m0"}));
}

TEST(RedistributePlan, GathersUnevenShardsByMeshDimensionAndLeavesALocalDigitInFront) {
  const auto names_of = [](LayoutPtr from, LayoutPtr to, std::int64_t size) {
    const auto plan = plan_redistribution(from, to, Indices{size}, 4);
    Names names;
    std::ranges::transform(plan.steps, std::back_inserter(names), name);
    return std::pair(names, plan.steps.back().to);
  };
  const auto whole = Layout::replicated({2}, 1), four = Layout::replicated({2, 2}, 1);
  EXPECT_EQ(names_of(to_layout({2, 2}, {S0, S0}, Indices{7}), four, 7),
            std::pair(Names{"all-gather 0 m1", "all-gather 0 m0"}, four));
  const auto strided = Layout::intern({2}, {{{3, {}}, {4, {0}}}});
  EXPECT_EQ(names_of(strided, whole, 12), std::pair(Names{"all-gather 0 m0"}, whole));
  EXPECT_EQ(names_of(whole, strided, 12), std::pair(Names{"slice 0 m0"}, strided));
}

TEST(RedistributePlan, FsdpOverTensorParallelAndSequenceParallel) {
  const Placement dp = StridedShard{0, 2};  // FSDP's dimension, applied after tp
  EXPECT_EQ(steps({2, 2}, {dp, S0}, {R, S0}), Names{"all-gather 0 m0"});
  EXPECT_EQ(steps({2, 2}, {P, S0}, {dp, S0}), Names{"reduce-scatter 0 m0"});
  EXPECT_EQ(steps({2, 2}, {dp, S0}, {R, R}), Names{"all-gather 0 m1m0"});
  EXPECT_EQ(steps({2, 2}, {P, P}, {dp, S0}), Names{"reduce-scatter 0 m1m0"});
  EXPECT_EQ(steps({2, 2}, {S0, S1}, {R, S1}), Names{"all-gather 0 m0"});
  EXPECT_EQ(steps({2, 2}, {S0, S1}, {S0, R}), Names{"all-gather 1 m1"});
  EXPECT_EQ(steps({2, 2}, {S0, P}, {S0, S1}), Names{"reduce-scatter 1 m1"});
  EXPECT_EQ(steps({2, 2}, {S0, S1}, {S0, S2}), Names{"all-to-all 1>2 m1"});
  // The exchange of two shards moves one of them through the third dimension.
  EXPECT_EQ(steps({8, 8}, {S0, S1}, {S1, S0}).size(), 3U);
}

struct BytesCase {
  Indices mesh;
  Placements from;
  Placements to;
  Indices sizes;
  std::int64_t bytes;
};

TEST(RedistributePlan, CountsTheBytesThatOneRankSends) {
  const BytesCase cases[] = {
      {{4}, {S0}, {R}, {8, 4}, 3 * 8 * 4},            // each rank sends its 8 elements to 3 others
      {{4}, {S0}, {R}, {7, 4}, 3 * 8 * 4},            // the largest shard decides
      {{4}, {P}, {S0}, {8, 4}, 24 * 4},               // all but its own quarter
      {{4}, {P}, {R}, {8, 4}, 48 * 4},                // a scatter, then a gather
      {{4}, {S0}, {S1}, {8, 4}, 6 * 4},               // each rank keeps 2 of its 8 elements
      {{2, 2}, {S0, S0}, {R, R}, {8, 4}, 3 * 8 * 4},  // one flattened group, like a mesh of 4
      {{4}, {R}, {S0}, {8, 4}, 0},
      {{4}, {S0}, {R}, {0, 4}, 0},
  };
  for (const auto& c : cases) {
    const auto plan = plan_redistribution(to_layout(c.mesh, c.from, c.sizes),
                                          to_layout(c.mesh, c.to, c.sizes), c.sizes, 4);
    EXPECT_EQ(plan.bytes(), c.bytes) << to_string(plan);
  }
}

TEST(RedistributePlan, PrintsAndCostsLatencyAndBytes) {
  const auto scatter = plan_redistribution(to_layout({4}, {P}, Indices{8}),
                                           to_layout({4}, {S0}, Indices{8}), Indices{8}, 4);
  EXPECT_EQ(to_string(scatter),
            "reduce-scatter dim 0 over m0, 24 bytes: [-] partial{m0:sum} -> [m0]\n");
  const Indices sizes{8, 4};
  const CostModel model{.latency_us = 7, .bytes_per_us = 2};
  const auto plan =
      plan_redistribution(to_layout({4}, {S0}, sizes), Layout::replicated({4}, 2), sizes, 4, model);
  EXPECT_DOUBLE_EQ(plan.cost_us, 7 + 96 / 2.0);
}

TEST(RedistributePlan, RefusesOtherMeshesAndRanks) {
  const auto a = Layout::replicated({2}, 1);
  EXPECT_ERROR(plan_redistribution(a, Layout::replicated({4}, 1), Indices{4}, 4),
               "is between different meshes");
  EXPECT_ERROR(plan_redistribution(a, Layout::replicated({2}, 2), Indices{4}, 4),
               "is of a tensor with 1 dimensions");
  EXPECT_ERROR(plan_redistribution(a, a, Indices{4, 4}, 4), "is of a tensor with 2 dimensions");
}

}  // namespace

// No plan sends more bytes than a plan of PyTorch. PyTorch's greedy planner is repeated here; its
// cost is the bytes of the padded buffers that it passes to its collectives.

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

TEST(PlanBytes, NeverMoreThanPyTorch) {
  for (const Indices& sizes : {Indices{8, 8}, Indices{7, 5}, Indices{3, 9}, Indices{0, 4}}) {
    check_all_pairs({4}, sizes, {});
  }
  const auto check_costs = [](const Indices& mesh, const Indices& sizes) {
    for (const CostModel& model : {CostModel{}, kLatencyCounts, kBytesCount}) {
      check_all_pairs(mesh, sizes, model);
    }
  };
  for (const Indices& sizes : {Indices{8, 8}, Indices{7, 5}, Indices{1, 16}, Indices{4, 6, 3}}) {
    check_costs({2, 2}, sizes);
  }
  for (const Indices& mesh : {Indices{4, 2}, Indices{2, 4}, Indices{2, 8}, Indices{3, 2}}) {
    check_costs(mesh, {16, 32});
    check_costs(mesh, {7, 13});
  }
  check_all_pairs({2, 2, 2}, {8, 16}, {});
  check_all_pairs({2, 3, 2}, {7, 5}, {});
}

}  // namespace

// Random redistributions: each plan gives the right values by legal steps.

namespace {

using testing::Indices;
using testing::SimulatedWorld;

struct DrawnPlan {
  Indices mesh;
  Indices sizes;
  LayoutPtr from;
  LayoutPtr to;
};

DrawnPlan random_case(unsigned seed) {
  const std::vector<ReduceOp> all{ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin,
                                  ReduceOp::kProduct};
  std::mt19937 engine(seed);
  DrawnPlan c;
  c.mesh = testing::random_sizes(engine, 1 + engine() % 3, {1, 2, 2, 3, 4});
  c.sizes = testing::random_sizes(engine, engine() % 4, {0, 1, 2, 5, 6, 7, 8});
  const auto ops = engine() % 3 == 0 ? all : std::vector{all[engine() % all.size()]};
  c.from = testing::random_layout(engine, c.mesh, c.sizes, ops);
  c.to = testing::random_layout(engine, c.mesh, c.sizes, ops);
  return c;
}

/// Checks Step::mesh_dims: no dimension of size 1, and the last dimensions of a digit in its order.
void expect_well_formed(const Step& step) {
  if (step.kind == StepKind::kAllReduce) {
    EXPECT_TRUE(std::is_sorted(step.mesh_dims.begin(), step.mesh_dims.end()));
  }
  EXPECT_EQ(step.mesh_dims.empty(), step.kind == StepKind::kRelabel);
  for (const int m : step.mesh_dims) {
    EXPECT_GT(step.from->mesh_sizes()[static_cast<std::size_t>(m)], 1);
  }
  const auto is_tail = [&](const std::vector<Digit>& digits) {
    return std::any_of(digits.begin(), digits.end(), [&](const Digit& digit) {
      return digit.mesh_dims.size() >= step.mesh_dims.size() &&
             std::equal(step.mesh_dims.rbegin(), step.mesh_dims.rend(), digit.mesh_dims.rbegin());
    });
  };
  const bool leaves = step.kind == StepKind::kAllGather || step.kind == StepKind::kAllToAll;
  const bool lands = step.kind == StepKind::kReduceScatter || step.kind == StepKind::kSlice;
  EXPECT_TRUE(!leaves || is_tail(step.from->digits(step.dim)));
  EXPECT_TRUE(!lands || is_tail(step.to->digits(step.dim)));
  EXPECT_TRUE(step.kind != StepKind::kAllToAll || is_tail(step.to->digits(step.to_dim)));
}

std::string describe(const DrawnPlan& c, const RedistributionPlan& plan) {
  std::string out = to_string(*c.from) + " to " + to_string(*c.to) + " of";
  for (const auto size : c.sizes) {
    out += " " + std::to_string(size);
  }
  out += " on";
  for (const auto size : c.mesh) {
    out += " " + std::to_string(size);
  }
  return out + "\n" + to_string(plan);
}

void check(const DrawnPlan& c, const CostModel& model) {
  const auto plan = plan_redistribution(c.from, c.to, c.sizes, 4, model);
  SCOPED_TRACE(describe(c, plan));
  SimulatedWorld world(c.from, c.sizes);
  for (const auto& step : plan.steps) {
    expect_well_formed(step);
    EXPECT_LE(world.most_sent(step) * 4, step.bytes);
    ASSERT_NO_FATAL_FAILURE(world.run(step));
  }
  world.expect_correct(c.to);
}

// Under sanitizers one case takes 25 ms.
#ifdef TESSERA_SANITIZED
constexpr unsigned kCases = 400;
#else
constexpr unsigned kCases = 3000;
#endif

TEST(PlanProperty, RandomPlansArriveWhereLatencyOrBytesCount) {
  for (unsigned seed = 0; seed < kCases && !::testing::Test::HasFailure(); ++seed) {
    check(random_case(seed), {});
    check(random_case(10000 + seed), {.latency_us = 0.001, .bytes_per_us = 1});
  }
}

TEST(PlanProperty, IsTheSamePlanEveryTime) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    const auto c = random_case(seed);
    EXPECT_EQ(to_string(plan_redistribution(c.from, c.to, c.sizes, 4)),
              to_string(plan_redistribution(c.from, c.to, c.sizes, 4)));
  }
}

/// A flattened group cuts like one mesh dimension of the product of its sizes: the members' blocks,
/// in the order of ranks, are those of torch.chunk.
TEST(PlanProperty, FlattenedGroupsCutLikeOneMeshDimension) {
  int merged = 0;
  for (unsigned seed = 20000; seed < 24000; ++seed) {
    const auto c = random_case(seed);
    for (const auto& step : plan_redistribution(c.from, c.to, c.sizes, 4).steps) {
      if (step.kind != StepKind::kAllGather || step.mesh_dims.size() < 2) {
        continue;
      }
      if (step.from->digits(step.dim).size() != 1) {
        continue;
      }
      ++merged;
      const auto size = c.sizes[static_cast<std::size_t>(step.dim)];
      Indices group_mesh;
      for (const int m : step.mesh_dims) {
        group_mesh.push_back(c.mesh[static_cast<std::size_t>(m)]);
      }
      std::int64_t rank = 0;
      for (const auto& member : testing::coordinates(group_mesh)) {
        Indices at(c.mesh.size(), 0);
        for (std::size_t i = 0; i < member.size(); ++i) {
          at[static_cast<std::size_t>(step.mesh_dims[i])] = member[i];
        }
        const auto whole = testing::layout_indices(*step.to, step.dim, size, at);
        const auto parts = static_cast<std::int64_t>(testing::coordinates(group_mesh).size());
        EXPECT_EQ(testing::layout_indices(*step.from, step.dim, size, at),
                  testing::chunk(whole, parts, rank++));
      }
    }
  }
  EXPECT_GT(merged, 30);
}

}  // namespace

// docs/redistribution.md lists the bytes that the planner sends, which are never more than those
// measured with PyTorch. For one mesh dimension they follow a formula.

namespace {

using testing::numbers_in;
using testing::placements_in;
using Sizes = std::vector<std::int64_t>;

struct Moved {
  std::int64_t bytes = 0;
  std::int64_t collectives = 0;
};

std::ostream& operator<<(std::ostream& out, const Moved& moved) {
  return out << moved.bytes << " in " << moved.collectives;
}

Moved moved(const Sizes& mesh, const Sizes& sizes, const Placements& from, const Placements& to) {
  const auto plan =
      plan_redistribution(to_layout(mesh, from, sizes), to_layout(mesh, to, sizes), sizes, 4);
  return {plan.bytes(), std::count_if(plan.steps.begin(), plan.steps.end(),
                                      [](const Step& step) { return step.bytes > 0; })};
}

std::vector<std::string> cells_of(const std::string& row) {
  std::vector<std::string> cells;
  std::istringstream in(row.substr(1));
  for (std::string cell; std::getline(in, cell, '|');) {
    std::erase_if(cell, [](char c) { return c == '`' || c == '*'; });
    cells.push_back(cell.substr(1, cell.size() - 2));
  }
  return cells;
}

/// The correct row for these cells: the planner's bytes, in bold if they are less than PyTorch's.
std::string row_of(const std::vector<std::string>& cells) {
  const auto mesh = numbers_in(cells[0]);
  const auto from = placements_in(cells[1]), to = placements_in(cells[2]);
  std::ostringstream row;
  row << "| " << cells[0] << " | `" << cells[1] << "` | `" << cells[2] << "` |";
  for (const auto& [sizes, theirs] :
       {std::pair(Sizes{8, 8}, cells[4]), std::pair(Sizes{7, 5}, cells[6])}) {
    const auto own = moved(mesh, sizes, from, to);
    EXPECT_LE(own.bytes, numbers_in(theirs).front()) << row.str();
    const char* mark = own.bytes < numbers_in(theirs).front() ? "**" : "";
    row << " " << mark << own << mark << " | " << theirs << " |";
  }
  return row.str();
}

TEST(RedistributionTable, ListsWhatThePlannerSendsAndNeverMoreThanPyTorch) {
  std::ifstream file(TESSERA_REDISTRIBUTION_DOC);
  std::string text;
  int rows = 0;
  for (std::string line; std::getline(file, line); text += line + "\n") {
    if (line.starts_with("| 4 |") || line.starts_with("| 2 × 2 |")) {
      const auto cells = cells_of(line);
      ASSERT_EQ(cells.size(), 7U) << line;
      const std::string row = row_of(cells);
      EXPECT_EQ(row, line) << "run this test with TESSERA_UPDATE_DOCS=1 in the environment";
      line = row;
      ++rows;
    }
  }
  EXPECT_EQ(rows, 176);
  if (std::getenv("TESSERA_UPDATE_DOCS") != nullptr) {
    std::ofstream(TESSERA_REDISTRIBUTION_DOC) << text;
  }
}

std::int64_t chunk(std::int64_t size, std::int64_t parts) {
  return (size + parts - 1) / parts;
}

TEST(OneMeshDimension, SendsWhatTheFormulasSay) {
  for (const std::int64_t p : {2, 3, 4, 8}) {
    for (const Sizes& sizes : {Sizes{8, 8}, Sizes{7, 5}, Sizes{1, 16}, Sizes{13, 3}}) {
      const auto elements = [&](const Placement& from, const Placement& to) {
        return moved({p}, sizes, {from}, {to}).bytes / 4;
      };
      const std::int64_t rows = sizes[0], columns = sizes[1], numel = rows * columns;
      const std::int64_t of_rows = chunk(rows, p) * columns, of_columns = rows * chunk(columns, p);
      EXPECT_EQ(elements(Shard{0}, Replicate{}), (p - 1) * of_rows);
      EXPECT_EQ(elements(Shard{1}, Replicate{}), (p - 1) * of_columns);
      EXPECT_EQ(elements(Partial{}, Shard{0}), (p - 1) * of_rows);
      EXPECT_EQ(elements(Partial{}, Shard{1}), (p - 1) * of_columns);
      EXPECT_EQ(elements(Partial{}, Replicate{}), 2 * (numel - numel / p));
      // In an exchange each rank sends everything but the part that it has afterwards.
      const auto last = std::max<std::int64_t>(0, columns - (p - 1) * chunk(columns, p));
      EXPECT_EQ(elements(Shard{0}, Shard{1}), chunk(rows, p) * (columns - last));
      EXPECT_EQ(elements(Replicate{}, Shard{0}), 0);
      EXPECT_EQ(elements(Replicate{}, Partial{}), 0);
      EXPECT_EQ(elements(Shard{1}, Shard{1}), 0);
    }
  }
}

}  // namespace
}  // namespace tessera
