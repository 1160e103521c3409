
#include <limits>
#include <ostream>
#include <utility>
#include <variant>

#include "tessera/core/detail/rule_functions.h"
#include "testing/errors.h"
#include "testing/layouts.h"

namespace tessera {
namespace {

/// Returns a call of `op` whose arguments are tensors of the given sizes, followed by `args`.
OpCall call(std::string_view op, std::vector<std::vector<std::int64_t>> tensors,
            std::vector<Argument> args = {}) {
  OpCall result{.op = op, .args = {}, .tensors = {}};
  for (auto& sizes : tensors) {
    result.args.emplace_back(TensorRef{static_cast<int>(result.tensors.size())});
    result.tensors.push_back({std::move(sizes), 4});
  }
  result.args.insert(result.args.end(), args.begin(), args.end());
  return result;
}

Propagation decide(const OpCall& call, const std::vector<LayoutPtr>& layouts) {
  return propagate(find_rule(call.op)(call).value(), call, layouts);
}

using Mesh = std::vector<std::int64_t>;

const Mesh kMesh{2, 2};

LayoutPtr layout(Layout::Dims dims, std::vector<PartialDim> partial = {}) {
  return Layout::intern(kMesh, std::move(dims), std::move(partial));
}

TEST(Propagate, KeepsTheMeshOrderOfLargerAndWrittenTensors) {
  const LayoutPtr fsdp_over_tp = layout({{{0, {1, 0}}}, {}}), other = layout({{{0, {0}}}, {}});
  const auto expect_kept = [&](const OpCall& call, const std::vector<LayoutPtr>& layouts) {
    const auto decided = decide(call, layouts);
    EXPECT_EQ(decided.inputs, std::vector<LayoutPtr>(layouts.size(), fsdp_over_tp)) << call.op;
    EXPECT_EQ(decided.outputs[0], fsdp_over_tp) << call.op;
  };
  expect_kept(call("aten::silu", {{8, 6}}), {fsdp_over_tp});
  expect_kept(call("aten::mul.Tensor", {{8, 6}, {8, 1}}), {fsdp_over_tp, other});
  expect_kept(call("aten::mul_.Tensor", {{8, 6}, {8, 6}}),
              {fsdp_over_tp, layout({{{0, {0, 1}}}, {}})});
}

/// The batch size must not affect the chosen layouts. Otherwise, a rank without rows could call an
/// all-gather that the other ranks do not call.
TEST(Propagate, ChoosesTheSameLayoutOnRanksWithoutRows) {
  const LayoutPtr rows = Layout::intern(kMesh, {{{0, {1}}}, {}}, {});
  const LayoutPtr whole = Layout::intern(kMesh, {{}}, {});
  for (const std::int64_t batch : {8, 0}) {
    const auto decided = decide(call("aten::mul.Tensor", {{batch, 4}, {4}}), {rows, whole});
    EXPECT_EQ(decided.outputs[0], rows) << batch;
  }
}

TEST(Propagate, ViewsKeepShardsOfSplitAndMergedDimensions) {
  using Sizes = std::vector<std::int64_t>;
  const Layout::Dims last{{}, {{0, {1}}}}, strided{{{3, {}}, {8, {1}}}}, both{{{0, {0, 1}}}};
  const auto expect = [](const Sizes& from, const Sizes& to, const Layout::Dims& before,
                         const Layout::Dims& input, const Layout::Dims& output) {
    const auto decided = decide(call("aten::view", {from}, {to}), {layout(before)});
    EXPECT_EQ(decided.inputs[0], layout(input)) << ::testing::PrintToString(from);
    EXPECT_EQ(decided.outputs[0], layout(output)) << ::testing::PrintToString(from);
  };
  expect({3, 8}, {24}, last, last, strided);
  expect({24}, {3, 8}, strided, strided, last);
  // The first tensor is empty, as on a rank whose part of the batch has no sequences.
  expect({0, 26, 20}, {0, 20}, {{}, {}, {{0, {1}}}}, {{}, {}, {{0, {1}}}}, last);
  expect({16}, {2, 8}, both, both, {{{0, {0}}}, {{0, {1}}}});
  expect({12}, {6, 2}, both, {{{0, {0}}}}, {{{0, {0}}}, {}});
}

TEST(Propagate, DoesNotMixDifferentReductions) {
  const LayoutPtr both = layout({{}, {}}, {{0, ReduceOp::kMax}});
  const auto decided = decide(call("aten::amax", {{8, 6}}), {both});
  EXPECT_EQ(decided.outputs[0]->partial(), (std::vector<PartialDim>{{0, ReduceOp::kMax}}));
  const auto sum =
      decide(call("aten::sum", {{8, 6}}), {layout({{{0, {1}}}, {}}, {{0, ReduceOp::kMax}})});
  EXPECT_EQ(sum.outputs[0]->partial(), (std::vector<PartialDim>{{1, ReduceOp::kSum}}));
}

TEST(Propagate, HalfPrecisionMeanAveragesOnlyEqualShards) {
  auto mean = call("aten::mean", {{8, 5}});
  mean.tensors[0].itemsize = 2;
  EXPECT_EQ(decide(mean, {layout({{{0, {0}}}, {}})}).outputs[0]->partial(),
            (std::vector<PartialDim>{{0, ReduceOp::kAvg}}));
  mean.tensors[0].sizes = {7, 5};
  EXPECT_TRUE(decide(mean, {layout({{{0, {0}}}, {}})}).outputs[0]->is_replicated());
}

TEST(Propagate, ChoosesNoLayoutForOutputsOfUnknownSize) {
  const std::string op = "aten::_scaled_dot_product_flash_attention";
  const auto decided = decide(call(op, {{2, 4, 5, 8}, {2, 4, 5, 8}, {2, 4, 5, 8}}, {0.0, true}),
                              std::vector<LayoutPtr>(3, layout({{}, {{0, {0}}}, {}, {}})));
  EXPECT_EQ(decided.outputs[1], layout({{}, {{0, {0}}}, {}}));
  EXPECT_EQ(decided.outputs[2], nullptr);
}

// Redistributing the first tensor moves fewer bytes: the first tensor already has 4 shards.
TEST(Propagate, RedistributesTheTensorWithSmallerShards) {
  const std::vector<std::int64_t> mesh{4, 2};
  const LayoutPtr in_parts = Layout::intern(mesh, {{{0, {1}}}, {{0, {0}}}});
  const LayoutPtr in_one = Layout::intern(mesh, {{}, {{0, {1}}}});
  const auto decided = decide(call("aten::add.Tensor", {{8, 8}, {8, 8}}), {in_parts, in_one});
  EXPECT_EQ(decided.outputs[0]->sharded_dim(0), 1);
  EXPECT_EQ(decided.outputs[0]->sharded_dim(1), 1);
}

TEST(Propagate, RefusesInvalidCalls) {
  const auto sum = [](Argument dims) {
    return [=] {
      const auto of_dims = call("aten::sum.dim_IntList", {{8, 6}}, {dims});
      find_rule(of_dims.op)(of_dims);
    };
  };
  const LayoutPtr other = Layout::replicated({4}, 1);
  testing::expect_refusals(
      {{"meshes",
        [&] {
          decide(call("aten::add.Tensor", {{8}, {8}}), {Layout::replicated(kMesh, 1), other});
        },
        {"meshes of different shapes"}},
       {"plain", [] { decide(call("aten::silu", {{8}}), {nullptr}); }, {"distributed argument"}},
       {"kind", sum(std::string("no list")), {"argument 1"}},
       {"range", sum(std::vector<std::int64_t>{2}), {"dimension 2", "2 dimensions"}}});
}

TEST(Propagate, GroupedQueriesShardKeyAndQueryHeadsTogether) {
  const auto attention = call("aten::_scaled_dot_product_flash_attention_for_cpu",
                              {{2, 8, 5, 4}, {2, 2, 5, 4}, {2, 2, 5, 4}}, {0.0, true});
  const LayoutPtr heads = layout({{}, {{0, {1}}}, {}, {}});
  const auto decided = decide(attention, {heads, heads, heads});
  EXPECT_EQ(decided.inputs, std::vector<LayoutPtr>(3, heads));
  EXPECT_EQ(decided.outputs[0], heads);
  // The query heads can be sharded over four ranks, but the two key heads cannot.
  const LayoutPtr four = layout({{}, {{0, {0, 1}}}, {}, {}});
  EXPECT_EQ(decide(attention, {four, heads, heads}).inputs[1]->sharded_dim(1), -1);
}

TEST(RuleRegistry, HasNoRuleForUnknownOperatorsOrResultSizes) {
  EXPECT_FALSE(find_rule("aten::no_such_operator"));
  EXPECT_FALSE(find_rule("aten::nonzero"));
  const OpCall index{.op = "aten::index.Tensor",
                     .args = {TensorRef{0}, std::vector<TensorRef>{{1}}},
                     .tensors = {{{8, 6}, 4}, {{8}, 1}}};
  const OpCall grow = call("aten::add_.Tensor", {{6}, {8, 6}});
  EXPECT_FALSE(find_rule(index.op)(index));
  EXPECT_FALSE(find_rule(grow.op)(grow));
}

TEST(RuleRegistry, MarksRulesThatReadNumbers) {
  EXPECT_TRUE(find_rule("aten::linalg_vector_norm").reads_numbers());
  EXPECT_FALSE(find_rule("aten::mul.Scalar").reads_numbers());
}

TEST(RuleRegistry, MarksOperatorsThatDrawRandomNumbers) {
  const auto dropout = call("aten::native_dropout", {{8, 6}}, {0.1, true});
  EXPECT_TRUE(find_rule(dropout.op)(dropout)->random);
  const auto attention = call("aten::_scaled_dot_product_flash_attention_for_cpu",
                              {{2, 4, 5, 8}, {2, 4, 5, 8}, {2, 4, 5, 8}}, {0.1, false});
  EXPECT_TRUE(find_rule(attention.op)(attention)->random);
}

TEST(RuleRegistry, AttentionHasStatisticsOnlyOnRequest) {
  const std::vector<std::int64_t> sizes{4, 2, 5, 8};
  const std::vector<LayoutPtr> split(3, to_layout({2}, {Shard{0}}, sizes));
  for (const bool asked : {true, false}) {
    const auto attention = call("aten::_scaled_dot_product_efficient_attention",
                                {sizes, sizes, sizes}, {std::monostate{}, asked, 0.0, false});
    const auto decided = decide(attention, split);
    const std::vector<std::int64_t> statistics{4, 2, asked ? 32 : 0};
    EXPECT_EQ(decided.output_sizes[1], statistics);
    EXPECT_EQ(decided.outputs[1], to_layout({2}, {Shard{0}}, statistics));
  }
}

// The following tables list the layouts that propagate() chooses for inputs and results. Tables of
// other operators: tests/dtensor/family.

using Sizes = std::vector<std::int64_t>;

struct Expectation {
  const char* op;              ///< the operator's name without "aten::"
  std::vector<Sizes> tensors;  ///< `tensors`: sizes of the tensor arguments
  std::vector<Argument> args;  ///< `args`: the arguments after the tensors
  const char* before;   ///< layouts of the tensors: "S0 R"; on two mesh dimensions: "S0,R R,P"
  const char* decided;  ///< layouts of the inputs and of the results: "S0 R -> S0"
  Mesh mesh = {2};
};

void PrintTo(const Expectation& expectation, std::ostream* out) {
  *out << expectation.op << " " << expectation.before;
}

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

class RuleExpectations : public ::testing::TestWithParam<Expectation> {};

TEST_P(RuleExpectations, AreMet) {
  const Expectation& expectation = GetParam();
  const std::string op = std::string("aten::") + expectation.op;
  const OpCall of_op = call(op, expectation.tensors, expectation.args);
  ASSERT_TRUE(find_rule(op)(of_op));
  EXPECT_EQ(text(decide(of_op, layouts(expectation))), expectation.decided);
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

// In-place operators keep the layout of the tensor that they write, and redistribute the other
// arguments to this layout.
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
        Expectation{"view", {{6, 1}}, {Sizes{3, 2, 1}}, "S1", "S1 -> S2"},
        Expectation{"view", {{1, 6}}, {Sizes{1, 3, 2}}, "S0", "S0 -> S0"},
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
                      Expectation{"new_zeros", {{8, 6}}, {Sizes{3}}, "S0", "S0 -> R"},
                      Expectation{"new_zeros", {{8, 6}}, {Sizes{8, 3}}, "S0", "S0 -> S0"},
                      Expectation{"new_zeros", {{8, 6}}, {Sizes{8, 3}}, "S1", "S1 -> R"},
                      Expectation{"new_zeros", {{8, 6}}, {Sizes{8, 3}}, "P", "P -> R"}));

}  // namespace
}  // namespace tessera
