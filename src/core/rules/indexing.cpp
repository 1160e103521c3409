#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "rule_builder.h"
#include "rule_table.h"

namespace tessera::rules {
namespace {

std::size_t dim_of(const OpCall& call, std::size_t arg, int tensor) {
  return static_cast<std::size_t>(wrap_dim(call, call.integer(arg), meta_of(call, tensor).ndim()));
}

/// A dimension of several tensors: one factor where they agree, else whole ones of their own.
void share_dim(ShardingRule& rule, const OpCall& call, const std::vector<int>& tensors,
               std::size_t dim) {
  const std::int64_t size = meta_of(call, tensors[0]).sizes[dim];
  const bool agree = std::all_of(tensors.begin(), tensors.end(), [&](int tensor) {
    return meta_of(call, tensor).sizes[dim] == size;
  });
  const int shared = agree ? add_factor(rule, size) : -1;
  for (int tensor : tensors) {
    input_of(rule,
             tensor)[dim] = {agree ? shared : add_whole(rule, meta_of(call, tensor).sizes[dim])};
  }
}

bool same_ndim(const OpCall& call, const std::vector<int>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](int tensor) {
    return meta_of(call, tensor).ndim() == meta_of(call, tensors[0]).ndim();
  });
}

/// What several writes to one place do: replace, add up, or something that no shard can tell.
enum class Write { kReplace, kAdd, kCombine };

/// Where `dim` of the tensor that gather picks from is split, each shard gives what it has, and
/// zeros for the rest.
void gather_by_parts(ShardingRule& rule, const OpCall& call, int self, std::size_t dim) {
  const std::int64_t size = meta_of(call, self).sizes[dim];
  const int along = input_of(rule, self)[dim].front();
  auto& factor = rule.factors[static_cast<std::size_t>(along)];
  factor = {.size = size, .reduction = ReduceOp::kSum, .contiguous = true};
  rule.local_call = {
      .op = "tessera_local::gather_part",
      .args = {call.args[0], static_cast<std::int64_t>(dim), call.args[2], std::int64_t{0}, size},
      .when_split = {along}};
  rule.offset_arguments = {{.arg = 3, .input = self, .dim = static_cast<int>(dim)}};
}

/// gather(self, dim, index): each index picks along `dim`. That stays whole in self, unless
/// reducing the result is cheaper than gathering it.
std::optional<ShardingRule> gather_rule(const OpCall& call) {
  const int self = call.tensor_index(0), index = call.tensor_index(2);
  if (!same_ndim(call, {self, index}) || meta_of(call, self).ndim() == 0) return std::nullopt;
  const std::size_t dim = dim_of(call, 1, self);
  ShardingRule rule = start(call);
  for (std::size_t i = 0; i < meta_of(call, self).sizes.size(); ++i) {
    if (i != dim) share_dim(rule, call, {index, self}, i);
  }
  input_of(rule, self)[dim] = {add_whole(rule, meta_of(call, self).sizes[dim])};
  input_of(rule, index)[dim] = {add_factor(rule, meta_of(call, index).sizes[dim])};
  rule.outputs.push_back(input_of(rule, index));
  add_any_linear(rule, {self});
  const bool numbers = meta_of(call, self).itemsize > 1;
  if (numbers && 2 * meta_of(call, index).numel() <= meta_of(call, self).numel()) {
    gather_by_parts(rule, call, self, dim);
  }
  return rule;
}

/// scatter(self, dim, index, src or value): the opposite. Sharding the index along `dim` gives
/// every shard its share of what is added.
RuleFunction::Body scatter(Write write, bool has_source) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const int self = call.tensor_index(0), index = call.tensor_index(2);
    std::vector<int> written{index};
    if (has_source) written.push_back(call.tensor_index(3));
    std::vector<int> all = written;
    all.push_back(self);
    if (!same_ndim(call, all) || meta_of(call, self).ndim() == 0) return std::nullopt;
    const std::size_t dim = dim_of(call, 1, self);
    ShardingRule rule = start(call);
    for (std::size_t i = 0; i < meta_of(call, self).sizes.size(); ++i) {
      share_dim(rule, call, i == dim ? written : all, i);
    }
    for (int factor : input_of(rule, index)[dim]) {
      auto& properties = rule.factors[static_cast<std::size_t>(factor)];
      if (write == Write::kAdd) properties.reduction = ReduceOp::kSum;
    }
    input_of(rule, self)[dim] = {add_whole(rule, meta_of(call, self).sizes[dim])};
    rule.outputs.push_back(input_of(rule, self));
    if (write == Write::kAdd) rule.additive.push_back(self);
    if (has_source && write == Write::kAdd) add_linear(rule, {self, written.back()});
    if (has_source && write == Write::kReplace) add_any_linear(rule, {self, written.back()});
    return rule;
  };
}

