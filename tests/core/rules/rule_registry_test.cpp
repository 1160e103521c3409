#include <gtest/gtest.h>

#include <string>
#include <variant>
#include <vector>

#include "core_test_calls.h"
#include "tessera/core/error.h"
#include "tessera/core/sharding_rule.h"
#include "testing/errors.h"

namespace tessera {
namespace {

using testing::call;

TEST(RuleRegistry, HasNoRuleForAnUnknownOperator) {
  EXPECT_FALSE(find_rule("aten::no_such_operator"));
  EXPECT_FALSE(find_rule("aten::nonzero"));
}

TEST(RuleRegistry, SaysWhichRulesReadNumbers) {
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

TEST(RuleRegistry, KnowsThatAttentionKeepsStatisticsOnlyWhereAsked) {
  const std::vector<std::int64_t> sizes{4, 2, 5, 8};
  const std::vector<LayoutPtr> split(3, to_layout({2}, {Shard{0}}, sizes));
  for (const bool asked : {true, false}) {
    const auto attention = call("aten::_scaled_dot_product_efficient_attention",
                                {sizes, sizes, sizes}, {std::monostate{}, asked, 0.0, false});
    const auto decided = testing::decide(attention, split);
    const std::vector<std::int64_t> statistics{4, 2, asked ? 32 : 0};
    EXPECT_EQ(decided.output_sizes[1], statistics);
    EXPECT_EQ(decided.outputs[1], to_layout({2}, {Shard{0}}, statistics));
  }
}

TEST(RuleRegistry, CoversNoCallWhoseResultDependsOnData) {
  OpCall index{.op = "aten::index.Tensor",
               .args = {TensorRef{0}, std::vector<TensorRef>{{1}}},
               .tensors = {{{8, 6}, 4}, {{8}, 1}}};
  EXPECT_FALSE(find_rule(index.op)(index));
}

TEST(RuleRegistry, CoversNoInplaceCallThatWouldGrowItsTensor) {
  const auto grow = call("aten::add_.Tensor", {{6}, {8, 6}});
  EXPECT_FALSE(find_rule(grow.op)(grow));
}

TEST(OpCall, NamesTheArgumentThatIsNotWhatTheRuleExpects) {
  const auto sum = call("aten::sum.dim_IntList", {{8, 6}}, {std::string("no list")});
  EXPECT_ERROR(find_rule(sum.op)(sum), "argument 1 is not");
}

TEST(OpCall, RefusesADimensionOutOfRange) {
  const auto sum = call("aten::sum.dim_IntList", {{8, 6}}, {std::vector<std::int64_t>{2}});
  EXPECT_ERROR(find_rule(sum.op)(sum), "dimension 2 is out of range for a tensor of 2 dimensions");
}

}  // namespace
}  // namespace tessera
