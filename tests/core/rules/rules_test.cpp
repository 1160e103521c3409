// Every sharding rule against libtorch's operator: for each layout of the arguments the rule is run
// for each coordinate, and the results are put together.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "rule_cases.h"
#include "rule_simulation.h"
#include "tessera/core/error.h"
#include "tessera/core/placement.h"

namespace tessera::testing {
namespace {

/// The placements of a tensor on one mesh dimension; integers and masks are never partial.
std::vector<Placement> options(const at::Tensor& tensor) {
  std::vector<Placement> result{Replicate{}};
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    result.push_back(Shard{dim});
  }
  if (!tensor.is_floating_point()) {
    return result;
  }
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin}) {
    result.push_back(Partial{op});
  }
  return result;
}

/// Layouts for all tensors, at random.
std::vector<LayoutPtr> draw(const std::vector<at::Tensor>& tensors,
                            const std::vector<std::int64_t>& mesh, std::mt19937& random) {
  std::vector<LayoutPtr> layouts;
  for (const auto& tensor : tensors) {
    const auto choices = options(tensor);
    Placements placements;
    std::optional<ReduceOp> reduction;  // the result of different reductions depends on their order
    for (std::size_t m = 0; m < mesh.size(); ++m) {
      Placement placement = choices[random() % choices.size()];
      if (const auto* partial = std::get_if<Partial>(&placement)) {
        if (reduction && *reduction != partial->op) {
          placement = Replicate{};
        }
        reduction = partial->op;
      }
      placements.push_back(placement);
    }
    layouts.push_back(to_layout(mesh, placements, tensor.sizes().vec()));
  }
  return layouts;
}

std::string describe(const std::vector<LayoutPtr>& layouts) {
  std::string text;
  for (LayoutPtr layout : layouts) {
    text += (layout ? to_string(*layout) : "plain") + " ";
  }
  return text;
}

/// The number of layouts for each case; TESSERA_RULE_DRAWS=1000 for a thorough run.
int draws() {
  const char* text = std::getenv("TESSERA_RULE_DRAWS");
  return text ? std::atoi(text) : 12;
}

/// The first problem of a case on a mesh, or "".
std::string first_problem(const RuleCase& rule_case, const std::vector<std::int64_t>& mesh) {
  std::mt19937 random(7);
  const int count = draws();
  const auto tensors = tensors_of(rule_case.arguments());
  for (int i = 0; i < count; ++i) {
    const auto layouts = draw(tensors, mesh, random);
    std::string problem;
    try {
      problem = simulate(rule_case, layouts);
    } catch (const std::exception& error) {
      problem = std::string(error.what()).substr(0, 300);
    }
    if (!problem.empty()) {
      return rule_case.op + " with " + describe(layouts) + ": " + problem;
    }
  }
  return "";
}

class Rules : public ::testing::TestWithParam<std::vector<std::int64_t>> {
 protected:
  void expect_right(const std::vector<RuleCase>& cases) {
    for (const auto& rule_case : cases) {
      EXPECT_EQ(first_problem(rule_case, GetParam()), "");
    }
  }
};

TEST_P(Rules, Pointwise) {
  expect_right(pointwise_cases());
}
TEST_P(Rules, Reductions) {
  expect_right(reduction_cases());
}
TEST_P(Rules, Views) {
  expect_right(view_cases());
}
TEST_P(Rules, Indexing) {
  expect_right(indexing_cases());
}
TEST_P(Rules, Networks) {
  expect_right(network_cases());
}
TEST_P(Rules, Fused) {
  expect_right(fused_cases());
}
TEST_P(Rules, Lists) {
  expect_right(list_cases());
}

// Two ranks; more ranks than most sizes have elements, so that shards are empty; FSDP over TP.
INSTANTIATE_TEST_SUITE_P(Meshes, Rules,
                         ::testing::Values(std::vector<std::int64_t>{2},
                                           std::vector<std::int64_t>{4},
                                           std::vector<std::int64_t>{2, 2}));

}  // namespace
}  // namespace tessera::testing
