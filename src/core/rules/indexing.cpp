// Gathers, scatters, selections by a list of indices, searches. Along the dimension that indices
// pick from, a tensor stays whole; all other dimensions are independent. The exceptions are made
// where a partial sum is cheaper (gather_by_parts) or where writes add up.
#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include "rules/rule_builder.h"
#include "rules/rule_table.h"

namespace tessera::rules {
namespace {

/// A dimension argument, counted from 0.
std::size_t dim_of(const OpCall& call, std::size_t arg, int tensor) {
  return static_cast<std::size_t>(wrap_dim(call, call.integer(arg), meta_of(call, tensor).ndim()));
}

/// Gives dimension `dim` of several tensors one factor if they agree on its size, else unsharded
/// ones: libtorch takes index tensors that are smaller than self.
void share_dim(ShardingRule& rule, const OpCall& call, const std::vector<int>& tensors,
               std::size_t dim) {
  const std::int64_t size = meta_of(call, tensors[0]).sizes[dim];
  const bool agree = std::all_of(tensors.begin(), tensors.end(), [&](int tensor) {
    return meta_of(call, tensor).sizes[dim] == size;
  });
  const int shared = agree ? add_factor(rule, size) : -1;
  for (int tensor : tensors) {
    const int factor = agree ? shared : add_unsharded(rule, meta_of(call, tensor).sizes[dim]);
    input_of(rule, tensor)[dim] = {factor};
  }
}

/// libtorch takes a 0-d tensor among them: no rule for that.
bool same_ndim(const OpCall& call, const std::vector<int>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](int tensor) {
    return meta_of(call, tensor).ndim() == meta_of(call, tensors[0]).ndim();
  });
}

/// The effect of several writes to one element: the last replaces, they add up, or they combine in
/// a way that shards cannot (a maximum with the existing element).
enum class Write { kReplace, kAdd, kCombine };

// gather and scatter: one index per element

/// Lets `dim` of the tensor that gather picks from be sharded: each rank gives the elements that it
/// has, and zeros for the others, so that the result is Partial(sum).
void gather_by_parts(ShardingRule& rule, const OpCall& call, int self, std::size_t dim) {
  const std::int64_t size = meta_of(call, self).sizes[dim];
  const int along = input_of(rule, self)[dim].front();
  auto& factor = rule.factors[static_cast<std::size_t>(along)];
  factor = {.size = size, .reduction = ReduceOp::kSum, .contiguous = true};
  rule.local_call = {
      .op = ShardingRule::LocalCall::PartOperator::kGatherPart,
      .args = {call.args[0], static_cast<std::int64_t>(dim), call.args[2], std::int64_t{0}, size},
      .when_split = {along}};
  rule.offset_arguments = {{.arg = 3, .input = self, .dim = static_cast<int>(dim)}};
}

/// gather(self, dim, index): each index picks along `dim`, which stays unsharded in self, unless
/// the result is so much smaller that reducing it sends less than gathering self.
std::optional<ShardingRule> gather_rule(const OpCall& call) {
  const int self = call.tensor_index(0), index = call.tensor_index(2);
  if (!same_ndim(call, {self, index}) || meta_of(call, self).ndim() == 0) {
    return std::nullopt;
  }
  const std::size_t dim = dim_of(call, 1, self);
  ShardingRule rule = start(call);
  for (std::size_t i = 0; i < meta_of(call, self).sizes.size(); ++i) {
    if (i != dim) {
      share_dim(rule, call, {index, self}, i);
    }
  }
  input_of(rule, self)[dim] = {add_unsharded(rule, meta_of(call, self).sizes[dim])};
  input_of(rule, index)[dim] = {add_factor(rule, meta_of(call, index).sizes[dim])};
  rule.outputs.push_back(input_of(rule, index));
  add_any_linear(rule, {self});
  // Bools cannot be summed; core tells them, and bytes with them, by their size.
  const bool numbers = meta_of(call, self).itemsize > 1;
  if (numbers && 2 * meta_of(call, index).numel() <= meta_of(call, self).numel()) {
    gather_by_parts(rule, call, self, dim);
  }
  return rule;
}

