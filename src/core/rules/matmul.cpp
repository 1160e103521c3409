#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "rules/rule_table.h"

namespace tessera::rules {

// Sharding rules of matrix products, written as einsum equations. The index letters are the factors
// of the ShardingRule. If a summed letter is sharded, the result is Partial(sum).

namespace {

/// An einsum equation: "mk,kn->mn". The "+" in "+,mk,kn->mn" (addmm) is an added operand.
struct Einsum {
  std::vector<std::string> operands;
  std::string result;

  explicit Einsum(std::string_view text) {
    const std::size_t arrow = text.find("->");
    result = text.substr(arrow + 2);
    text = text.substr(0, arrow);
    while (!text.empty()) {
      const std::size_t end = std::min(text.find(','), text.size());
      operands.emplace_back(text.substr(0, end));
      text.remove_prefix(std::min(end + 1, text.size()));
    }
  }
};

using Letters = std::map<char, int>;  // maps an index letter to the index of the factor

/// Whether an operand of the einsum equation is added to the matrix product, not multiplied.
bool is_added(const std::string& operand) {
  return operand.front() == '+';
}

/// Sets the factors of an operand's dimensions (`bound`: the factor of each index letter). Returns
/// false if the sizes disagree with other operands.
bool bind_operand(ShardingRule& rule, const OpCall& call, const Einsum& einsum,
                  const std::string& letters, int tensor, Letters& bound) {
  const Sizes& sizes = meta_of(call, tensor).sizes;
  if (sizes.size() != letters.size()) {
    return false;
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const char letter = letters[i];
    if (!bound.count(letter)) {
      const bool kept = einsum.result.find(letter) != std::string::npos;
      bound[letter] =
          kept ? add_factor(rule, sizes[i]) : add_reduced(rule, sizes[i], ReduceOp::kSum);
    }
    input_of(rule, tensor)[i] = {bound[letter]};
    if (size_of(rule, {bound[letter]}) != sizes[i]) {
      return false;
    }
  }
  return true;
}

/// Gives an added operand (the bias of addmm) the result's factors (einsum index letters). The
/// operand is `additive`: if the summed dimension is sharded, only one rank adds the operand.
bool bind_added(ShardingRule& rule, const OpCall& call, int tensor) {
  const Sizes& sizes = meta_of(call, tensor).sizes;
  if (sizes.size() > rule.outputs[0].size()) {
    return false;
  }
  TensorFactors& factors = input_of(rule, tensor);
  factors = factors_of_broadcast(rule, sizes, rule.outputs[0]);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (factors[i].empty() && sizes[i] != 1) {
      return false;
    }
  }
  rule.additive.push_back(tensor);
  return true;
}

/// Declares that the result is Partial if one multiplied operand and all added operands are
/// Partial.
void add_product_linearity(ShardingRule& rule, const std::vector<int>& product) {
  for (int operand : product) {
    std::vector<int> inputs{operand};
    inputs.insert(inputs.end(), rule.additive.begin(), rule.additive.end());
    add_linear(rule, inputs);
  }
}

std::optional<ShardingRule> einsum_rule(const OpCall& call, const Einsum& einsum) {
  const std::vector<int> tensors = tensor_arguments(call);
  if (tensors.size() != einsum.operands.size()) {
    return std::nullopt;
  }
  ShardingRule rule = start(call);
  Letters bound;
  std::vector<int> product;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string& operand = einsum.operands[i];
    if (is_added(operand)) {
      continue;
    }
    if (!bind_operand(rule, call, einsum, operand, tensors[i], bound)) {
      return std::nullopt;
    }
    product.push_back(tensors[i]);
  }
  TensorFactors& result = rule.outputs.emplace_back();
  for (char letter : einsum.result) {
    result.push_back({bound.at(letter)});
  }
  // Added operands come last, because added operands get the factors (index letters) of the result.
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (is_added(einsum.operands[i]) && !bind_added(rule, call, tensors[i])) {
      return std::nullopt;
    }
  }
  add_product_linearity(rule, product);
  return rule;
}

