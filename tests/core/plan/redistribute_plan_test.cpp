
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

#include "core/layout/oracle.h"
#include "tessera/core/detail/redistribute_plan.h"
#include "testing/errors.h"

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

/// Returns the names of the steps that redistribute a float tensor of sizes 64 x 32 x 16.
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

TEST(RedistributePlan, HasTheStepsOfOneMeshDimension) {
  EXPECT_EQ(steps({4}, {S0}, {S1}), Names{"all-to-all 0>1 m0"});
  EXPECT_EQ(steps({4}, {R}, {S1}), Names{"slice 1 m0"});
  EXPECT_EQ(steps({4}, {P}, {Max}), (Names{"all-reduce m0", "make-partial m0"}));
  EXPECT_EQ(steps({1}, {S0}, {R}), Names{"relabel"});
  EXPECT_EQ(steps({1}, {P}, {S0}), Names{"relabel"});
  EXPECT_EQ(steps({1, 2}, {S0, S0}, {S0, R}), (Names{"relabel", "all-gather 0 m1", "relabel"}));
}

TEST(RedistributePlan, GathersSeveralMeshDimensionsInOneCollective) {
  EXPECT_EQ(steps({2, 2, 2}, {S0, S0, S0}, {R, R, R}), Names{"all-gather 0 m0m1m2"});
  EXPECT_EQ(steps({2, 2, 2}, {S0, S0, S0}, {S0, R, R}), Names{"all-gather 0 m1m2"});
}

TEST(RedistributePlan, ReducesInnerMeshDimensionsFirst) {
  EXPECT_EQ(steps({2, 2}, {P, Max}, {R, R}), (Names{"all-reduce m1", "all-reduce m0"}));
  EXPECT_EQ(steps({2, 2}, {P, Max}, {R, Max}),
            (Names{"all-reduce m1", "all-reduce m0", "make-partial m1"}));
  EXPECT_EQ(steps({2, 2}, {P, P}, {S0, R}), (Names{"reduce-scatter 0 m0", "all-reduce m1"}));
  EXPECT_EQ(steps({2, 2}, {P, R}, {R, S0}), (Names{"slice 0 m1", "all-reduce m0"}));
}

TEST(RedistributePlan, GathersUnevenShardsSeparatelyAndStridedShardsDirectly) {
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

TEST(RedistributePlan, HasTheStepsOfFsdpTensorAndSequenceParallelism) {
  const Placement dp = StridedShard{0, 2};
  EXPECT_EQ(steps({2, 2}, {dp, S0}, {R, S0}), Names{"all-gather 0 m0"});
  EXPECT_EQ(steps({2, 2}, {P, S0}, {dp, S0}), Names{"reduce-scatter 0 m0"});
  EXPECT_EQ(steps({2, 2}, {dp, S0}, {R, R}), Names{"all-gather 0 m1m0"});
  EXPECT_EQ(steps({2, 2}, {P, P}, {dp, S0}), Names{"reduce-scatter 0 m1m0"});
  EXPECT_EQ(steps({2, 2}, {S0, S1}, {R, S1}), Names{"all-gather 0 m0"});
  EXPECT_EQ(steps({2, 2}, {S0, S1}, {S0, R}), Names{"all-gather 1 m1"});
  EXPECT_EQ(steps({2, 2}, {S0, P}, {S0, S1}), Names{"reduce-scatter 1 m1"});
  EXPECT_EQ(steps({2, 2}, {S0, S1}, {S0, S2}), Names{"all-to-all 1>2 m1"});
  // From [S0, S1] to [S1, S0], an intermediate step shards tensor dimension 2.
  EXPECT_EQ(steps({8, 8}, {S0, S1}, {S1, S0}).size(), 3U);
}

TEST(RedistributePlan, RefusesDifferentMeshesAndDimensionCounts) {
  const auto a = Layout::replicated({2}, 1);
  EXPECT_ERROR(plan_redistribution(a, Layout::replicated({4}, 1), Indices{4}, 4),
               "is between different meshes");
  EXPECT_ERROR(plan_redistribution(a, Layout::replicated({2}, 2), Indices{4}, 4),
               "is for a tensor with 1 dimensions");
  EXPECT_ERROR(plan_redistribution(a, a, Indices{4, 4}, 4), "is for a tensor with 2 dimensions");
}

// docs/redistribution.md lists how many bytes redistributions send. The tests expect at most as
// many bytes as were measured with PyTorch.

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

/// Returns a table row of docs/redistribution.md. Tessera's bytes are bold if PyTorch sends more.
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

TEST(RedistributionTable, MatchesThePlannerAndNeverExceedsPyTorch) {
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

}  // namespace
}  // namespace tessera
