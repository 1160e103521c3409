#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "rules/rule_table.h"
#include "tessera/core/error.h"

namespace tessera::rules {

// The rules of views, and of copies that move elements as views do. Each rank runs the operator on
// its local tensor, with local sizes in place of global sizes among the arguments.

namespace {

std::optional<ShardingRule> permuted(const OpCall& call, const std::vector<int>& order) {
  UnaryRule view(call);
  TensorFactors output;
  for (int dim : order) {
    output.push_back(view.input[static_cast<std::size_t>(dim)]);
  }
  return std::move(view).moved(output);
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
  return swapped(call, 0, call.tensor(0).ndim() < 2 ? 0 : 1);
}

/// The rule of squeeze. The local call names the dimensions of global size 1, because a shard can
/// also have size 1 in a larger dimension.
std::optional<ShardingRule> squeeze_rule(const OpCall& call) {
  UnaryRule view(call);
  const Sizes& sizes = call.tensor(0).sizes;
  std::vector<bool> named(sizes.size(), call.args.size() < 2);
  // squeeze.dims with an empty list removes no dimension.
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
  view.rule.local_call = {is_inplace(call.op) ? "aten::squeeze_.dims" : "aten::squeeze.dims",
                          {call.args[0], squeezed}};
  return std::move(view).moved(output);
}

std::optional<ShardingRule> unsqueeze_rule(const OpCall& call) {
  UnaryRule view(call);
  TensorFactors output = view.input;
  const int dim = wrap_dim(call, call.integer(1), call.tensor(0).ndim() + 1);
  output.insert(output.begin() + dim, Factors{});
  return std::move(view).moved(output);
}

/// The rule of expand(self, size). Size -1 leaves a dimension unchanged; new dimensions come first.
std::optional<ShardingRule> expand_rule(const OpCall& call) {
  UnaryRule view(call);
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
    // In the input, an expanded dimension of size 1 has no factor (einsum index letter).
    if (i >= added) {
      view.input[i - added].clear();
    }
  }
  view.rule.size_arguments.push_back({1, 0});
  return std::move(view).moved(output);
}

/// The rule of repeat(self, repeats). A dimension of the result is unflattened to (repeats,
/// dimension of self), and the repeats are not sharded.
std::optional<ShardingRule> repeat_rule(const OpCall& call) {
  UnaryRule view(call);
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
  return std::move(view).moved(output);
}

/// The rule of view_as_real. Only sums and averages stay Partial: complex numbers have no maximum.
std::optional<ShardingRule> view_as_real_rule(const OpCall& call) {
  UnaryRule view(call);
  TensorFactors output = view.input;
  output.push_back({add_unsharded(view.rule, 2)});
  return std::move(view).linear(std::move(output));
}

std::optional<ShardingRule> view_as_complex_rule(const OpCall& call) {
  UnaryRule view(call);
  if (view.input.empty()) {
    return std::nullopt;
  }
  TensorFactors output = view.input;
  keep_unsharded(view.rule, output.back());
  output.pop_back();
  return std::move(view).linear(std::move(output));
}

// The rules of reshape and view, which find the sub-dimensions that two shapes share.

/// Finds the factors (einsum index letters) that both shapes of a reshape share. Each step divides
/// one size of each shape by the greatest common divisor of both: (2, 6) -> (4, 3) has the factors
/// 2, 2, 3.
class Reshape {
 public:
  Reshape(ShardingRule& rule, const Sizes& from, const Sizes& to)
      : rule_(rule), input_(from.size()), output_(to.size()), from_(from), to_(to) {
    share_sizes();
  }
  TensorFactors input() { return std::move(input_); }
  TensorFactors output() { return std::move(output_); }

 private:
  static std::int64_t count(std::span<const std::int64_t> sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
  }

