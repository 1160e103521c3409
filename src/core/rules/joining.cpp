// cat, stack and their inverses. The dimension along which tensors are joined or cut stays
// unsharded: shards of the parts are not shards of the whole. The exception is equal parts: then
// the part's number and the place within it are two factors, and the latter may be sharded (a fused
// weight, where each rank has a shard of every part).
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "rules/rule_builder.h"
#include "rules/rule_table.h"
#include "tessera/core/detail/rounding.h"

namespace tessera::rules {
namespace {

/// cat skips empty 1-d tensors, whatever shape the others have.
bool is_skipped(const TensorMeta& tensor) {
  return tensor.sizes == Sizes{0};
}

/// `skip`: as cat does; stack takes no such tensors.
std::vector<int> joined_tensors(const OpCall& call, bool skip) {
  std::vector<int> result;
  for (TensorRef ref : call.tensor_list(0)) {
    if (!skip || !is_skipped(meta_of(call, ref.index))) {
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

/// All other dimensions are shared by all tensors, so that they are brought to one layout.
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

/// The new dimension is local: every dimension that the tensors have may be sharded.
std::optional<ShardingRule> stack_rule(const OpCall& call) {
  const std::vector<int> tensors = joined_tensors(call, false);
  if (tensors.empty()) {
    return std::nullopt;
  }
  const TensorMeta& first = meta_of(call, tensors[0]);
  const int dim = wrap_dim(call, call.integer_or(1, 0), first.ndim() + 1);
  ShardingRule rule = start(call);
  TensorFactors result = add_factors(rule, first.sizes);
  for (int tensor : tensors) {
    if (meta_of(call, tensor).sizes != first.sizes) {
      return std::nullopt;
    }
    input_of(rule, tensor) = result;
  }
  result.insert(result.begin() + dim,
                Factors{add_unsharded(rule, static_cast<std::int64_t>(tensors.size()))});
  rule.outputs.push_back(result);
  add_any_linear(rule, tensors);
  return rule;
}

/// One tensor cut along `dim`, which stays unsharded, into outputs with these sizes there; -1: the
/// output lacks the dimension.
ShardingRule split_along(const OpCall& call, std::size_t dim, const Sizes& sizes) {
  const int self = call.tensor_index(0);
  ShardingRule rule = start(call);
  input_of(rule, self) = add_factors(rule, call.tensor(0).sizes);
  keep_unsharded(rule, input_of(rule, self)[dim]);
  for (const std::int64_t size : sizes) {
    TensorFactors& output = rule.outputs.emplace_back(input_of(rule, self));
    if (size < 0) {
      output.erase(output.begin() + static_cast<std::ptrdiff_t>(dim));
    } else {
      output[dim] = {add_unsharded(rule, size)};
    }
  }
  add_any_linear(rule, {self});
  return rule;
}

/// The rule of one of `count` equal parts along `dim`. The parts may be sharded.
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

/// All `count` equal parts along `dim`. Splits the local tensor into as many.
ShardingRule split_equally(const OpCall& call, std::size_t dim, std::int64_t count) {
  ShardingRule rule = part_of_equals(call, dim, count);
  const int along = rule.outputs[0][dim].front();
  // For an empty tensor, split.Tensor makes one part.
  rule.factors[static_cast<std::size_t>(along)].allow_empty = false;
  rule.outputs.resize(static_cast<std::size_t>(count), rule.outputs[0]);
  const bool copies = base_name(call.op).ends_with("copy");
  const bool unsafe = base_name(call.op).starts_with("unsafe");
  rule.local_call = {
      .op = copies   ? "aten::split_copy.Tensor"
            : unsafe ? "aten::unsafe_split.Tensor"
                     : "aten::split.Tensor",
      .args = {call.args[0], call.tensor(0).sizes[dim] / count, static_cast<std::int64_t>(dim)},
      .when_split = {along}};
  rule.size_arguments = {{.arg = 1, .output = 0, .dim = static_cast<int>(dim)}};
  return rule;
}

/// Part `part` of the equal parts of `size` along `dim`: what split_equally gives one of.
ShardingRule slice_of_part(const OpCall& call, std::size_t dim, std::int64_t size,
                           std::int64_t part) {
  ShardingRule rule = part_of_equals(call, dim, call.tensor(0).sizes[dim] / size);
  rule.local_call = {
      .op = base_name(call.op).ends_with("copy") ? "aten::slice_copy.Tensor" : "aten::slice.Tensor",
      .args = {call.args[0], static_cast<std::int64_t>(dim), part * size, (part + 1) * size,
               std::int64_t{1}},
      .when_split = rule.outputs[0][dim]};
  const auto output_dim = static_cast<int>(dim);
  rule.size_arguments = {{.arg = 2, .output = 0, .dim = output_dim, .times = part},
                         {.arg = 3, .output = 0, .dim = output_dim, .times = part + 1}};
  return rule;
}

/// A rule for the dimension that argument `arg` names. A scalar has none.
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
  // At least one part, also of an empty dimension.
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

/// select(self, dim, index)
ShardingRule select_rule(const OpCall& call, std::size_t dim) {
  return split_along(call, dim, {-1});
}

/// slice(self, dim, start, end, step). A slice of all of a dimension leaves it sharded.
std::optional<ShardingRule> slice_rule(const OpCall& call, std::size_t dim) {
  const std::int64_t size = call.tensor(0).sizes[dim], step = call.integer_or(4, 1);
  const auto clamp = [&](std::int64_t at) {
    return std::clamp<std::int64_t>(at < 0 ? at + size : at, 0, size);
  };
  const std::int64_t first = clamp(call.integer_or(2, 0));
  const std::int64_t last = std::max(first, clamp(call.integer_or(3, size)));
  // libtorch throws: let it.
  if (step < 1) {
    return std::nullopt;
  }
  // The same arguments are used on the local tensors: an end before `size`, such as -1, would cut
  // every shard.
  const bool takes_all = first == 0 && last == size && step == 1 &&
                         call.integer_or(3, size) >= size && call.integer_or(2, 0) == 0;
  const std::int64_t taken = last - first;
  if (!takes_all && step == 1 && taken > 0 && size % taken == 0 && first % taken == 0) {
    return slice_of_part(call, dim, taken, first / taken);
  }
  if (!takes_all) {
    return split_along(call, dim, {detail::ceil_div(taken, step)});
  }
  ShardingRule rule = unchanged(call);
  add_any_linear(rule, {call.tensor_index(0)});
  return rule;
}

}  // namespace

Table joining_table() {
  return {"joining and splitting",
          {
              {"cat{,.out}", cat_rule},
              {"stack _stack", stack_rule},
              {"split.Tensor {split_copy,unsafe_split}.Tensor", along_dim(2, split_rule)},
              {"{split_with_sizes,split_with_sizes_copy,unsafe_split_with_sizes}",
               along_dim(2, split_with_sizes_rule)},
              {"{unbind,unbind_copy}.int", along_dim(1, unbind_rule)},
              {"{select,select_copy}.int", along_dim(1, select_rule)},
              {"{slice,slice_copy}.Tensor", along_dim(1, slice_rule)},
          }};
}

}  // namespace tessera::rules
