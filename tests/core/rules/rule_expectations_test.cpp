// What propagate() decides for calls that the table of tests/dtensor/family does not list: which
// inputs move, and how the results lie.
#include <gtest/gtest.h>

#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "tessera/core/sharding_rule.h"
#include "testing/placement_text.h"

namespace tessera {
namespace {

using Sizes = std::vector<std::int64_t>;
using Mesh = std::vector<std::int64_t>;

struct Expectation {
  const char* op;              ///< without "aten::"
  std::vector<Sizes> tensors;  ///< the first arguments
  std::vector<Argument> args;  ///< those after them
  const char* before;          ///< how the tensors lie: "S0 R", on two mesh dimensions "S0,R R,P"
  const char* decided;         ///< how they are wanted, and the results: "S0 R -> S0"
  Mesh mesh = {2};
};

void PrintTo(const Expectation& expectation, std::ostream* out) {
  *out << expectation.op << " " << expectation.before;
}

/// "-" is a plain tensor.
std::vector<LayoutPtr> layouts(const Expectation& expectation) {
  std::vector<LayoutPtr> result;
  const auto parts = testing::split(expectation.before, ' ');
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] == "-") {
      result.push_back(nullptr);
      continue;
    }
    result.push_back(
        to_layout(expectation.mesh, testing::placements_of(parts[i]), expectation.tensors[i]));
  }
  return result;
}

std::string text(LayoutPtr layout) {
  if (!layout) {
    return "-";
  }
  std::string result;
  for (int m = 0; m < layout->mesh_ndim(); ++m) {
    if (m > 0) {
      result += ",";
    }
    const PartialDim* partial = layout->partial_on(m);
    if (partial) {
      result += partial->op == ReduceOp::kSum ? "P" : "P" + to_string(partial->op);
    } else {
      const int dim = layout->sharded_dim(m);
      result += dim < 0 ? "R" : "S" + std::to_string(dim);
    }
  }
  return result;
}

std::string text(const Propagation& decided) {
  std::string result;
  for (LayoutPtr layout : decided.inputs) {
    result += text(layout) + " ";
  }
  result += "->";
  for (LayoutPtr layout : decided.outputs) {
    result += " " + text(layout);
  }
  return result;
}

OpCall to_call(const Expectation& expectation, const std::string& op) {
  OpCall call{.op = op, .args = {}, .tensors = {}};
  for (std::size_t i = 0; i < expectation.tensors.size(); ++i) {
    call.args.emplace_back(TensorRef{static_cast<int>(i)});
    call.tensors.push_back({expectation.tensors[i], 4});
  }
  call.args.insert(call.args.end(), expectation.args.begin(), expectation.args.end());
  return call;
}

class RuleExpectations : public ::testing::TestWithParam<Expectation> {};

TEST_P(RuleExpectations, AreMet) {
  const Expectation& expectation = GetParam();
  const std::string op = std::string("aten::") + expectation.op;
  const OpCall call = to_call(expectation, op);
  const auto rule = find_rule(op)(call);
  ASSERT_TRUE(rule);
  EXPECT_EQ(text(propagate(*rule, call, layouts(expectation))), expectation.decided);
}

const std::int64_t kOne = 1, kEnd = std::numeric_limits<std::int64_t>::max();

INSTANTIATE_TEST_SUITE_P(
    Pointwise, RuleExpectations,
    ::testing::Values(
        Expectation{"relu", {{8, 6}}, {}, "Pmax", "Pmax -> Pmax"},
        Expectation{"add.Tensor", {{8, 6}, {1, 6}}, {kOne}, "S0 R", "S0 R -> S0"},
        Expectation{"add.Tensor", {{8, 6}, {}}, {kOne}, "S0 -", "S0 - -> S0"},
        Expectation{"add.Scalar", {{8, 6}}, {2.0, kOne}, "P", "R -> R"},
        Expectation{"add.Scalar", {{8, 6}}, {2.0, kOne}, "Pavg", "Pavg -> Pavg"},
        Expectation{"mul.Tensor", {{8, 6}, {8, 6}}, {}, "P,R R,P", "P,R R,P -> P,P", {2, 2}},
        Expectation{"mul.Tensor", {{8, 6}, {8, 6}}, {}, "Pmax R", "R R -> R"},
        Expectation{"div.Tensor", {{}, {8, 6}}, {}, "R P", "R R -> R"},
        Expectation{"_to_copy", {{8, 6}}, {DType{DType::Kind::kFloating, 8}}, "P", "P -> P"},
        Expectation{"_to_copy", {{8, 6}}, {DType{DType::Kind::kFloating, 2}}, "P", "R -> R"},
        Expectation{"_to_copy", {{8, 6}}, {DType{DType::Kind::kSigned, 4}}, "P", "R -> R"},
        Expectation{"_to_copy", {{8, 6}}, {DType{DType::Kind::kBool, 1}}, "Pmax", "R -> R"}));