  /// Equal leading sizes and equal trailing sizes share factors (einsum index letters), also sizes
  /// of 1. share() finds the factors between them. Tensors without elements have views of any empty
  /// shape, so the sizes between may share no factor.
  void share_sizes() {
    const auto same = std::ranges::mismatch(from_, to_);
    const auto first = static_cast<std::size_t>(same.in1 - from_.begin());
    std::size_t i = from_.size(), o = to_.size();
    for (; i > first && o > first && from_[i - 1] == to_[o - 1]; --i, --o) {
    }
    for (std::size_t dim = 0; dim < first; ++dim) {
      share_dim(dim, dim);
    }
    const std::span from(from_), to(to_);
    const std::int64_t in = count(from.subspan(first, i - first));
    if (in > 0 && in == count(to.subspan(first, o - first))) {
      share(first, from.first(i), to.first(o));
    } else {
      keep_dims_unsharded(input_, first, from.first(i));
      keep_dims_unsharded(output_, first, to.first(o));
    }
    for (; i < from_.size(); ++i, ++o) {
      share_dim(i, o);
    }
  }

  void share_dim(std::size_t i, std::size_t o) {
    input_[i] = output_[o] = {add_factor(rule_, from_[i])};
  }

  void keep_dims_unsharded(TensorFactors& factors, std::size_t first,
                           std::span<const std::int64_t> sizes) {
    for (std::size_t dim = first; dim < sizes.size(); ++dim) {
      factors[dim] = {add_unsharded(rule_, sizes[dim])};
    }
  }

  /// Finds the shared factors (einsum index letters) of the dimensions of `from` and `to` from
  /// `first` on.
  void share(std::size_t first, std::span<const std::int64_t> from,
             std::span<const std::int64_t> to) {
    std::size_t i = first, o = first;
    std::int64_t in = 1, out = 1;
    for (;;) {
      const bool more_input = next(from, i, in), more_output = next(to, o, out);
      if (!more_input || !more_output) {
        return;
      }
      const std::int64_t common = std::gcd(in, out);
      if (common == 1) {
        keep_unsharded_to_boundary(i, in, o, out);
        continue;
      }
      const int factor = add_factor(rule_, common);
      input_[i - 1].push_back(factor);
      output_[o - 1].push_back(factor);
      in /= common;
      out /= common;
    }
  }

  /// Advances `at` past the next dimension whose size is not 1. Returns false at the end.
  static bool next(std::span<const std::int64_t> sizes, std::size_t& at, std::int64_t& left) {
    while (left == 1 && at < sizes.size()) {
      left = sizes[at++];
    }
    return left != 1;
  }

  void keep_unsharded_to_boundary(std::size_t& i, std::int64_t& in, std::size_t& o,
                                  std::int64_t& out) {
    std::int64_t in_product = in, out_product = out;
    input_[i - 1].push_back(add_unsharded(rule_, in));
    output_[o - 1].push_back(add_unsharded(rule_, out));
    while (in_product != out_product) {
      const bool behind = in_product < out_product;
      const Sizes& sizes = behind ? from_ : to_;
      std::size_t& at = behind ? i : o;
      const std::int64_t size = sizes[at++];
      (behind ? in_product : out_product) *= size;
      (behind ? input_ : output_)[at - 1].push_back(add_unsharded(rule_, size));
    }
    in = out = 1;
  }

  ShardingRule& rule_;
  TensorFactors input_, output_;
  const Sizes &from_, &to_;
};

/// Returns `sizes` with the size -1 inferred from `numel`; nullopt if `numel` does not fit `sizes`.
std::optional<Sizes> infer_sizes(Sizes sizes, std::int64_t numel) {
  std::int64_t known = 1;
  std::int64_t* inferred = nullptr;
  for (std::int64_t& size : sizes) {
    if (size >= 0) {
      known *= size;
    } else if (inferred) {
      return std::nullopt;
    } else {
      inferred = &size;
    }
  }
  if (inferred) {
    // If another size is 0, the size -1 could have any value; libtorch throws in this case.
    if (known == 0 || numel % known != 0) {
      return std::nullopt;
    }
    *inferred = numel / known;
    known *= *inferred;
  }
  return known == numel ? std::optional(std::move(sizes)) : std::nullopt;
}

std::string text_of(const Sizes& sizes) {
  std::string text;
  for (const std::int64_t size : sizes) {
    text += (text.empty() ? "" : ", ") + std::to_string(size);
  }
  return "[" + text + "]";
}

std::optional<ShardingRule> reshape_rule(const OpCall& call) {
  const TensorMeta& self = call.tensor(0);
  const std::optional<Sizes> sizes = infer_sizes(call.integers(1), self.numel());
  TESSERA_CHECK(sizes, "view of a distributed tensor of sizes ", text_of(self.sizes), " as ",
                text_of(call.integers(1)),
                ", which has a different number of elements; pass the sizes of the whole tensor, "
                "not of this rank's shard (for example heads, not heads / tp), or -1");
  ShardingRule rule = start(call);
  Reshape reshape(rule, self.sizes, *sizes);
  input_of(rule, call.tensor_index(0)) = reshape.input();
  rule.outputs.push_back(reshape.output());
  add_any_linear(rule, {call.tensor_index(0)});
  rule.size_arguments.push_back({1, 0});
  return rule;
}

/// The rule of _reshape_alias. The local call is view(), because the stride argument is global.
std::optional<ShardingRule> reshape_alias_rule(const OpCall& call) {
  std::optional<ShardingRule> rule = reshape_rule(call);
  if (rule) {
    rule->local_call = {"aten::view", {call.args[0], call.args[1]}};
  }
  return rule;
}

}  // namespace

