#include <range/v3/view/reverse.hpp>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "rules/rule_table.h"
#include "tessera/core/error.h"
#include "tessera/core/sharding_rule.h"

namespace tessera::rules {

namespace {

int push(ShardingRule& rule, ShardingRule::Factor factor) {
  rule.factors.push_back(factor);
  return static_cast<int>(rule.factors.size()) - 1;
}

/// Adds one term in the notation of add_linear_terms(), such as "01~".
void add_linear_term(ShardingRule& rule, std::string_view term, const std::vector<int>& tensors) {
  std::vector<int> inputs;
  char sign = '+';
  for (const char c : term) {
    if (c < '0' || c > '9') {
      sign = c;
    } else if (const auto position = static_cast<std::size_t>(c - '0'); position < tensors.size()) {
      inputs.push_back(tensors[position]);
    }
  }
  switch (sign) {
    case '<':
      return add_linear(rule, inputs, {ReduceOp::kMax, ReduceOp::kMin});
    case '^':
      return add_linear(rule, inputs, {ReduceOp::kMax});
    case 'v':
      return add_linear(rule, inputs, {ReduceOp::kMin});
    case '~':
      return add_linear(rule, inputs, {ReduceOp::kAvg});
    case '*':
      return add_any_linear(rule, inputs);
    default:
      return add_linear(rule, inputs);
  }
}

}  // namespace

/// Makes a rule in which no dimension has a factor yet. Dimensions without factors are replicated.
ShardingRule start(const OpCall& call) {
  ShardingRule rule;
  for (const TensorMeta& tensor : call.tensors) {
    rule.inputs.emplace_back(tensor.sizes.size());
  }
  return rule;
}

int add_factor(ShardingRule& rule, std::int64_t size) {
  return push(rule, {.size = size});
}

int add_unsharded(ShardingRule& rule, std::int64_t size) {
  return push(rule, {.size = size, .unsharded = true});
}

int add_reduced(ShardingRule& rule, std::int64_t size, ReduceOp op) {
  return push(rule, {.size = size, .reduction = op});
}

TensorFactors add_factors(ShardingRule& rule, const Sizes& sizes) {
  TensorFactors result;
  for (std::int64_t size : sizes) {
    result.push_back({add_factor(rule, size)});
  }
  return result;
}

std::int64_t size_of(const ShardingRule& rule, const Factors& factors) {
  std::int64_t size = 1;
  for (int factor : factors) {
    size *= rule.factors[static_cast<std::size_t>(factor)].size;
  }
  return size;
}

void keep_unsharded(ShardingRule& rule, const Factors& factors) {
  for (int factor : factors) {
    rule.factors[static_cast<std::size_t>(factor)].unsharded = true;
  }
}

void forbid_empty_shards(ShardingRule& rule) {
  for (auto& factor : rule.factors) {
    factor.allow_empty = false;
  }
}

ShardingRule::TensorGroup group_of_inputs(const OpCall& call, std::vector<int> outputs) {
  ShardingRule::TensorGroup group{std::vector<int>(call.tensors.size()), std::move(outputs)};
  std::iota(group.inputs.begin(), group.inputs.end(), 0);
  return group;
}

/// add_linear() also declares averages. An average is a sum divided by the number of ranks, so a
/// linear operator commutes with averages.
void add_linear(ShardingRule& rule, std::vector<int> inputs) {
  rule.linear.push_back({inputs, ReduceOp::kSum});
  rule.linear.push_back({std::move(inputs), ReduceOp::kAvg});
}

void add_linear(ShardingRule& rule, const std::vector<int>& inputs,
                std::initializer_list<ReduceOp> ops) {
  for (ReduceOp op : ops) {
    rule.linear.push_back({inputs, op});
  }
}

void add_any_linear(ShardingRule& rule, const std::vector<int>& inputs) {
  add_linear(rule, inputs,
             {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProduct});
}

void add_linear_terms(ShardingRule& rule, std::string_view terms, const std::vector<int>& tensors) {
  while (!terms.empty()) {
    const std::size_t end = std::min(terms.find(' '), terms.size());
    add_linear_term(rule, terms.substr(0, end), tensors);
    terms.remove_prefix(std::min(end + 1, terms.size()));
  }
}

/// For a 0-d tensor, wrap_dim() accepts dimensions 0 and -1, as libtorch does.
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
    if (at < named.size()) {
      named[at] = true;
    }
  }
  return named;
}

std::optional<TensorFactors> add_broadcast(ShardingRule& rule, const OpCall& call,
                                           const std::vector<int>& tensors) {
  using ranges::views::reverse;
  using ranges::views::zip;
  Sizes sizes;
  for (int tensor : tensors) {
    const Sizes& own = meta_of(call, tensor).sizes;
    sizes.resize(std::max(sizes.size(), own.size()), 1);
    for (auto&& [common, size] : zip(sizes, own | reverse)) {
      // A dimension of size 1 broadcasts to any size, even to 0.
      if (size == 1) {
        continue;
      }
      if (common != 1 && common != size) {
        return std::nullopt;
      }
      common = size;
    }
  }
  TensorFactors result = add_factors(rule, {sizes.rbegin(), sizes.rend()});
  for (int tensor : tensors) {
    input_of(rule, tensor) = factors_of_broadcast(rule, meta_of(call, tensor).sizes, result);
  }
  return result;
}

void set_input(ShardingRule& rule, const OpCall& call, std::size_t arg,
               const TensorFactors& factors) {
  if (call.has_tensor(arg)) {
    input_of(rule, call.tensor_index(arg)) = factors;
  }
}

ShardingRule unchanged(const OpCall& call) {
  UnaryRule unary(call);
  const TensorFactors input = unary.input;
  return std::move(unary).finish(input);
}

