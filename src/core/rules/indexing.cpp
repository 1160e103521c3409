#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "rules/rule_table.h"
#include "tessera/core/detail/rounding.h"

namespace tessera::rules {

// Sharding rules of gathers, scatters and selections by index. The indexed dimension is not
// sharded, except if a Partial sum is cheaper (gather_by_parts) or if the operator adds to old
// values.

namespace {

std::size_t dim_of(const OpCall& call, std::size_t arg, int tensor) {
  return static_cast<std::size_t>(wrap_dim(call, call.integer(arg), meta_of(call, tensor).ndim()));
}

/// Permits sharding of dimension `dim` of `tensors` if all sizes in `dim` are equal. The shards of
/// a smaller index tensor would have other positions than the shards of self.
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

bool same_ndim(const OpCall& call, const std::vector<int>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](int tensor) {
    return meta_of(call, tensor).ndim() == meta_of(call, tensors[0]).ndim();
  });
}

enum class Write { kReplace, kAdd };

void add_reduction(ShardingRule& rule, const TensorFactors& dims) {
  for (const Factors& dim : dims) {
    for (int factor : dim) {
      rule.factors[static_cast<std::size_t>(factor)].reduction = ReduceOp::kSum;
    }
  }
}

/// Declares the output of an operator that writes tensor `source` (negative: a number) into tensor
/// `self`, and which Partial inputs give a Partial output.
void add_written(ShardingRule& rule, int self, int source, Write write) {
  rule.outputs.push_back(input_of(rule, self));
  if (write == Write::kAdd) {
    rule.additive.push_back(self);
  }
  if (source >= 0 && write == Write::kAdd) {
    add_linear(rule, {self, source});
  }
  if (source >= 0 && write == Write::kReplace) {
    add_any_linear(rule, {self, source});
  }
}

/// Permits sharding of dimension `dim` of gather. Each rank returns the elements of its own shard
/// and zeros in place of all other elements, so the result is Partial(sum).
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

/// The rule of gather(self, dim, index). Dimension `dim` of self is sharded only if reducing the
/// result sends fewer bytes than all-gathering self.
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
  // Bools cannot be summed. TensorMeta has no dtype but only the size of an element, so all dtypes
  // of 1 byte are excluded.
  const bool numbers = meta_of(call, self).itemsize > 1;
  if (numbers && 2 * meta_of(call, index).numel() <= meta_of(call, self).numel()) {
    gather_by_parts(rule, call, self, dim);
  }
  return rule;
}

/// Returns the rule of scatter(self, dim, index, src or value). If values are added, each shard of
/// the index along `dim` gives a term of the sum.
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
    // The index can be sharded along `dim` only if values are added: the results for the shards can
    // then be summed.
    if (write == Write::kAdd) {
      add_reduction(rule, {input_of(rule, index)[dim]});
    }
    input_of(rule, self)[dim] = {add_unsharded(rule, meta_of(call, self).sizes[dim])};
    add_written(rule, self, has_source ? written.back() : -1, write);
    return rule;
  };
}

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

std::optional<ShardingRule> index_add_rule(const OpCall& call) {
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
  const int along = add_reduced(rule, meta_of(call, source).sizes[dim], ReduceOp::kSum);
  input_of(rule, source)[dim] = {along};
  // A 0-d index tensor is a single index and has no dimension.
  if (meta_of(call, index).ndim() == 1) {
    input_of(rule, index)[0] = {along};
  }
  add_written(rule, self, source, Write::kAdd);
  return rule;
}

/// The factors (einsum index letters) of self[indices]. The dimensions of the broadcast index
/// tensors replace the indexed dimensions of self: at the same position if adjacent, otherwise in
/// front.
struct AdvancedIndex {
  std::vector<int> indices;   ///< index tensors, without None entries
  std::vector<bool> indexed;  ///< element i: whether dimension i of self is indexed
  TensorFactors broadcast;    ///< factors (index letters) of the broadcast index tensors
  TensorFactors result;       ///< factors (index letters) of self[indices]
};