/// index_select(self, dim, index)
std::optional<ShardingRule> index_select_rule(const OpCall& call) {
  const int self = call.tensor_index(0), index = call.tensor_index(2);
  if (meta_of(call, self).ndim() == 0 || meta_of(call, index).ndim() != 1) return std::nullopt;
  const std::size_t dim = dim_of(call, 1, self);
  ShardingRule rule = start(call);
  TensorFactors result = add_factors(rule, meta_of(call, self).sizes);
  input_of(rule, self) = result;
  keep_whole(rule, result[dim]);
  result[dim] = {add_factor(rule, meta_of(call, index).sizes[0])};
  input_of(rule, index)[0] = result[dim];
  rule.outputs.push_back(result);
  add_any_linear(rule, {self});
  return rule;
}

/// index_add(self, dim, index, source) and index_copy.
RuleFunction::Body index_write(Write write) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const int self = call.tensor_index(0), index = call.tensor_index(2);
    const int source = call.tensor_index(3);
    if (!same_ndim(call, {self, source}) || meta_of(call, self).ndim() == 0) return std::nullopt;
    const std::size_t dim = dim_of(call, 1, self);
    ShardingRule rule = start(call);
    const TensorFactors result = add_factors(rule, meta_of(call, self).sizes);
    keep_whole(rule, result[dim]);
    input_of(rule, self) = result;
    input_of(rule, source) = result;
    const std::int64_t count = meta_of(call, source).sizes[dim];
    const int along =
        write == Write::kAdd ? add_reduced(rule, count, ReduceOp::kSum) : add_whole(rule, count);
    input_of(rule, source)[dim] = {along};
    if (meta_of(call, index).ndim() == 1) input_of(rule, index)[0] = {along};
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
  if (meta_of(call, self).ndim() == 0) return std::nullopt;
  ShardingRule rule = start(call);
  input_of(rule, self) = add_factors(rule, meta_of(call, self).sizes);
  keep_whole(rule, input_of(rule, self)[dim_of(call, 1, self)]);
  rule.outputs.push_back(input_of(rule, self));
  return rule;
}

/// self[indices]: the indices broadcast; their dimensions replace the indexed ones, in place where
/// those are neighbours, else in front.
struct AdvancedIndex {
  std::vector<int> indices;   ///< tensors, None left out
  std::vector<bool> indexed;  ///< of self's dimensions
  TensorFactors broadcast;    ///< of the indices
  TensorFactors result;       ///< of self[indices]
};

/// What a mask picks depends on the data: `masks` says whether that may be.
enum class Masks { kRefused, kTaken };

/// The dimensions of self that each index takes: one, or as many as a mask has; nullopt where there
/// are too many, masks that may not be, or masks beside tables of indices.
std::optional<std::vector<int>> index_widths(const OpCall& call, const std::vector<TensorRef>& refs,
                                             Masks masks) {
  std::vector<int> widths;
  int total = 0;
  bool masked = false, tables = false;
  for (const TensorRef ref : refs) {
    const bool mask = ref.index >= 0 && meta_of(call, ref.index).itemsize == 1;
    masked = masked || mask;
    tables = tables || (ref.index >= 0 && !mask && meta_of(call, ref.index).ndim() > 1);
    widths.push_back(mask ? meta_of(call, ref.index).ndim() : 1);
    total += widths.back();
  }
  if (masked && (tables || masks == Masks::kRefused)) return std::nullopt;
  if (total > call.tensor(0).ndim()) return std::nullopt;
  return widths;
}

/// One dimension of unknown size; every index is read whole.
TensorFactors masked_broadcast(ShardingRule& rule) {
  return {{add_whole(rule, ShardingRule::kUnknown)}};
}