TensorFactors part_along(ShardingRule& rule, const TensorFactors& whole, std::size_t dim,
                         std::optional<std::int64_t> size) {
  keep_unsharded(rule, whole[dim]);
  TensorFactors part = whole;
  if (size) {
    part[dim] = {add_unsharded(rule, *size)};
  } else {
    part.erase(part.begin() + static_cast<std::ptrdiff_t>(dim));
  }
  return part;
}

std::vector<int> tensor_arguments(const OpCall& call) {
  std::vector<int> result;
  for (std::size_t arg = 0; arg < call.args.size(); ++arg) {
    if (call.has_tensor(arg)) {
      result.push_back(call.tensor_index(arg));
    }
  }
  return result;
}

TensorFactors factors_of_broadcast(const ShardingRule& rule, const Sizes& sizes,
                                   const TensorFactors& to) {
  using ranges::views::reverse;
  TensorFactors result(sizes.size());
  for (auto&& [dim, size, factors] :
       ranges::views::zip(result | reverse, sizes | reverse, to | reverse)) {
    if (size == size_of(rule, factors)) {
      dim = factors;
    }
  }
  return result;
}

std::string_view base_name(std::string_view op) {
  op.remove_prefix(std::min(op.find("::") + 2, op.size()));
  return op.substr(0, op.find('.'));
}

bool is_inplace(std::string_view op) {
  const std::string_view base = base_name(op);
  // The names of __xor__ and similar operators, which are not in place, end in two underscores.
  return base.ends_with('_') && !base.ends_with("__");
}

std::size_t out_count(std::string_view op) {
  const std::size_t dot = op.find('.');
  if (dot == std::string_view::npos) {
    return 0;
  }
  const std::string_view overload = op.substr(dot + 1);
  if (overload.ends_with("out")) {
    return 1;
  }
  // out= overloads with two results are named after the first result ("values"), not "out".
  for (const std::string_view pair :
       {"values", "values_stable", "dim_values", "dim_max", "dim_min"}) {
    if (overload == pair) {
      return 2;
    }
  }
  return 0;
}

}  // namespace tessera::rules

namespace tessera {

// Functions with which sharding rules read the arguments of a call, converted as schemas do. An
// Error about a type is a bug in a rule, not in the user's call.

namespace {

/// Arguments after the end of OpCall::args are read as None: older schemas have fewer arguments,
/// and the rule of an out= variant gets the call without `out`.
const Argument kNone;

const Argument& argument(const OpCall& call, std::size_t arg) {
  return arg < call.args.size() ? call.args[arg] : kNone;
}

template <class T>
const T& get(const OpCall& call, std::size_t arg, const char* what) {
  const T* value = std::get_if<T>(&argument(call, arg));
  TESSERA_CHECK(value, call.op, ": argument ", arg, " is not ", what,
                "; correct the sharding rule to match the operator's schema");
  return *value;
}

}  // namespace

std::int64_t TensorMeta::numel() const {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

/// A missing optional tensor argument is None, or a TensorRef whose index is -1.
bool OpCall::has_tensor(std::size_t arg) const {
  const auto* ref = std::get_if<TensorRef>(&argument(*this, arg));
  return ref && ref->index >= 0;
}

int OpCall::tensor_index(std::size_t arg) const {
  const int index = get<TensorRef>(*this, arg, "a tensor").index;
  TESSERA_CHECK(index >= 0, op, ": argument ", arg, " is None, but must be a tensor");
  return index;
}

const TensorMeta& OpCall::tensor(std::size_t arg) const {
  return tensors.at(static_cast<std::size_t>(tensor_index(arg)));
}

/// tensor_list() accepts a single tensor in place of a list, so that overloads with a tensor and
/// with a list can share a rule.
std::vector<TensorRef> OpCall::tensor_list(std::size_t arg) const {
  if (is_none(arg)) {
    return {};
  }
  if (const auto* one = std::get_if<TensorRef>(&argument(*this, arg))) {
    return {*one};
  }
  return get<std::vector<TensorRef>>(*this, arg, "a list of tensors");
}

bool OpCall::is_none(std::size_t arg) const {
  return std::holds_alternative<std::monostate>(argument(*this, arg));
}

/// integer() reads a bool as 0 or 1, so that a rule can read flags like numbers.
std::int64_t OpCall::integer(std::size_t arg) const {
  if (const auto* flag = std::get_if<bool>(&argument(*this, arg))) {
    return *flag ? 1 : 0;
  }
  return get<std::int64_t>(*this, arg, "an integer");
}

std::int64_t OpCall::integer_or(std::size_t arg, std::int64_t otherwise) const {
  return is_none(arg) ? otherwise : integer(arg);
}

bool OpCall::boolean_or(std::size_t arg, bool otherwise) const {
  return is_none(arg) ? otherwise : integer(arg) != 0;
}

const DType& OpCall::dtype(std::size_t arg) const {
  return get<DType>(*this, arg, "a type of elements");
}

double OpCall::number(std::size_t arg) const {
  if (const auto* real = std::get_if<double>(&argument(*this, arg))) {
    return *real;
  }
  return static_cast<double>(integer(arg));
}

/// integers() accepts an integer, because only some overloads of libtorch convert dim=1 to a list.
std::vector<std::int64_t> OpCall::integers(std::size_t arg) const {
  if (is_none(arg)) {
    return {};
  }
  if (std::holds_alternative<std::int64_t>(argument(*this, arg))) {
    return {integer(arg)};
  }
  return get<std::vector<std::int64_t>>(*this, arg, "a list of integers");
}

}  // namespace tessera
