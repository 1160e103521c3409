#include "rule_builder.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::rules {
namespace {

int push(ShardingRule& rule, ShardingRule::Factor factor) {
  rule.factors.push_back(factor);
  return static_cast<int>(rule.factors.size()) - 1;
}

}  // namespace

ShardingRule start(const OpCall& call) {
  ShardingRule rule;
  for (const TensorMeta& tensor : call.tensors) rule.inputs.emplace_back(tensor.sizes.size());
  return rule;
}

int add_factor(ShardingRule& rule, std::int64_t size) {
  return push(rule, {.size = size});
}

int add_whole(ShardingRule& rule, std::int64_t size) {
  return push(rule, {.size = size, .whole = true});
}

int add_reduced(ShardingRule& rule, std::int64_t size, ReduceOp op) {
  return push(rule, {.size = size, .reduction = op});
}

TensorFactors add_factors(ShardingRule& rule, const Sizes& sizes) {
  TensorFactors result;
  for (std::int64_t size : sizes) result.push_back({add_factor(rule, size)});
  return result;
}

TensorFactors add_wholes(ShardingRule& rule, const Sizes& sizes) {
  TensorFactors result;
  for (std::int64_t size : sizes) result.push_back({add_whole(rule, size)});
  return result;
}

std::int64_t size_of(const ShardingRule& rule, const Factors& factors) {
  std::int64_t size = 1;
  for (int factor : factors) size *= rule.factors[static_cast<std::size_t>(factor)].size;
  return size;
}

void keep_whole(ShardingRule& rule, const Factors& factors) {
  for (int factor : factors) rule.factors[static_cast<std::size_t>(factor)].whole = true;
}

void add_linear(ShardingRule& rule, std::vector<int> inputs) {
  rule.linear.push_back({inputs, ReduceOp::kSum});
  rule.linear.push_back({std::move(inputs), ReduceOp::kAvg});
}

void add_linear(ShardingRule& rule, const std::vector<int>& inputs,
                std::initializer_list<ReduceOp> ops) {
  for (ReduceOp op : ops) rule.linear.push_back({inputs, op});
}

void add_any_linear(ShardingRule& rule, const std::vector<int>& inputs) {
  add_linear(rule, inputs,
             {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProduct});
}

int wrap_dim(const OpCall& call, std::int64_t dim, int ndim) {
  const std::int64_t count = std::max(ndim, 1);
  TESSERA_CHECK(dim >= -count && dim < count, call.op, ": dimension ", dim,
                " is out of range for a tensor of ", ndim, " dimensions");
  return static_cast<int>(dim < 0 ? dim + count : dim);
}

std::vector<bool> named_dims(const OpCall& call, std::size_t arg, int ndim) {
  const Sizes dims = call.integers(arg);
  std::vector<bool> named(static_cast<std::size_t>(ndim), dims.empty());
  for (std::int64_t dim : dims) {
    const auto at = static_cast<std::size_t>(wrap_dim(call, dim, ndim));
    if (at < named.size()) named[at] = true;
  }
  return named;
}

std::optional<TensorFactors> add_broadcast(ShardingRule& rule, const OpCall& call,
                                           const std::vector<int>& tensors) {
  Sizes sizes;  // innermost first
  for (int tensor : tensors) {
    const Sizes& own = meta_of(call, tensor).sizes;
    sizes.resize(std::max(sizes.size(), own.size()), 1);
    for (std::size_t i = 0; i < own.size(); ++i) {
      const std::int64_t size = own[own.size() - 1 - i];
      if (size == 1) continue;
      if (sizes[i] != 1 && sizes[i] != size) return std::nullopt;
      sizes[i] = size;
    }
  }
  TensorFactors result = add_factors(rule, {sizes.rbegin(), sizes.rend()});
  for (int tensor : tensors) {
    const Sizes& own = meta_of(call, tensor).sizes;
    const std::size_t absent = result.size() - own.size();
    for (std::size_t i = 0; i < own.size(); ++i) {
      const Factors& factors = result[absent + i];
      if (own[i] == size_of(rule, factors)) input_of(rule, tensor)[i] = factors;
    }
  }
  return result;
}

std::vector<int> tensor_arguments(const OpCall& call) {
  std::vector<int> result;
  for (std::size_t arg = 0; arg < call.args.size(); ++arg) {
    if (call.has_tensor(arg)) result.push_back(call.tensor_index(arg));
  }
  return result;
}

std::string_view base_name(std::string_view op) {
  op.remove_prefix(std::min(op.find("::") + 2, op.size()));
  return op.substr(0, op.find('.'));
}

bool is_inplace(std::string_view op) {
  const std::string_view base = base_name(op);
  return base.ends_with('_') && !base.ends_with("__");
}

std::size_t out_count(std::string_view op) {
  const std::size_t dot = op.find('.');
  if (dot == std::string_view::npos) return 0;
  const std::string_view overload = op.substr(dot + 1);
  if (overload.ends_with("out")) return 1;
  for (const std::string_view pair :
       {"values", "values_stable", "dim_values", "dim_max", "dim_min"}) {
    if (overload == pair) return 2;
  }
  return 0;
}

}  // namespace tessera::rules