/// scatter(self, dim, index, src or value): the inverse. Where values are added, the index may be
/// sharded along `dim`: each shard adds its terms.
RuleFunction::Body scatter(Write write, bool has_source) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const int self = call.tensor_index(0), index = call.tensor_index(2);
    std::vector<int> written{index};
    if (has_source) {
      written.push_back(call.tensor_index(3));
    }
    std::vector<int> all = written;
    all.push_back(self);
    if (!same_ndim(call, all) || meta_of(call, self).ndim() == 0) {
      return std::nullopt;
    }
    const std::size_t dim = dim_of(call, 1, self);
    ShardingRule rule = start(call);
    for (std::size_t i = 0; i < meta_of(call, self).sizes.size(); ++i) {
      share_dim(rule, call, i == dim ? written : all, i);
    }
    // Only sums can be made of parts; the other writes keep the dimension whole by may_shard(), as
    // no output has its factor.
    for (int factor : input_of(rule, index)[dim]) {
      auto& properties = rule.factors[static_cast<std::size_t>(factor)];
      if (write == Write::kAdd) {
        properties.reduction = ReduceOp::kSum;
      }
    }
    input_of(rule, self)[dim] = {add_unsharded(rule, meta_of(call, self).sizes[dim])};
    rule.outputs.push_back(input_of(rule, self));
    if (write == Write::kAdd) {
      rule.additive.push_back(self);
    }
    if (has_source && write == Write::kAdd) {
      add_linear(rule, {self, written.back()});
    }
    if (has_source && write == Write::kReplace) {
      add_any_linear(rule, {self, written.back()});
    }
    return rule;
  };
}

// index_select, index_add: a list of indices along one dimension

/// index_select(self, dim, index)
std::optional<ShardingRule> index_select_rule(const OpCall& call) {
  const int self = call.tensor_index(0), index = call.tensor_index(2);
  if (meta_of(call, self).ndim() == 0 || meta_of(call, index).ndim() != 1) {
    return std::nullopt;
  }
  const std::size_t dim = dim_of(call, 1, self);
  ShardingRule rule = start(call);
  TensorFactors result = add_factors(rule, meta_of(call, self).sizes);
  input_of(rule, self) = result;
  keep_unsharded(rule, result[dim]);
  result[dim] = {add_factor(rule, meta_of(call, index).sizes[0])};
  input_of(rule, index)[0] = result[dim];
  rule.outputs.push_back(result);
  add_any_linear(rule, {self});
  return rule;
}

/// index_add(self, dim, index, source) and index_copy.
/// All other dimensions of self and source are the same.
RuleFunction::Body index_write(Write write) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const int self = call.tensor_index(0), index = call.tensor_index(2);
    const int source = call.tensor_index(3);
    if (!same_ndim(call, {self, source}) || meta_of(call, self).ndim() == 0) {
      return std::nullopt;
    }
    const std::size_t dim = dim_of(call, 1, self);
    ShardingRule rule = start(call);
    const TensorFactors result = add_factors(rule, meta_of(call, self).sizes);
    keep_unsharded(rule, result[dim]);
    input_of(rule, self) = result;
    input_of(rule, source) = result;
    const std::int64_t count = meta_of(call, source).sizes[dim];
    const int along = write == Write::kAdd ? add_reduced(rule, count, ReduceOp::kSum)
                                           : add_unsharded(rule, count);
    input_of(rule, source)[dim] = {along};
    // A 0-d index is one index.
    if (meta_of(call, index).ndim() == 1) {
      input_of(rule, index)[0] = {along};
    }
    rule.outputs.push_back(result);
    if (write == Write::kAdd) {
      rule.additive.push_back(self);
      add_linear(rule, {self, source});
    } else {
      add_any_linear(rule, {self, source});
    }
    return rule;
  };
}

