// Views, and copies that move elements as views do. The local call is the same view of the local
// tensor, so a rule must make sure that it shows the right elements: sizes among the arguments
// become local ones (size_arguments), and what depends on a size of 1 names dimensions instead.
#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "rules/rule_builder.h"
#include "rules/rule_table.h"

namespace tessera::rules {
namespace {

/// A rule under construction: of an operator that moves the elements of one tensor.
struct ViewRule {
  ShardingRule rule;
  int self;
  TensorFactors input;  ///< one factor per dimension to begin with

  explicit ViewRule(const OpCall& call) : rule(start(call)), self(call.tensor_index(0)) {
    input = add_factors(rule, meta_of(call, self).sizes);
  }

  // Elements move and do not change, so that any pending reduction may wait.
  ShardingRule finish(std::vector<TensorFactors> outputs) && {
    input_of(rule, self) = std::move(input);
    rule.outputs = std::move(outputs);
    add_any_linear(rule, {self});
    return std::move(rule);
  }
};

// Permutations

std::optional<ShardingRule> permuted(const OpCall& call, const std::vector<int>& order) {
  ViewRule view(call);
  TensorFactors output;
  for (int dim : order) {
    output.push_back(view.input[static_cast<std::size_t>(dim)]);
  }
  return std::move(view).finish({output});
}

std::optional<ShardingRule> permute_rule(const OpCall& call) {
  std::vector<int> order;
  for (std::int64_t dim : call.integers(1)) {
    order.push_back(wrap_dim(call, dim, call.tensor(0).ndim()));
  }
  return permuted(call, order);
}

std::optional<ShardingRule> swapped(const OpCall& call, std::int64_t a, std::int64_t b) {
  const int ndim = call.tensor(0).ndim();
  std::vector<int> order(static_cast<std::size_t>(ndim));
  std::iota(order.begin(), order.end(), 0);
  if (ndim > 0) {
    std::swap(order[static_cast<std::size_t>(wrap_dim(call, a, ndim))],
              order[static_cast<std::size_t>(wrap_dim(call, b, ndim))]);
  }
  return permuted(call, order);
}

std::optional<ShardingRule> transpose_rule(const OpCall& call) {
  return swapped(call, call.integer(1), call.integer(2));
}

std::optional<ShardingRule> t_rule(const OpCall& call) {
  return call.tensor(0).ndim() < 2 ? swapped(call, 0, 0) : swapped(call, 0, 1);
}

// Dimensions added, removed and repeated

/// squeeze removes the dimensions of global size 1. A local size of 1 must stay, so the local call
/// names the dimensions.
std::optional<ShardingRule> squeeze_rule(const OpCall& call) {
  ViewRule view(call);
  const Sizes& sizes = call.tensor(0).sizes;
  std::vector<bool> named(sizes.size(), call.args.size() < 2);
  // An empty list names no dimension.
  if (call.args.size() > 1 && !call.integers(1).empty()) {
    named = named_dims(call, 1, call.tensor(0).ndim());
  }
  TensorFactors output;
  Sizes squeezed;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    if (named[dim] && sizes[dim] == 1) {
      squeezed.push_back(static_cast<std::int64_t>(dim));
      keep_unsharded(view.rule, view.input[dim]);
    } else {
      output.push_back(view.input[dim]);
    }
  }
  const char* local = "aten::squeeze.dims";
  if (base_name(call.op).ends_with("copy")) {
    local = "aten::squeeze_copy.dims";
  }
  if (is_inplace(call.op)) {
    local = "aten::squeeze_.dims";
  }
  view.rule.local_call = {local, {call.args[0], squeezed}};
  return std::move(view).finish({output});
}

std::optional<ShardingRule> unsqueeze_rule(const OpCall& call) {
  ViewRule view(call);
  TensorFactors output = view.input;
  const int dim = wrap_dim(call, call.integer(1), call.tensor(0).ndim() + 1);
  output.insert(output.begin() + dim, Factors{});
  return std::move(view).finish({output});
}

/// expand(self, size): -1 keeps a dimension; new ones come in front.
std::optional<ShardingRule> expand_rule(const OpCall& call) {
  ViewRule view(call);
  const Sizes& own = call.tensor(0).sizes;
  const Sizes wanted = call.integers(1);
  if (wanted.size() < own.size()) {
    return std::nullopt;
  }
  const std::size_t added = wanted.size() - own.size();
  TensorFactors output;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const bool kept = i >= added && (wanted[i] == -1 || wanted[i] == own[i - added]);
    if (kept) {
      output.push_back(view.input[i - added]);
      continue;
    }
    output.push_back({add_unsharded(view.rule, wanted[i])});
    // A dimension of size 1 that is expanded: on the input side it has no factor.
    if (i >= added) {
      view.input[i - added].clear();
    }
  }
  view.rule.size_arguments.push_back({1, 0});
  return std::move(view).finish({output});
}

