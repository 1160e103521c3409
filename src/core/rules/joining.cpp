#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "rule_builder.h"
#include "rule_table.h"

namespace tessera::rules {
namespace {

/// cat skips empty 1-d tensors, whatever the others' shape.
bool is_skipped(const TensorMeta& tensor) {
  return tensor.sizes == Sizes{0};
}

std::vector<int> joined_tensors(const OpCall& call, bool skip) {
  std::vector<int> result;
  for (TensorRef ref : call.tensor_list(0)) {
    if (!skip || !is_skipped(meta_of(call, ref.index))) result.push_back(ref.index);
  }
  return result;
}

std::optional<ShardingRule> cat_rule(const OpCall& call) {
  const std::vector<int> tensors = joined_tensors(call, true);
  if (tensors.empty()) return std::nullopt;
  const TensorMeta& first = meta_of(call, tensors[0]);
  const auto dim = static_cast<std::size_t>(wrap_dim(call, call.integer_or(1, 0), first.ndim()));
  ShardingRule rule = start(call);
  TensorFactors result = add_factors(rule, first.sizes);
  std::int64_t joined = 0;
  for (int tensor : tensors) {
    Sizes sizes = meta_of(call, tensor).sizes;
    if (sizes.size() != first.sizes.size() || dim >= sizes.size()) return std::nullopt;
    TensorFactors factors = result;
    factors[dim] = {add_whole(rule, sizes[dim])};
    joined += std::exchange(sizes[dim], first.sizes[dim]);
    if (sizes != first.sizes) return std::nullopt;
    input_of(rule, tensor) = factors;
  }
  result[dim] = {add_whole(rule, joined)};
  rule.outputs.push_back(result);
  add_any_linear(rule, tensors);
  return rule;
}

std::optional<ShardingRule> stack_rule(const OpCall& call) {
  const std::vector<int> tensors = joined_tensors(call, false);
  if (tensors.empty()) return std::nullopt;
  const TensorMeta& first = meta_of(call, tensors[0]);
  const int dim = wrap_dim(call, call.integer_or(1, 0), first.ndim() + 1);
  ShardingRule rule = start(call);
  TensorFactors result = add_factors(rule, first.sizes);
  for (int tensor : tensors) {
    if (meta_of(call, tensor).sizes != first.sizes) return std::nullopt;
    input_of(rule, tensor) = result;
  }
  result.insert(result.begin() + dim,
                Factors{add_whole(rule, static_cast<std::int64_t>(tensors.size()))});
  rule.outputs.push_back(result);
  add_any_linear(rule, tensors);
  return rule;
}

/// One tensor cut along a dimension into pieces of these sizes; -1: the dimension goes.
ShardingRule pieces_rule(const OpCall& call, std::size_t dim, const Sizes& pieces) {
  const int self = call.tensor_index(0);
  ShardingRule rule = start(call);
  input_of(rule, self) = add_factors(rule, call.tensor(0).sizes);
  keep_whole(rule, input_of(rule, self)[dim]);
  for (std::int64_t piece : pieces) {
    TensorFactors& output = rule.outputs.emplace_back(input_of(rule, self));
    if (piece < 0) {
      output.erase(output.begin() + static_cast<std::ptrdiff_t>(dim));
    } else {
      output[dim] = {add_whole(rule, piece)};
    }
  }
  add_any_linear(rule, {self});
  return rule;
}

std::size_t dim_argument(const OpCall& call, std::size_t arg) {
  return static_cast<std::size_t>(wrap_dim(call, call.integer_or(arg, 0), call.tensor(0).ndim()));
}

std::optional<ShardingRule> split_rule(const OpCall& call) {
  if (call.tensor(0).ndim() == 0) return std::nullopt;
  const std::size_t dim = dim_argument(call, 2);
  const std::int64_t size = call.tensor(0).sizes[dim], step = call.integer(1);
  if (step <= 0) return std::nullopt;
  Sizes pieces;
  for (std::int64_t at = 0; at == 0 || at < size; at += step) {
    pieces.push_back(std::min(step, size - at));
  }
  return pieces_rule(call, dim, pieces);
}

std::optional<ShardingRule> split_with_sizes_rule(const OpCall& call) {
  if (call.tensor(0).ndim() == 0) return std::nullopt;
  return pieces_rule(call, dim_argument(call, 2), call.integers(1));
}

std::optional<ShardingRule> unbind_rule(const OpCall& call) {
  if (call.tensor(0).ndim() == 0) return std::nullopt;
  const std::size_t dim = dim_argument(call, 1);
  return pieces_rule(call, dim, Sizes(static_cast<std::size_t>(call.tensor(0).sizes[dim]), -1));
}

/// select(self, dim, index)
std::optional<ShardingRule> select_rule(const OpCall& call) {
  if (call.tensor(0).ndim() == 0) return std::nullopt;
  return pieces_rule(call, dim_argument(call, 1), {-1});
}

/// slice(self, dim, start, end, step): nothing is cut off if it is all of the dimension.
std::optional<ShardingRule> slice_rule(const OpCall& call) {
  if (call.tensor(0).ndim() == 0) return std::nullopt;
  const std::size_t dim = dim_argument(call, 1);
  const std::int64_t size = call.tensor(0).sizes[dim], step = call.integer_or(4, 1);
  const auto clamp = [&](std::int64_t at) {
    return std::clamp<std::int64_t>(at < 0 ? at + size : at, 0, size);
  };
  const std::int64_t first = clamp(call.integer_or(2, 0));
  const std::int64_t last = std::max(first, clamp(call.integer_or(3, size)));
  if (step < 1) return std::nullopt;
  // An end that counts from the back would cut every shard.
  const bool whole = first == 0 && last == size && step == 1 && call.integer_or(3, size) >= size &&
                     call.integer_or(2, 0) == 0;
  if (!whole) return pieces_rule(call, dim, {(last - first + step - 1) / step});
  ShardingRule rule = start(call);
  const int self = call.tensor_index(0);
  input_of(rule, self) = add_factors(rule, call.tensor(0).sizes);
  rule.outputs.push_back(input_of(rule, self));
  add_any_linear(rule, {self});
  return rule;
}

}  // namespace

Table joining_table() {
  return {"joining and splitting",
          {
              {"cat{,.out}", cat_rule},
              {"stack _stack", stack_rule},
              {"split.Tensor {split_copy,unsafe_split}.Tensor", split_rule},
              {"{split_with_sizes,split_with_sizes_copy,unsafe_split_with_sizes}",
               split_with_sizes_rule},
              {"{unbind,unbind_copy}.int", unbind_rule},
              {"{select,select_copy}.int", select_rule},
              {"{slice,slice_copy}.Tensor", slice_rule},
          }};
}

}  // namespace tessera::rules