/// index_fill(self, dim, index, value)
std::optional<ShardingRule> index_fill_rule(const OpCall& call) {
  const int self = call.tensor_index(0);
  if (meta_of(call, self).ndim() == 0) {
    return std::nullopt;
  }
  ShardingRule rule = start(call);
  input_of(rule, self) = add_factors(rule, meta_of(call, self).sizes);
  keep_unsharded(rule, input_of(rule, self)[dim_of(call, 1, self)]);
  rule.outputs.push_back(input_of(rule, self));
  return rule;
}

// Searching

/// take(self, index), bucketize(self, boundaries): each element of one tensor reads all of the
/// other.
RuleFunction::Body look_up(int element_arg) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const int element = call.tensor_index(static_cast<std::size_t>(element_arg));
    ShardingRule rule = start(call);
    input_of(rule, element) = add_factors(rule, meta_of(call, element).sizes);
    rule.outputs.push_back(input_of(rule, element));
    return rule;
  };
}

/// put(self, index, source, accumulate): indices into self flattened. Each shard adds its terms.
std::optional<ShardingRule> put_rule(const OpCall& call) {
  const int self = call.tensor_index(0), index = call.tensor_index(1);
  const int source = call.tensor_index(2);
  const Sizes& sizes = meta_of(call, index).sizes;
  // Without accumulation the last write wins: no rule.
  if (!call.boolean_or(3, false) || meta_of(call, source).sizes != sizes) {
    return std::nullopt;
  }
  ShardingRule rule = start(call);
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    const Factors factors{add_reduced(rule, sizes[dim], ReduceOp::kSum)};
    input_of(rule, index)[dim] = factors;
    input_of(rule, source)[dim] = factors;
  }
  input_of(rule, self) = add_unsharded_factors(rule, meta_of(call, self).sizes);
  rule.outputs.push_back(input_of(rule, self));
  rule.additive.push_back(self);
  add_linear(rule, {self, source});
  return rule;
}

/// searchsorted(sequence, self, ...): one sequence for all, or one per leading index.
std::optional<ShardingRule> searchsorted_rule(const OpCall& call) {
  const int sequence = call.tensor_index(0), self = call.tensor_index(1);
  ShardingRule rule = start(call);
  input_of(rule, self) = add_factors(rule, meta_of(call, self).sizes);
  rule.outputs.push_back(input_of(rule, self));
  if (meta_of(call, sequence).ndim() == 1) {
    return rule;
  }
  if (!same_ndim(call, {sequence, self})) {
    return std::nullopt;
  }
  TensorFactors leading = input_of(rule, self);
  // The sequence is searched along its last dimension, which stays whole.
  leading.back().clear();
  input_of(rule, sequence) = leading;
  for (std::size_t arg = 2; arg < call.args.size(); ++arg) {  // the sorter is like the sequence
    if (call.has_tensor(arg)) {
      input_of(rule, call.tensor_index(arg)) = leading;
    }
  }
  return rule;
}

}  // namespace

Table indexing_table() {
  using enum Write;
  const std::vector<Row> rows{
      {"index_select", index_select_rule},
      {"index_add{,_}", index_write(kAdd)},
      {"index_copy{,_}", index_write(kReplace)},
      {"{index_fill,index_fill_}.{int_Scalar,int_Tensor}", index_fill_rule},
      {"gather", gather_rule},
      {"{scatter,scatter_}.src", scatter(kReplace, true)},
      {"{scatter,scatter_}.value", scatter(kReplace, false)},
      {"scatter_add{,_}", scatter(kAdd, true)},
      {"{scatter_reduce,scatter_reduce_}.two", scatter(kCombine, true)},
      {"take", look_up(1)},
      {"put{,_}", put_rule},
      {"bucketize.Tensor isin.Tensor_Tensor", look_up(0)},
      {"searchsorted.Tensor", searchsorted_rule},
  };
  return {"indexing", join_rows({advanced_indexing_rows(), rows})};
}

}  // namespace tessera::rules