Table view_table() {
  return {"view",
          {
              {"view _unsafe_view reshape", reshape_rule},
              {"_reshape_alias", reshape_alias_rule},
              {"permute", permute_rule},
              {"transpose.int transpose_", transpose_rule},
              {"t{,_}", t_rule},
              {"{squeeze,squeeze_}{,.dim,.dims}", squeeze_rule},
              {"unsqueeze{,_}", unsqueeze_rule},
              {"expand", expand_rule},
              {"repeat", repeat_rule},
              {"view_as_real", view_as_real_rule},
              {"view_as_complex", view_as_complex_rule},
          }};
}

// The rules of operators that write into zeros (select_backward) or into a copy of self
// (select_scatter). The dimension with the selected positions is not sharded.

namespace {

/// Returns the rule of select_backward(grad, sizes, dim, ...) or slice_backward: zeros with the
/// gradient written to the selected positions.
RuleFunction::Body place_gradient(bool keeps_dim) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const Sizes sizes = call.integers(1);
    if (sizes.empty()) {
      return std::nullopt;
    }
    const auto dim =
        static_cast<std::size_t>(wrap_dim(call, call.integer(2), static_cast<int>(sizes.size())));
    ShardingRule rule = start(call);
    const TensorFactors result = add_factors(rule, sizes);
    input_of(rule, call.tensor_index(0)) = part_along(
        rule, result, dim, keeps_dim ? std::optional(call.tensor(0).sizes[dim]) : std::nullopt);
    rule.outputs.push_back(result);
    rule.size_arguments.push_back({1, 0});
    add_linear(rule, {call.tensor_index(0)});
    return rule;
  };
}

/// Returns the rule of select_scatter(self, src, dim, ...) or slice_scatter: a copy of self with
/// src written to the selected positions.
RuleFunction::Body place_source(bool keeps_dim) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const int self = call.tensor_index(0), source = call.tensor_index(1);
    if (meta_of(call, self).ndim() == 0) {
      return std::nullopt;
    }
    const auto dim =
        static_cast<std::size_t>(wrap_dim(call, call.integer_or(2, 0), meta_of(call, self).ndim()));
    ShardingRule rule = start(call);
    const TensorFactors result = add_factors(rule, meta_of(call, self).sizes);
    input_of(rule, self) = result;
    const TensorFactors placed =
        part_along(rule, result, dim,
                   keeps_dim ? std::optional(meta_of(call, source).sizes.at(dim)) : std::nullopt);
    if (placed.size() != meta_of(call, source).sizes.size()) {
      return std::nullopt;
    }
    input_of(rule, source) = placed;
    rule.outputs.push_back(result);
    add_any_linear(rule, {self, source});
    return rule;
  };
}

}  // namespace

Table view_gradient_table() {
  return {"gradients of views",
          {
              {"select_backward", place_gradient(false)},
              {"slice_backward", place_gradient(true)},
              {"select_scatter", place_source(false)},
              {"slice_scatter", place_source(true)},
          }};
}

}  // namespace tessera::rules
