// Every row of the family table: its results, their layouts, and what it communicates.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

#include "family_run.h"
#include "testing/case_name.h"
#include "testing/ranks.h"

namespace tessera {
namespace {

using testing::Family;
using testing::LayoutCase;
using testing::Operation;
using testing::Tensors;

void expect_same(const Tensors& found, const Tensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].defined(), expected[i].defined()) << i;
    if (!found[i].defined()) {
      continue;
    }
    ASSERT_EQ(found[i].sizes(), expected[i].sizes()) << i;
    EXPECT_TRUE(at::allclose(found[i].to(at::kDouble), expected[i].to(at::kDouble), 1e-9, 1e-12))
        << i << ": " << found[i] << "\nexpected\n"
        << expected[i];
  }
}

void check(const Operation& operation, const LayoutCase& row, const DeviceMesh& mesh) {
  SCOPED_TRACE(fmt::format("{} of {}", operation.name, row.operands));
  const auto expected = testing::expected_of(operation, mesh);
  const auto found = testing::run_as(operation, row.operands, mesh);
  EXPECT_EQ(found.layout_of_results, row.results);
  EXPECT_EQ(found.forward, row.forward);
  EXPECT_EQ(found.layout_of_gradients, row.gradients);
  EXPECT_EQ(found.backward, row.backward);
  expect_same(found.results, expected.results);
  expect_same(found.gradients, expected.gradients);
}

class FamilyTable : public ::testing::TestWithParam<Family> {};

TEST_P(FamilyTable, CommunicatesWhatItLists) {
  RunOnMesh({4}, {"x"}, [](Rank& rank, const DeviceMesh& line) {
    const auto square = rank.mesh({2, 2}, {"x", "y"});
    for (const auto& operation : GetParam().operations) {
      for (const LayoutCase& row : operation.layouts) {
        const bool on_square = std::string(row.operands).find(',') != std::string::npos;
        check(operation, row, on_square ? square : line);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, FamilyTable, ::testing::ValuesIn(testing::families()),
                         testing::name_of_case<Family>);

TEST(FamilyTableDocumentation, IsTheTable) {
  const auto text = render(testing::families());
  if (std::getenv("TESSERA_UPDATE_DOCS") != nullptr) {
    std::ofstream(TESSERA_RULES_DOC) << text;
  }
  std::ifstream file(TESSERA_RULES_DOC);
  const std::string found{std::istreambuf_iterator<char>(file), {}};
  EXPECT_TRUE(found == text) << "docs/sharding_rules.md is out of date: run this test with "
                                "TESSERA_UPDATE_DOCS=1 in the environment";
}

}  // namespace
}  // namespace tessera
