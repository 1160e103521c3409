#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core_test_calls.h"
#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"
#include "tessera/core/sharding_rule.h"
#include "testing/errors.h"

namespace tessera {
namespace {

using testing::call;
using testing::decide;
using Mesh = std::vector<std::int64_t>;

const Mesh kMesh{2, 2};

LayoutPtr layout(Layout::Dims dims, std::vector<PartialDim> partial = {}) {
  return Layout::intern(kMesh, std::move(dims), std::move(partial));
}

TEST(Propagate, KeepsTheOrderOfMeshDimensions) {
  const LayoutPtr fsdp_over_tp = layout({{{0, {1, 0}}}, {}});
  const auto decided = decide(call("aten::silu", {{8, 6}}), {fsdp_over_tp});
  EXPECT_EQ(decided.outputs[0], fsdp_over_tp);
}

TEST(Propagate, BringsTheOtherInputToTheOrderOfTheLarger) {
  const LayoutPtr large = layout({{{0, {1, 0}}}, {}}), small = layout({{{0, {0}}}, {}});
  const auto decided = decide(call("aten::mul.Tensor", {{8, 6}, {8, 1}}), {large, small});
  EXPECT_EQ(decided.inputs[0], large);
  EXPECT_EQ(decided.inputs[1], large);
  EXPECT_EQ(decided.outputs[0], large);
}

/// Or it would gather, and the others would not.
TEST(Propagate, ARankWithoutRowsChoosesAsTheOthersDo) {
  const LayoutPtr rows = Layout::intern(kMesh, {{{0, {1}}}, {}}, {});
  const LayoutPtr whole = Layout::intern(kMesh, {{}}, {});
  for (const std::int64_t batch : {8, 0}) {
    const auto decided = decide(call("aten::mul.Tensor", {{batch, 4}, {4}}), {rows, whole});
    EXPECT_EQ(decided.outputs[0], rows) << batch;
  }
}

TEST(Propagate, InplaceKeepsTheOrderOfItsTensor) {
  const LayoutPtr own = layout({{{0, {1, 0}}}}), other = layout({{{0, {0, 1}}}});
  const auto decided = decide(call("aten::mul_.Tensor", {{8}, {8}}), {own, other});
  EXPECT_EQ(decided.inputs[1], own);
  EXPECT_EQ(decided.outputs[0], own);
}

TEST(Propagate, FlattenPutsALocalDigitInFrontOfAShardedInnerDimension) {
  const auto decided = decide(call("aten::view", {{3, 8}}, {std::vector<std::int64_t>{24}}),
                              {layout({{}, {{0, {1}}}})});
  EXPECT_EQ(decided.outputs[0], layout({{{3, {}}, {8, {1}}}}));
}

/// Rows of sequences that a rank has none of.
TEST(Propagate, AViewWithoutElementsKeepsTheDimensionsThatBothEndWith) {
  const auto decided = decide(call("aten::view", {{0, 26, 20}}, {std::vector<std::int64_t>{0, 20}}),
                              {layout({{}, {}, {{0, {1}}}})});
  EXPECT_EQ(decided.inputs[0], layout({{}, {}, {{0, {1}}}}));
  EXPECT_EQ(decided.outputs[0], layout({{}, {{0, {1}}}}));
}

TEST(Propagate, UnflattenTakesItApartAgain) {
  const auto decided = decide(call("aten::view", {{24}}, {std::vector<std::int64_t>{3, 8}}),
                              {layout({{{3, {}}, {8, {1}}}})});
  EXPECT_EQ(decided.outputs[0], layout({{}, {{0, {1}}}}));
}

TEST(Propagate, FlattenOfAnUnevenLeadingDimensionKeepsWholeRows) {
  const auto decided = decide(call("aten::view", {{7, 4}}, {std::vector<std::int64_t>{28}}),
                              {layout({{{0, {0}}}, {}})});
  const std::vector<std::int64_t> first{0, 0}, second{1, 0};
  EXPECT_EQ(local_sizes(*decided.outputs[0], decided.output_sizes[0], first)[0], 16);
  EXPECT_EQ(local_sizes(*decided.outputs[0], decided.output_sizes[0], second)[0], 12);
}

TEST(Propagate, SplitOverTwoMeshDimensionsFollowsTheFactors) {
  const auto decided = decide(call("aten::view", {{16}}, {std::vector<std::int64_t>{2, 8}}),
                              {layout({{{0, {0, 1}}}})});
  EXPECT_EQ(decided.inputs[0], layout({{{0, {0, 1}}}}));
  EXPECT_EQ(decided.outputs[0], layout({{{0, {0}}}, {{0, {1}}}}));
}

TEST(Propagate, GathersOnlyTheMeshDimensionThatDoesNotLineUp) {
  const auto decided = decide(call("aten::view", {{12}}, {std::vector<std::int64_t>{6, 2}}),
                              {layout({{{0, {0, 1}}}})});
  EXPECT_EQ(decided.inputs[0], layout({{{0, {0}}}}));
  EXPECT_EQ(decided.outputs[0], layout({{{0, {0}}}, {}}));
}

TEST(Propagate, DoesNotMixUnlikeReductions) {
  const LayoutPtr both = layout({{}, {}}, {{0, ReduceOp::kMax}});
  const auto decided = decide(call("aten::amax", {{8, 6}}), {both});
  EXPECT_EQ(decided.outputs[0]->partial(), (std::vector<PartialDim>{{0, ReduceOp::kMax}}));
  const auto sum =
      decide(call("aten::sum", {{8, 6}}), {layout({{{0, {1}}}, {}}, {{0, ReduceOp::kMax}})});
  EXPECT_EQ(sum.outputs[0]->partial(), (std::vector<PartialDim>{{1, ReduceOp::kSum}}));
}

TEST(Propagate, AMeanOfUnequalShardsIsAScaledSum) {
  const auto mean = call("aten::mean", {{7, 5}});
  const auto rule = *find_rule(mean.op)(mean);
  const auto split = decide(mean, {layout({{{0, {0}}}, {}})});
  EXPECT_TRUE(split.use_local_call);
  EXPECT_EQ(std::get<std::string_view>(rule.local_call->op), "aten::sum");
  EXPECT_DOUBLE_EQ(rule.local_call->scale, 1.0 / 35);
  EXPECT_FALSE(decide(mean, {Layout::replicated(kMesh, 2)}).use_local_call);
}

TEST(Propagate, AMeanInHalfPrecisionAveragesEqualShardsOnly) {
  auto mean = call("aten::mean", {{8, 5}});
  mean.tensors[0].itemsize = 2;
  EXPECT_EQ(decide(mean, {layout({{{0, {0}}}, {}})}).outputs[0]->partial(),
            (std::vector<PartialDim>{{0, ReduceOp::kAvg}}));
  mean.tensors[0].sizes = {7, 5};
  EXPECT_TRUE(decide(mean, {layout({{{0, {0}}}, {}})}).outputs[0]->is_replicated());
}

TEST(Propagate, SqueezeNamesTheDimensionsOfGlobalSizeOne) {
  const auto squeeze = call("aten::squeeze", {{2, 1, 6}});
  const auto rule = *find_rule(squeeze.op)(squeeze);
  EXPECT_TRUE(decide(squeeze, {layout({{{0, {0}}}, {}, {}})}).use_local_call);
  EXPECT_EQ(std::get<std::vector<std::int64_t>>(rule.local_call->args[1]),
            (std::vector<std::int64_t>{1}));
}

TEST(Propagate, DecidesEachPositionOfAListApart) {
  OpCall lists{.op = "aten::_foreach_add.List",
               .args = {std::vector<TensorRef>{{0}, {1}}, std::vector<TensorRef>{{2}, {3}}},
               .tensors = {{{8, 6}}, {{4}}, {{8, 6}}, {{4}}}};
  const LayoutPtr rows = layout({{{0, {0}}}, {}}), whole = Layout::replicated(kMesh, 1);
  const auto decided = decide(lists, {rows, whole, rows, whole});
  EXPECT_EQ(decided.outputs[0], rows);
  EXPECT_EQ(decided.outputs[1], whole);
}

TEST(Propagate, LeavesOutputsOfUnknownSizesOpen) {
  const std::string op = "aten::_scaled_dot_product_flash_attention";
  const auto decided = decide(call(op, {{2, 4, 5, 8}, {2, 4, 5, 8}, {2, 4, 5, 8}}, {0.0, true}),
                              std::vector<LayoutPtr>(3, layout({{}, {{0, {0}}}, {}, {}})));
  EXPECT_EQ(decided.outputs[1], layout({{}, {{0, {0}}}, {}}));
  EXPECT_EQ(decided.outputs[2], nullptr);
}

// On mesh dimension 0 the first is in 4 parts already, the second is not.
TEST(Propagate, MovesTheTensorThatOtherMeshDimensionsHaveMadeSmaller) {
  const std::vector<std::int64_t> mesh{4, 2};
  const LayoutPtr in_parts = Layout::intern(mesh, {{{0, {1}}}, {{0, {0}}}});
  const LayoutPtr in_one = Layout::intern(mesh, {{}, {{0, {1}}}});
  const auto decided = decide(call("aten::add.Tensor", {{8, 8}, {8, 8}}), {in_parts, in_one});
  EXPECT_EQ(decided.outputs[0]->sharded_dim(0), 1);
  EXPECT_EQ(decided.outputs[0]->sharded_dim(1), 1);
}

TEST(Propagate, RefusesMeshesOfDifferentShapes) {
  const LayoutPtr other = Layout::replicated({4}, 1);
  EXPECT_ERROR(decide(call("aten::add.Tensor", {{8}, {8}}), {Layout::replicated(kMesh, 1), other}),
               "arguments are on meshes of different shapes");
}

TEST(Propagate, RefusesACallWithoutADistributedArgument) {
  EXPECT_ERROR(decide(call("aten::silu", {{8}}), {nullptr}),
               "needs a distributed argument, found none");
}

TEST(Propagate, GroupedQueriesShardKeyAndQueryHeadsTogether) {
  const auto attention = call("aten::_scaled_dot_product_flash_attention_for_cpu",
                              {{2, 8, 5, 4}, {2, 2, 5, 4}, {2, 2, 5, 4}}, {0.0, true});
  const LayoutPtr heads = layout({{}, {{0, {1}}}, {}, {}});
  const auto decided = decide(attention, {heads, heads, heads});
  EXPECT_EQ(decided.inputs, std::vector<LayoutPtr>(3, heads));
  EXPECT_EQ(decided.outputs[0], heads);
  // Four ways do not divide two key heads: the query's last cut is not theirs.
  const LayoutPtr four = layout({{}, {{0, {0, 1}}}, {}, {}});
  EXPECT_EQ(decide(attention, {four, heads, heads}).inputs[1]->sharded_dim(1), -1);
}

}  // namespace
}  // namespace tessera
