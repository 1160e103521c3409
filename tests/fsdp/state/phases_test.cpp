// docs/fsdp.md says which phase may follow which, as the code does, and nothing else may.
#include "fsdp/state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <regex>
#include <string>
#include <tuple>
#include <vector>

#include "testing/errors.h"

namespace tessera::fsdp {
namespace {

using Row = std::tuple<std::string, std::string, std::string>;

/// The lines of the page from this heading to the next.
std::vector<std::string> section(const std::string& heading) {
  std::ifstream page(TESSERA_FSDP_DOC);
  std::vector<std::string> lines;
  bool inside = false;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("#")) {
      inside = line == "### " + heading;
    } else if (inside) {
      lines.push_back(line);
    }
  }
  EXPECT_FALSE(lines.empty()) << heading;
  return lines;
}

std::vector<Row> rows_of_page(const std::string& heading) {
  const std::regex row("\\| `(k\\w+)` \\| `(k\\w+)` \\| (.*) \\|");
  std::vector<Row> rows;
  for (const std::string& line : section(heading)) {
    if (std::smatch match; std::regex_match(line, match, row)) {
      rows.emplace_back(match[1], match[2], match[3]);
    }
  }
  return rows;
}

template <class P>
void expect_page(const std::string& heading) {
  std::vector<Row> rows;
  for (const Transition<P>& transition : legal_transitions<P>()) {
    rows.emplace_back(to_string(transition.from), to_string(transition.to), transition.cause);
  }
  EXPECT_EQ(rows_of_page(heading), rows);
}

TEST(FsdpPage, HasTheTransitionsOfTheCode) {
  expect_page<IterationPhase>("An iteration");
  expect_page<UnitPhase>("A unit");
  expect_page<GatherPhase>("The parameters of a group");
}

template <class P>
bool is_legal(P from, P to) {
  return std::ranges::any_of(legal_transitions<P>(), [&](const Transition<P>& transition) {
    return transition.from == from && transition.to == to;
  });
}

/// Every pair of phases: legal ones are entered, others are an error that changes nothing.
template <class P>
void expect_table_is_kept(int phases) {
  for (int i = 0; i < phases * phases; ++i) {
    const P from = static_cast<P>(i / phases);
    const P to = static_cast<P>(i % phases);
    Phase<P> phase(from);
    if (is_legal(from, to)) {
      phase.enter(to, "unit 'a'");
      EXPECT_EQ(phase.now(), to);
      continue;
    }
    EXPECT_ERROR(phase.enter(to, "unit 'a'"), std::string("unit 'a' cannot go from phase ") +
                                                  to_string(from) + " to " + to_string(to) +
                                                  ", only to k");
    EXPECT_EQ(phase.now(), from);
  }
}

TEST(Phase, RefusesWhatTheTableHasNot) {
  expect_table_is_kept<IterationPhase>(4);
  expect_table_is_kept<UnitPhase>(6);
  expect_table_is_kept<GatherPhase>(3);
}

}  // namespace
}  // namespace tessera::fsdp