/// Adds the factors (einsum index letters) of self[indices]; indexed dimensions are not sharded.
/// Returns nullopt for masks (bool or uint8 tensors), because the result's sizes depend on the
/// data.
std::optional<AdvancedIndex> add_index(ShardingRule& rule, const OpCall& call) {
  const int self = call.tensor_index(0);
  const std::vector<TensorRef> refs = call.tensor_list(1);
  const TensorFactors own = add_factors(rule, meta_of(call, self).sizes);
  if (refs.size() > own.size()) {
    return std::nullopt;
  }
  AdvancedIndex index;
  index.indexed.resize(own.size());
  for (std::size_t dim = 0; dim < refs.size(); ++dim) {
    // An index of None stands for ":"; the whole dimension is selected and may be sharded.
    if (refs[dim].index < 0) {
      continue;
    }
    if (meta_of(call, refs[dim].index).itemsize == 1) {
      return std::nullopt;
    }
    index.indices.push_back(refs[dim].index);
    index.indexed[dim] = true;
    keep_unsharded(rule, own[dim]);
  }
  std::optional<TensorFactors> broadcast = add_broadcast(rule, call, index.indices);
  if (!broadcast || index.indices.empty()) {
    return std::nullopt;
  }
  index.broadcast = *std::move(broadcast);
  input_of(rule, self) = own;

  const auto first = std::find(index.indexed.begin(), index.indexed.end(), true);
  const auto last = std::find(index.indexed.rbegin(), index.indexed.rend(), true).base();
  const bool adjacent = std::all_of(first, last, [](bool indexed) { return indexed; });
  const auto position = adjacent ? first - index.indexed.begin() : 0;
  for (std::size_t dim = 0; dim < own.size(); ++dim) {
    if (!index.indexed[dim]) {
      index.result.push_back(own[dim]);
    }
  }
  index.result.insert(index.result.begin() + position, index.broadcast.begin(),
                      index.broadcast.end());
  return index;
}

/// The rule of self[indices]. Values are moved and not changed, so a Partial self gives a Partial
/// result.
std::optional<ShardingRule> index_rule(const OpCall& call) {
  ShardingRule rule = start(call);
  const std::optional<AdvancedIndex> index = add_index(rule, call);
  if (!index) {
    return std::nullopt;
  }
  rule.outputs.push_back(index->result);
  add_any_linear(rule, {call.tensor_index(0)});
  return rule;
}

/// The rule of index_put(self, indices, values, accumulate). The values broadcast to the sizes of
/// self[indices].
std::optional<ShardingRule> index_put_rule(const OpCall& call) {
  const int self = call.tensor_index(0), values = call.tensor_index(2);
  const bool add = call.boolean_or(3, false);
  ShardingRule rule = start(call);
  const std::optional<AdvancedIndex> index = add_index(rule, call);
  if (!index) {
    return std::nullopt;
  }
  const Sizes& sizes = meta_of(call, values).sizes;
  if (sizes.size() > index->result.size()) {
    return std::nullopt;
  }
  input_of(rule, values) = factors_of_broadcast(rule, sizes, index->result);
  if (add) {
    add_reduction(rule, index->broadcast);
  }
  // Without accumulation the last write to an element wins. Ranks with different indices cannot
  // know the last write, so the dimensions of the indices get no reduction.
  add_written(rule, self, values, add ? Write::kAdd : Write::kReplace);
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
              {"index_add{,_}", index_add_rule},
              {"gather", gather_rule},
              {"{scatter,scatter_}.src", scatter(kReplace, true)},
              {"{scatter,scatter_}.value", scatter(kReplace, false)},
              {"scatter_add{,_}", scatter(kAdd, true)},
          }};
}

// The rules of cat, stack and their inverses. The joined dimension is sharded only for equal sizes,
// as (number of tensors, sharded size), for example in a fused QKV weight.

namespace {

/// Returns the tensors to join. `skip`: whether to omit tensors of shape (0,), which cat ignores
/// and stack refuses.
std::vector<int> joined_tensors(const OpCall& call, bool skip) {
  std::vector<int> result;
  for (TensorRef ref : call.tensor_list(0)) {
    if (!skip || meta_of(call, ref.index).sizes != Sizes{0}) {
      result.push_back(ref.index);
    }
  }
  return result;
}

bool have_one_size(const OpCall& call, const std::vector<int>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](int tensor) {
    return meta_of(call, tensor).sizes == meta_of(call, tensors[0]).sizes;
  });
}

std::optional<ShardingRule> cat_rule(const OpCall& call) {
  const std::vector<int> tensors = joined_tensors(call, true);
  if (tensors.empty()) {
    return std::nullopt;
  }
  const TensorMeta& first = meta_of(call, tensors[0]);
  const auto dim = static_cast<std::size_t>(wrap_dim(call, call.integer_or(1, 0), first.ndim()));
  ShardingRule rule = start(call);
  TensorFactors result = add_factors(rule, first.sizes);
  if (first.ndim() > 0 && have_one_size(call, tensors)) {
    for (int tensor : tensors) {
      input_of(rule, tensor) = result;
    }
    const int part = add_unsharded(rule, static_cast<std::int64_t>(tensors.size()));
    result[dim].insert(result[dim].begin(), part);
    rule.outputs.push_back(result);
    add_any_linear(rule, tensors);
    return rule;
  }
  std::int64_t joined = 0;
  for (int tensor : tensors) {
    Sizes sizes = meta_of(call, tensor).sizes;
    if (sizes.size() != first.sizes.size() || dim >= sizes.size()) {
      return std::nullopt;
    }
    TensorFactors factors = result;
    factors[dim] = {add_unsharded(rule, sizes[dim])};
    joined += std::exchange(sizes[dim], first.sizes[dim]);
    if (sizes != first.sizes) {
      return std::nullopt;
    }
    input_of(rule, tensor) = factors;
  }
  result[dim] = {add_unsharded(rule, joined)};
  rule.outputs.push_back(result);
  add_any_linear(rule, tensors);
  return rule;
}