std::optional<AdvancedIndex> add_index(ShardingRule& rule, const OpCall& call,
                                       Masks masks = Masks::kRefused) {
  const int self = call.tensor_index(0);
  const std::vector<TensorRef> refs = call.tensor_list(1);
  const TensorFactors own = add_factors(rule, meta_of(call, self).sizes);
  const std::optional<std::vector<int>> widths = index_widths(call, refs, masks);
  if (!widths) return std::nullopt;
  AdvancedIndex index;
  index.indexed.resize(own.size());
  std::size_t dim = 0;
  bool masked = false;
  for (std::size_t i = 0; i < refs.size(); ++i) {
    const auto end = dim + static_cast<std::size_t>((*widths)[i]);
    if (refs[i].index < 0) {
      dim = end;
      continue;
    }
    masked = masked || meta_of(call, refs[i].index).itemsize == 1;
    index.indices.push_back(refs[i].index);
    for (; dim < end; ++dim) {
      index.indexed[dim] = true;
      keep_whole(rule, own[dim]);
    }
  }
  std::optional<TensorFactors> broadcast =
      masked ? masked_broadcast(rule) : add_broadcast(rule, call, index.indices);
  if (!broadcast || index.indices.empty()) return std::nullopt;
  index.broadcast = *std::move(broadcast);
  input_of(rule, self) = own;

  const auto first = std::find(index.indexed.begin(), index.indexed.end(), true);
  const auto last = std::find(index.indexed.rbegin(), index.indexed.rend(), true).base();
  const bool neighbours = std::all_of(first, last, [](bool indexed) { return indexed; });
  const auto place = neighbours ? first - index.indexed.begin() : 0;
  for (std::size_t dim = 0; dim < own.size(); ++dim) {
    if (!index.indexed[dim]) index.result.push_back(own[dim]);
  }
  index.result.insert(index.result.begin() + place, index.broadcast.begin(), index.broadcast.end());
  return index;
}

std::optional<ShardingRule> index_rule(const OpCall& call) {
  ShardingRule rule = start(call);
  const std::optional<AdvancedIndex> index = add_index(rule, call);
  if (!index) return std::nullopt;
  rule.outputs.push_back(index->result);
  add_any_linear(rule, {call.tensor_index(0)});
  return rule;
}

/// index_put(self, indices, values, accumulate): values broadcast to self[indices].
std::optional<ShardingRule> index_put_rule(const OpCall& call) {
  const int self = call.tensor_index(0), values = call.tensor_index(2);
  const bool add = call.boolean_or(3, false);
  ShardingRule rule = start(call);
  const std::optional<AdvancedIndex> index = add_index(rule, call, Masks::kTaken);
  if (!index) return std::nullopt;
  const Sizes& sizes = meta_of(call, values).sizes;
  if (sizes.size() > index->result.size()) return std::nullopt;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const Factors& factors = index->result[index->result.size() - sizes.size() + i];
    if (sizes[i] == size_of(rule, factors)) input_of(rule, values)[i] = factors;
  }
  for (const Factors& factors : index->broadcast) {
    for (int factor : factors) {
      if (add) rule.factors[static_cast<std::size_t>(factor)].reduction = ReduceOp::kSum;
    }
  }
  rule.outputs.push_back(input_of(rule, self));
  if (add) {
    rule.additive.push_back(self);
    add_linear(rule, {self, values});
  } else {
    add_any_linear(rule, {self, values});
  }
  return rule;
}

/// take(self, index), bucketize(self, boundaries): each element of one tensor looks at all of the
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

/// put(self, index, source, accumulate) into self as if flat: every shard adds its share.
std::optional<ShardingRule> put_rule(const OpCall& call) {
  const int self = call.tensor_index(0), index = call.tensor_index(1);
  const int source = call.tensor_index(2);
  const Sizes& sizes = meta_of(call, index).sizes;
  if (!call.boolean_or(3, false) || meta_of(call, source).sizes != sizes) return std::nullopt;
  ShardingRule rule = start(call);
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    const Factors factors{add_reduced(rule, sizes[dim], ReduceOp::kSum)};
    input_of(rule, index)[dim] = factors;
    input_of(rule, source)[dim] = factors;
  }
  input_of(rule, self) = add_wholes(rule, meta_of(call, self).sizes);
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
  if (meta_of(call, sequence).ndim() == 1) return rule;
  if (!same_ndim(call, {sequence, self})) return std::nullopt;
  TensorFactors leading = input_of(rule, self);
  leading.back().clear();
  input_of(rule, sequence) = leading;
  for (std::size_t arg = 2; arg < call.args.size();
       ++arg) {  // the sorter is shaped as the sequence
    if (call.has_tensor(arg)) input_of(rule, call.tensor_index(arg)) = leading;
  }
  return rule;
}

}  // namespace

Table indexing_table() {
  using enum Write;
  return {"indexing",
          {
              {"index.Tensor _unsafe_index.Tensor", index_rule},
              {"index_put{,_} _unsafe_index_put _index_put_impl_", index_put_rule},
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
          }};
}

}  // namespace tessera::rules
