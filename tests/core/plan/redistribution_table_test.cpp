// docs/redistribution.md lists what the planner sends, and never more than what PyTorch was
// measured to; and between two placements on one mesh dimension it is what the formula says.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tessera/core/redistribute_plan.h"

namespace tessera {
namespace {

using Sizes = std::vector<std::int64_t>;

struct Moved {
  std::int64_t bytes = 0;
  std::int64_t collectives = 0;
  friend bool operator==(const Moved&, const Moved&) = default;
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

Sizes numbers(const std::string& text) {
  Sizes result;
  std::istringstream in(text);
  for (std::string word; in >> word;) {
    if (std::isdigit(static_cast<unsigned char>(word[0]))) {
      result.push_back(std::stoll(word));
    }
  }
  return result;
}

/// "[Shard(0), _StridedShard(dim=1, sf=2)]": a placement ends with its closing parenthesis.
Placements placements(const std::string& text) {
  Placements result;
  std::size_t begin = 1;
  for (auto end = text.find(')'); end != std::string::npos; end = text.find(')', begin)) {
    result.push_back(parse_placement(text.substr(begin, end + 1 - begin)));
    begin = end + 3;
  }
  return result;
}

/// The row of these cells as it should be: with what the planner moves, in bold where that is less.
std::string row_of(const std::vector<std::string>& cells) {
  const auto mesh = numbers(cells[0]);
  const auto from = placements(cells[1]), to = placements(cells[2]);
  std::ostringstream row;
  row << "| " << cells[0] << " | `" << cells[1] << "` | `" << cells[2] << "` |";
  for (const auto& [sizes, theirs] :
       {std::pair(Sizes{8, 8}, cells[4]), std::pair(Sizes{7, 5}, cells[6])}) {
    const auto own = moved(mesh, sizes, from, to);
    EXPECT_LE(own.bytes, numbers(theirs).front()) << row.str();
    const char* mark = own.bytes < numbers(theirs).front() ? "**" : "";
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
  EXPECT_EQ(rows, 196);
  if (std::getenv("TESSERA_UPDATE_DOCS") != nullptr) {
    std::ofstream(TESSERA_REDISTRIBUTION_DOC) << text;
  }
}

std::int64_t chunk(std::int64_t size, std::int64_t parts) {
  return (size + parts - 1) / parts;
}

class OneMeshDimension : public ::testing::TestWithParam<std::tuple<std::int64_t, Sizes>> {
 protected:
  std::int64_t p() const { return std::get<0>(GetParam()); }
  const Sizes& sizes() const { return std::get<1>(GetParam()); }
  std::int64_t rows() const { return sizes()[0]; }
  std::int64_t columns() const { return sizes()[1]; }
  std::int64_t bytes(const Placement& from, const Placement& to) const {
    return moved({p()}, sizes(), {from}, {to}).bytes;
  }
};

TEST_P(OneMeshDimension, GathersFromEveryOther) {
  EXPECT_EQ(bytes(Shard{0}, Replicate{}), 4 * (p() - 1) * chunk(rows(), p()) * columns());
  EXPECT_EQ(bytes(Shard{1}, Replicate{}), 4 * (p() - 1) * rows() * chunk(columns(), p()));
}

TEST_P(OneMeshDimension, ScattersToEveryOther) {
  EXPECT_EQ(bytes(Partial{}, Shard{0}), 4 * (p() - 1) * chunk(rows(), p()) * columns());
  EXPECT_EQ(bytes(Partial{}, Shard{1}), 4 * (p() - 1) * rows() * chunk(columns(), p()));
}

TEST_P(OneMeshDimension, ReducesByScatteringAndGathering) {
  const auto numel = rows() * columns();
  EXPECT_EQ(bytes(Partial{}, Replicate{}), 4 * 2 * (numel - numel / p()));
}

TEST_P(OneMeshDimension, ExchangesAllButWhatItKeeps) {
  const auto last = std::max<std::int64_t>(0, columns() - (p() - 1) * chunk(columns(), p()));
  EXPECT_EQ(bytes(Shard{0}, Shard{1}), 4 * chunk(rows(), p()) * (columns() - last));
}

TEST_P(OneMeshDimension, SlicesWithoutCommunication) {
  EXPECT_EQ(bytes(Replicate{}, Shard{0}), 0);
  EXPECT_EQ(bytes(Replicate{}, Partial{}), 0);
  EXPECT_EQ(bytes(Shard{1}, Shard{1}), 0);
}

INSTANTIATE_TEST_SUITE_P(EvenAndUneven, OneMeshDimension,
                         ::testing::Combine(::testing::Values(2, 3, 4, 8),
                                            ::testing::Values(Sizes{8, 8}, Sizes{7, 5},
                                                              Sizes{1, 16}, Sizes{13, 3})));

}  // namespace
}  // namespace tessera
