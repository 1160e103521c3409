// Embeddings: columns of the table shard like any dimension, rows (the vocabulary) into partial
// sums.
#include <cstddef>
#include <optional>

#include "rules/rule_builder.h"
#include "rules/rule_table.h"

namespace tessera::rules {
namespace {

/// embedding(weight, indices). Where the vocabulary is sharded, each rank looks up the rows that it
/// has and gives zeros for the others: the result is Partial(sum), as in Megatron-LM.
std::optional<ShardingRule> embedding_rule(const OpCall& call) {
  const int weight = call.tensor_index(0), indices = call.tensor_index(1);
  if (meta_of(call, weight).ndim() != 2) {
    return std::nullopt;
  }
  const std::int64_t rows = meta_of(call, weight).sizes[0];
  ShardingRule rule = start(call);
  TensorFactors result = add_factors(rule, meta_of(call, indices).sizes);
  input_of(rule, indices) = result;
  result.push_back({add_factor(rule, meta_of(call, weight).sizes[1])});
  const int row = add_reduced(rule, rows, ReduceOp::kSum);
  // The local operator recognises its own rows by a range.
  rule.factors[static_cast<std::size_t>(row)].contiguous = true;
  input_of(rule, weight) = {{row}, result.back()};
  rule.outputs.push_back(result);
  rule.additive = {weight};
  add_any_linear(rule, {weight});
  // at::embedding would fail for an index that this rank does not have. The third argument is this
  // rank's first row, filled in by offset_arguments.
  rule.local_call = {.op = ShardingRule::LocalCall::PartOperator::kEmbeddingRows,
                     .args = {TensorRef{weight}, TensorRef{indices}, std::int64_t{0}, rows},
                     .when_split = {row}};
  rule.offset_arguments = {{.arg = 2, .input = weight, .dim = 0}};
  return rule;
}

/// embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq). Each
/// shard of the indices adds its terms; scaling by frequency needs counts over all of them.
std::optional<ShardingRule> embedding_backward_rule(const OpCall& call) {
  const int grad = call.tensor_index(0), indices = call.tensor_index(1);
  const bool scaled = call.boolean_or(4, false);
  if (meta_of(call, grad).ndim() != meta_of(call, indices).ndim() + 1) {
    return std::nullopt;
  }
  ShardingRule rule = start(call);
  for (std::int64_t size : meta_of(call, indices).sizes) {
    const int factor = scaled ? add_unsharded(rule, size) : add_reduced(rule, size, ReduceOp::kSum);
    // The factors so far are just those of the indices, so that the last one's number is its
    // dimension.
    input_of(rule, indices)[rule.factors.size() - 1] = {factor};
  }
  input_of(rule, grad) = input_of(rule, indices);
  input_of(rule, grad).push_back({add_factor(rule, meta_of(call, grad).sizes.back())});
  rule.outputs.push_back({{add_unsharded(rule, call.integer(2))}, input_of(rule, grad).back()});
  add_linear(rule, {grad});
  return rule;
}

/// The modes of at::embedding_bag.
/// A maximum has no rule: its backward needs to know which index won.
enum BagMode { kBagSum = 0, kBagMean = 1, kBagMax = 2 };

/// _embedding_bag(weight, indices, offsets, scale, mode, ...) -> result, and three tables for the
/// backward. Columns are independent. Indices stay unsharded: an offset says where its bag begins
/// among all of them.
std::optional<ShardingRule> embedding_bag_rule(const OpCall& call) {
  if (call.tensor(0).ndim() != 2 || call.integer(4) == kBagMax) {
    return std::nullopt;
  }
  ShardingRule rule = start(call);
  const Factors columns{add_factor(rule, call.tensor(0).size(1))};
  input_of(rule, call.tensor_index(0)) = {{add_unsharded(rule, call.tensor(0).size(0))}, columns};
  rule.outputs.assign(4, {});
  rule.outputs[0] = {{add_unsharded(rule, ShardingRule::kUnknown)}, columns};
  rule.groups = {group_of_inputs(call, {0})};
  return rule;
}

/// _embedding_bag_backward(grad, ..., rows, scale, mode, ...)
RuleFunction::Body embedding_bag_backward(std::size_t rows_arg) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    if (call.integer(rows_arg + 2) == kBagMax) {
      return std::nullopt;
    }
    ShardingRule rule = start(call);
    const TensorMeta& grad = call.tensor(0);
    const Factors columns{add_factor(rule, grad.size(1))};
    input_of(rule, call.tensor_index(0)) = {{add_unsharded(rule, grad.size(0))}, columns};
    rule.outputs = {{{add_unsharded(rule, call.integer(rows_arg))}, columns}};
    add_linear(rule, {call.tensor_index(0)});
    return rule;
  };
}

}  // namespace

Table embedding_table() {
  return {"embedding",
          {
              {"embedding", embedding_rule},
              {"embedding_dense_backward", embedding_backward_rule},
              {"_embedding_bag _embedding_bag_forward_only", embedding_bag_rule},
              {"_embedding_bag_backward", embedding_bag_backward(6)},
              {"_embedding_bag_dense_backward", embedding_bag_backward(5)},
          }};
}

}  // namespace tessera::rules