RuleFunction::Body einsum(std::string_view text) {
  return [parsed = Einsum(text)](const OpCall& call) { return einsum_rule(call, parsed); };
}

/// The rule of linear(input (..., k), weight (n, k), bias (n) or None).
std::optional<ShardingRule> linear_rule(const OpCall& call) {
  // The einsum equation has an index letter for each leading dimension, at most eight letters.
  const std::string leading =
      std::string("abcdefgh")
          .substr(0, static_cast<std::size_t>(std::max(call.tensor(0).ndim() - 1, 0)));
  if (call.tensor(0).ndim() < 1 || call.tensor(0).ndim() > 9) {
    return std::nullopt;
  }
  const bool matrix = call.tensor(1).ndim() == 2;
  const std::string bias = call.has_tensor(2) ? ",+" : "";
  return einsum_rule(call, Einsum(leading + (matrix ? "k,nk" : "k,k") + bias + "->" + leading +
                                  (matrix ? "n" : "")));
}

/// The rule of matmul(self, other). Leading dimensions broadcast as in pointwise operators; a
/// vector has no leading dimensions.
std::optional<ShardingRule> matmul_rule(const OpCall& call) {
  const int a = call.tensor_index(0), b = call.tensor_index(1);
  const int a_ndim = meta_of(call, a).ndim(), b_ndim = meta_of(call, b).ndim();
  if (a_ndim == 0 || b_ndim == 0) {
    return std::nullopt;
  }
  const int a_matrix = std::min(a_ndim, 2), b_matrix = std::min(b_ndim, 2);

  OpCall batch = call;  // `call` without the matrix dimensions of its tensors
  batch.tensors[static_cast<std::size_t>(a)].sizes.resize(
      static_cast<std::size_t>(a_ndim - a_matrix));
  batch.tensors[static_cast<std::size_t>(b)].sizes.resize(
      static_cast<std::size_t>(b_ndim - b_matrix));
  ShardingRule rule = start(batch);
  std::optional<TensorFactors> result = add_broadcast(rule, batch, {a, b});
  if (!result) {
    return std::nullopt;
  }

  // Returns no rule for wrong sizes, because libtorch's own error message is better.
  const std::int64_t contracted = meta_of(call, a).sizes.back();
  const std::int64_t other = meta_of(call, b).size(b_ndim - b_matrix);
  if (contracted != other) {
    return std::nullopt;
  }
  const Factors k{add_reduced(rule, contracted, ReduceOp::kSum)};
  if (a_matrix == 2) {
    result->push_back({add_factor(rule, meta_of(call, a).size(a_ndim - 2))});
    input_of(rule, a).push_back(result->back());
  }
  input_of(rule, a).push_back(k);
  input_of(rule, b).push_back(k);
  if (b_matrix == 2) {
    result->push_back({add_factor(rule, meta_of(call, b).sizes.back())});
    input_of(rule, b).push_back(result->back());
  }
  rule.outputs.push_back(*std::move(result));
  add_product_linearity(rule, {a, b});
  return rule;
}

}  // namespace

Table matmul_table() {
  return {"matmul",
          {
              {"mm{,.out}", einsum("mk,kn->mn")},
              {"bmm{,.out}", einsum("bmk,bkn->bmn")},
              {"mv{,.out}", einsum("mk,k->m")},
              {"dot{,.out}", einsum("k,k->")},
              {"ger{,.out}", einsum("m,n->mn")},
              {"addmm{,_,.out}", einsum("+,mk,kn->mn")},
              {"baddbmm{,_,.out}", einsum("+,bmk,bkn->bmn")},
              {"linear", linear_rule},
              {"matmul", matmul_rule},
          }};
}

}  // namespace tessera::rules