// In place, the result must lie as the tensor does: the others are brought to it.
INSTANTIATE_TEST_SUITE_P(
    Inplace, RuleExpectations,
    ::testing::Values(
        Expectation{"add_.Tensor", {{8, 6}, {8, 6}}, {kOne}, "R S0", "R R -> R"},
        Expectation{"add_.Tensor", {{8, 6}, {8, 6}}, {kOne}, "R P", "R R -> R"},
        Expectation{"add_.Tensor", {{8, 6}, {8, 6}}, {kOne}, "P R", "P P -> P"},
        Expectation{"copy_", {{8, 6}, {8, 6}}, {false}, "S1 S0", "S1 S1 -> S1"},
        Expectation{"copy_", {{8, 6}, {8, 6}}, {false}, "P R", "P P -> P"},
        Expectation{"fill_.Scalar", {{8, 6}}, {3.0}, "P", "P -> R"},
        Expectation{"relu_", {{8, 6}}, {}, "P", "R -> R"},
        Expectation{"cumsum_", {{8, 6}}, {std::int64_t{-1}}, "S1", "R -> R"},
        Expectation{"add.out", {{8, 6}, {8, 6}}, {kOne, TensorRef{0}}, "S0 S0", "S0 S0 -> S0"}));

INSTANTIATE_TEST_SUITE_P(
    Matmul, RuleExpectations,
    ::testing::Values(Expectation{"mm", {{8, 6}, {6, 4}}, {}, "R S0", "S1 S0 -> P"},
                      Expectation{"mm", {{8, 6}, {6, 4}}, {}, "P P", "P R -> P"},
                      Expectation{"matmul", {{2, 8, 6}, {6, 4}}, {}, "S2 S0", "S2 S0 -> P"}));

INSTANTIATE_TEST_SUITE_P(
    Reduction, RuleExpectations,
    ::testing::Values(Expectation{"sum.dim_IntList", {{8, 6}}, {Sizes{-1}, true}, "S0", "S0 -> S0"},
                      Expectation{"amax", {{8, 6}}, {Sizes{0}, false}, "P", "R -> R"},
                      Expectation{"amax", {{3, 6}}, {Sizes{0}, false}, "S0", "R -> R", {4}},
                      Expectation{"all", {{8, 6}}, {}, "S0", "S0 -> Pmin"},
                      Expectation{"linalg__powsum", {{8, 6}}, {2.0}, "S0", "S0 -> P"}));

INSTANTIATE_TEST_SUITE_P(
    View, RuleExpectations,
    ::testing::Values(
        Expectation{"view", {{7, 6}}, {Sizes{42}}, "S0", "S0 -> S0"},
        Expectation{"view", {{7, 6}}, {Sizes{7, 2, 3}}, "S0", "S0 -> S0"},
        Expectation{"view", {{6, 8}}, {Sizes{3, 2, 8}}, "S0", "R -> R"},
        Expectation{"unsqueeze", {{8, 6}}, {std::int64_t{-1}}, "S1", "S1 -> S1"},
        Expectation{"expand", {{8, 1}}, {Sizes{3, 8, 5}}, "S0", "S0 -> S1"},
        Expectation{"repeat", {{8, 6}}, {Sizes{2, 1}}, "S0", "S0 -> S0"},
        Expectation{
            "slice.Tensor", {{8, 6}}, {std::int64_t{0}, std::int64_t{0}, kEnd}, "S0", "S0 -> S0"}));

INSTANTIATE_TEST_SUITE_P(
    Network, RuleExpectations,
    ::testing::Values(Expectation{"_fused_rms_norm", {{8, 6}}, {Sizes{6}}, "S0", "S0 -> S0 S0"},
                      Expectation{"nll_loss_forward",
                                  {{8, 6}, {8}},
                                  {{}, kOne, std::int64_t{-100}},
                                  "S0 S0",
                                  "R R -> R R"},
                      Expectation{"take", {{8, 6}, {3}}, {}, "S0 S0", "R S0 -> S0"},
                      Expectation{"new_zeros", {{8, 6}}, {Sizes{3}}, "S0", "S0 -> R"},
                      Expectation{"new_zeros", {{8, 6}}, {Sizes{8, 3}}, "S0", "S0 -> S0"},
                      Expectation{"new_zeros", {{8, 6}}, {Sizes{8, 3}}, "S1", "S1 -> R"},
                      Expectation{"new_zeros", {{8, 6}}, {Sizes{8, 3}}, "P", "P -> R"}));

}  // namespace
}  // namespace tessera