/// All dimensions of the tensors may be sharded; the dimension that stack adds is not sharded.
std::optional<ShardingRule> stack_rule(const OpCall& call) {
  const std::vector<int> tensors = joined_tensors(call, false);
  if (tensors.empty() || !have_one_size(call, tensors)) {
    return std::nullopt;
  }
  const TensorMeta& first = meta_of(call, tensors[0]);
  const int dim = wrap_dim(call, call.integer_or(1, 0), first.ndim() + 1);
  ShardingRule rule = start(call);
  TensorFactors result = add_factors(rule, first.sizes);
  for (int tensor : tensors) {
    input_of(rule, tensor) = result;
  }
  result.insert(result.begin() + dim,
                Factors{add_unsharded(rule, static_cast<std::int64_t>(tensors.size()))});
  rule.outputs.push_back(result);
  add_any_linear(rule, tensors);
  return rule;
}

/// Returns the rule of an operator that splits the unsharded dimension `dim`. `sizes`: the size of
/// `dim` in each output; -1 if outputs lack `dim` (unbind).
ShardingRule split_along(const OpCall& call, std::size_t dim, const Sizes& sizes) {
  const int self = call.tensor_index(0);
  ShardingRule rule = start(call);
  input_of(rule, self) = add_factors(rule, call.tensor(0).sizes);
  for (const std::int64_t size : sizes) {
    rule.outputs.push_back(
        part_along(rule, input_of(rule, self), dim, size < 0 ? std::nullopt : std::optional(size)));
  }
  add_any_linear(rule, {self});
  return rule;
}

/// Returns the rule of an operator that splits `dim` into `count` equal parts and returns one part.
/// Dimension `dim` of every part can be sharded.
ShardingRule part_of_equals(const OpCall& call, std::size_t dim, std::int64_t count) {
  const int self = call.tensor_index(0);
  ShardingRule rule = start(call);
  Sizes sizes = call.tensor(0).sizes;
  sizes[dim] /= count;
  const TensorFactors part = add_factors(rule, sizes);
  input_of(rule, self) = part;
  input_of(rule, self)[dim] = {add_unsharded(rule, count), part[dim].front()};
  rule.outputs = {part};
  add_any_linear(rule, {self});
  return rule;
}

ShardingRule split_equally(const OpCall& call, std::size_t dim, std::int64_t count) {
  ShardingRule rule = part_of_equals(call, dim, count);
  const int along = rule.outputs[0][dim].front();
  // For an empty shard, split.Tensor would return a single tensor instead of `count` tensors.
  rule.factors[static_cast<std::size_t>(along)].allow_empty = false;
  rule.outputs.resize(static_cast<std::size_t>(count), rule.outputs[0]);
  const bool unsafe = base_name(call.op).starts_with("unsafe");
  rule.local_call = {
      .op = unsafe ? "aten::unsafe_split.Tensor" : "aten::split.Tensor",
      .args = {call.args[0], call.tensor(0).sizes[dim] / count, static_cast<std::int64_t>(dim)},
      .when_split = {along}};
  rule.size_arguments = {{.arg = 1, .output = 0, .dim = static_cast<int>(dim)}};
  return rule;
}

ShardingRule slice_of_part(const OpCall& call, std::size_t dim, std::int64_t size,
                           std::int64_t part) {
  ShardingRule rule = part_of_equals(call, dim, call.tensor(0).sizes[dim] / size);
  rule.local_call = {.op = "aten::slice.Tensor",
                     .args = {call.args[0], static_cast<std::int64_t>(dim), part * size,
                              (part + 1) * size, std::int64_t{1}},
                     .when_split = rule.outputs[0][dim]};
  const auto output_dim = static_cast<int>(dim);
  rule.size_arguments = {{.arg = 2, .output = 0, .dim = output_dim, .times = part},
                         {.arg = 3, .output = 0, .dim = output_dim, .times = part + 1}};
  return rule;
}