/// repeat(self, repeats): a dimension becomes (repeats, dimension); the repeats are local.
std::optional<ShardingRule> repeat_rule(const OpCall& call) {
  ViewRule view(call);
  const Sizes repeats = call.integers(1);
  if (repeats.size() < view.input.size()) {
    return std::nullopt;
  }
  const std::size_t added = repeats.size() - view.input.size();
  TensorFactors output;
  for (std::size_t i = 0; i < repeats.size(); ++i) {
    Factors& factors = output.emplace_back();
    if (repeats[i] != 1) {
      factors.push_back(add_unsharded(view.rule, repeats[i]));
    }
    if (i >= added) {
      factors.push_back(view.input[i - added][0]);
    }
  }
  return std::move(view).finish({output});
}

// Windows and diagonals

/// unfold(self, dim, size, step): a dimension becomes its windows, and the last dimension goes
/// along a window.
std::optional<ShardingRule> unfold_rule(const OpCall& call) {
  ViewRule view(call);
  const std::int64_t size = call.integer(2), step = call.integer(3);
  TensorFactors output = view.input;
  if (!output.empty()) {
    const auto dim =
        static_cast<std::size_t>(wrap_dim(call, call.integer(1), call.tensor(0).ndim()));
    keep_unsharded(view.rule, view.input[dim]);
    output[dim] = {add_unsharded(view.rule, (call.tensor(0).sizes[dim] - size) / step + 1)};
  }
  output.push_back({add_unsharded(view.rule, size)});
  return std::move(view).finish({output});
}

/// Length of a diagonal of a matrix.
std::int64_t diagonal_size(std::int64_t rows, std::int64_t columns, std::int64_t offset) {
  const std::int64_t size =
      offset >= 0 ? std::min(rows, columns - offset) : std::min(rows + offset, columns);
  return std::max<std::int64_t>(size, 0);
}

/// diagonal(self, offset, dim1, dim2): the two dimensions go, the last one is along the diagonal.
std::optional<ShardingRule> diagonal_rule(const OpCall& call) {
  ViewRule view(call);
  const int ndim = call.tensor(0).ndim();
  const int rows = wrap_dim(call, call.integer_or(2, 0), ndim);
  const int columns = wrap_dim(call, call.integer_or(3, 1), ndim);
  TensorFactors output;
  for (int dim = 0; dim < ndim; ++dim) {
    Factors& factors = view.input[static_cast<std::size_t>(dim)];
    if (dim == rows || dim == columns) {
      keep_unsharded(view.rule, factors);
    } else {
      output.push_back(factors);
    }
  }
  output.push_back({add_unsharded(
      view.rule, diagonal_size(call.tensor(0).size(rows), call.tensor(0).size(columns),
                               call.integer_or(1, 0)))});
  return std::move(view).finish({output});
}

// Views as another type

/// Keeps sums and averages only: a maximum has no meaning for complex numbers.
void keep_linear_only(ShardingRule& rule) {
  rule.linear.clear();
  add_linear(rule, {0});
}

std::optional<ShardingRule> view_as_real_rule(const OpCall& call) {
  ViewRule view(call);
  TensorFactors output = view.input;
  output.push_back({add_unsharded(view.rule, 2)});
  ShardingRule rule = std::move(view).finish({output});
  keep_linear_only(rule);
  return rule;
}

std::optional<ShardingRule> view_as_complex_rule(const OpCall& call) {
  ViewRule view(call);
  if (view.input.empty()) {
    return std::nullopt;
  }
  TensorFactors output = view.input;
  keep_unsharded(view.rule, output.back());
  output.pop_back();
  ShardingRule rule = std::move(view).finish({output});
  keep_linear_only(rule);
  return rule;
}

/// view.dtype(self, dtype): the last dimension grows or shrinks with the size of an element. Not
/// linear: it reinterprets bits.
std::optional<ShardingRule> view_dtype_rule(const OpCall& call) {
  ViewRule view(call);
  const std::int64_t from = call.tensor(0).itemsize, to = call.dtype(1).itemsize;
  TensorFactors output = view.input;
  if (from != to) {
    if (output.empty()) {
      return std::nullopt;
    }
    keep_unsharded(view.rule, output.back());
    output.back() = {add_unsharded(view.rule, call.tensor(0).sizes.back() * from / to)};
  }
  ShardingRule rule = std::move(view).finish({output});
  rule.linear.clear();
  return rule;
}

}  // namespace

Table view_table() {
  const std::vector<Row> rows{
      {"{view,view_copy}.dtype", view_dtype_rule},
      {"permute{,_copy}", permute_rule},
      {"{transpose,transpose_copy}.int transpose_", transpose_rule},
      {"t{,_,_copy}", t_rule},
      {"{squeeze,squeeze_,squeeze_copy}{,.dim,.dims}", squeeze_rule},
      {"unsqueeze{,_,_copy}", unsqueeze_rule},
      {"expand{,_copy}", expand_rule},
      {"repeat", repeat_rule},
      {"unfold{,_copy}", unfold_rule},
      {"diagonal{,_copy}", diagonal_rule},
      {"view_as_real{,_copy}", view_as_real_rule},
      {"view_as_complex{,_copy}", view_as_complex_rule},
  };
  return {"view", join_rows({reshape_rows(), rows})};
}

}  // namespace tessera::rules