/// Calls `rule` with the dimension that argument `arg` names. Returns nullopt for 0-d tensors.
template <class Rule>
RuleFunction::Body along_dim(std::size_t arg, Rule rule) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const int ndim = call.tensor(0).ndim();
    if (ndim == 0) {
      return std::nullopt;
    }
    return rule(call, static_cast<std::size_t>(wrap_dim(call, call.integer_or(arg, 0), ndim)));
  };
}

std::optional<ShardingRule> split_rule(const OpCall& call, std::size_t dim) {
  const std::int64_t size = call.tensor(0).sizes[dim], step = call.integer(1);
  if (step <= 0) {
    return std::nullopt;
  }
  if (size > 0 && size % step == 0) {
    return split_equally(call, dim, size / step);
  }
  Sizes sizes;
  // split.Tensor returns at least one part, even of an empty dimension.
  for (std::int64_t at = 0; at == 0 || at < size; at += step) {
    sizes.push_back(std::min(step, size - at));
  }
  return split_along(call, dim, sizes);
}

ShardingRule split_with_sizes_rule(const OpCall& call, std::size_t dim) {
  const Sizes sizes = call.integers(1);
  const bool equal = !sizes.empty() && sizes.front() > 0 &&
                     std::count(sizes.begin(), sizes.end(), sizes.front()) == std::ssize(sizes);
  return equal && sizes.front() * std::ssize(sizes) == call.tensor(0).sizes[dim]
             ? split_equally(call, dim, std::ssize(sizes))
             : split_along(call, dim, sizes);
}

ShardingRule unbind_rule(const OpCall& call, std::size_t dim) {
  return split_along(call, dim, Sizes(static_cast<std::size_t>(call.tensor(0).sizes[dim]), -1));
}

ShardingRule select_rule(const OpCall& call, std::size_t dim) {
  return split_along(call, dim, {-1});
}

/// The rule of slice(self, dim, start, end, step). A slice of a whole dimension may be sharded.
std::optional<ShardingRule> slice_rule(const OpCall& call, std::size_t dim) {
  const std::int64_t size = call.tensor(0).sizes[dim], step = call.integer_or(4, 1);
  const auto clamp = [&](std::int64_t at) {
    return std::clamp<std::int64_t>(at < 0 ? at + size : at, 0, size);
  };
  const std::int64_t first = clamp(call.integer_or(2, 0));
  const std::int64_t last = std::max(first, clamp(call.integer_or(3, size)));
  if (step < 1) {
    return std::nullopt;
  }
  // The local call has the same arguments, so only `start` 0 and `end` >= size select the whole
  // dimension. The end -1 would shorten every shard.
  const bool takes_all = first == 0 && last == size && step == 1 &&
                         call.integer_or(3, size) >= size && call.integer_or(2, 0) == 0;
  const std::int64_t taken = last - first;
  if (!takes_all && step == 1 && taken > 0 && size % taken == 0 && first % taken == 0) {
    return slice_of_part(call, dim, taken, first / taken);
  }
  if (!takes_all) {
    return split_along(call, dim, {detail::ceil_div(taken, step)});
  }
  UnaryRule slice(call);
  const TensorFactors input = slice.input;
  return std::move(slice).moved(input);
}

/// The rule of constant_pad_nd(self, pad, value). `pad` has pairs of widths, last dimension first.
std::optional<ShardingRule> constant_pad_rule(const OpCall& call) {
  const Sizes pad = call.integers(1);
  UnaryRule padded(call);
  TensorFactors factors = padded.input;
  if (pad.size() / 2 > factors.size()) {
    return std::nullopt;
  }
  for (std::size_t i = 0; i + 1 < pad.size(); i += 2) {
    const std::size_t dim = factors.size() - 1 - i / 2;
    if (pad[i] == 0 && pad[i + 1] == 0) {
      continue;
    }
    keep_unsharded(padded.rule, factors[dim]);
    factors[dim] = {add_unsharded(padded.rule, call.tensor(0).sizes[dim] + pad[i] + pad[i + 1])};
  }
  // A Partial input is allowed only for the constant 0; another constant would be added once for
  // each rank.
  return call.number(2) == 0 ? std::move(padded).linear(factors)
                             : std::move(padded).finish(factors);
}

}  // namespace

Table joining_table() {
  return {"joining and splitting",
          {
              {"cat{,.out}", cat_rule},
              {"stack _stack", stack_rule},
              {"{split,unsafe_split}.Tensor", along_dim(2, split_rule)},
              {"split_with_sizes unsafe_split_with_sizes", along_dim(2, split_with_sizes_rule)},
              {"unbind.int", along_dim(1, unbind_rule)},
              {"select.int", along_dim(1, select_rule)},
              {"slice.Tensor", along_dim(1, slice_rule)},
              {"constant_pad_nd", constant_pad_rule, true},
          }};
}

}  // namespace tessera::rules
