#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "rules/rule_table.h"

namespace tessera::rules {

// Sharding rules of matrix products, each written as an einsum equation. Its index letters are the
// factors of the ShardingRule. A letter that the result lacks is summed over, so sharding it makes
// the result Partial(sum).

namespace {

/// An einsum equation, "mk,kn->mn". Operand "+" is added to the result ("+,mk,kn->mn": addmm).
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

using Letters = std::map<char, int>;  // factor of each index letter

/// Whether the operand is not multiplied, but broadcast and added to the matrix product.
bool is_added(const std::string& operand) {
  return operand.front() == '+';
}

/// Gives an operand of the matrix product the factors of its index letters. Returns false if its
/// sizes do not agree with those of the other operands.
bool bind_operand(ShardingRule& rule, const OpCall& call, const Einsum& einsum,
                  const std::string& letters, int tensor, Letters& bound) {
  const Sizes& sizes = meta_of(call, tensor).sizes;
  if (sizes.size() != letters.size()) {
    return false;
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const char letter = letters[i];
    if (!bound.count(letter)) {
      // An index letter that is not in the result is summed over.
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

/// Gives an added operand (the bias of addmm) the factors (einsum index letters) of the result, to
/// which it broadcasts. The operand is also `additive`: if the dimension that is summed over is
/// sharded, it must be added once and not once for each rank.
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

/// Declares that a matrix product is linear in each of its operands, together with added operands.
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
  // Added operands come last, because they get the factors (index letters) of the result.
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

/// The rule of addmv(self, mat, vec). For a matrix without elements libtorch's kernel returns
/// `self` without expanding it; so shards must not be empty if `self` broadcasts.
std::optional<ShardingRule> addmv_rule(const OpCall& call) {
  std::optional<ShardingRule> rule = einsum_rule(call, Einsum("+,mk,k->m"));
  if (!rule || call.tensor(0).sizes == Sizes{call.tensor(1).size(0)}) {
    return rule;
  }
  if (call.tensor(1).numel() == 0) {
    return std::nullopt;
  }
  forbid_empty_shards(*rule);
  return rule;
}

/// The rule of linear(input (..., k), weight (n, k), bias (n) or None).
std::optional<ShardingRule> linear_rule(const OpCall& call) {
  // The einsum equation has an index letter for each leading dimension; eight letters are enough.
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

  OpCall batch = call;  // the call with both tensors reduced to their batch dimensions
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
              {"dot{,.out} vdot{,.out}", einsum("k,k->")},
              {"ger{,.out}", einsum("m,n->mn")},
              {"addmm{,_,.out}", einsum("+,mk,kn->mn")},
              {"addmv{,_,.out}", addmv_rule},
              {"addr{,_,.out}", einsum("+,m,n->mn")},
              {"baddbmm{,_,.out}", einsum("+,bmk,bkn->bmn")},
              {"addbmm{,_,.out}", einsum("+,bmk,bkn->mn")},
              {"linear", linear_rule},
              {"matmul", matmul_rule},
          }};
}

// The rules of operators on the last dimensions of each tensor: linear algebra, pooling,
// resampling, padding. The leading dimensions are batch dimensions and may be sharded in any way;
// the last dimensions stay unsharded.

namespace {

constexpr std::int64_t kUnknown = ShardingRule::kUnknown;

/// An operator on the last dimensions of its tensors; the leading dimensions are a batch.
struct Batched {
  /// Number of last dimensions of each tensor on which the operator works.
  std::vector<std::size_t> inputs;
  /// Number of last dimensions of each result, without the batch dimensions.
  std::vector<std::size_t> results;
  /// Indices of tensors such that the operator is linear in each of them separately.
  std::vector<int> linear = {};
  int sizes_arg = -1;  ///< index of the argument with the sizes of the only result; -1 if there is
                       ///< no such argument
  bool empty = true;   ///< whether a shard of the batch may have no elements
};

std::optional<ShardingRule> batched_rule(const OpCall& call, const Batched& batched) {
  const std::vector<int> tensors = tensor_arguments(call);
  if (tensors.size() != batched.inputs.size()) {
    return std::nullopt;
  }
  OpCall batch = call;  // the call with the tensors reduced to their batch dimensions
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    Sizes& sizes = batch.tensors[static_cast<std::size_t>(tensors[i])].sizes;
    if (sizes.size() < batched.inputs[i]) {
      return std::nullopt;
    }
    sizes.resize(sizes.size() - batched.inputs[i]);
  }
  ShardingRule rule = start(batch);
  const std::optional<TensorFactors> shared = add_broadcast(rule, batch, tensors);
  if (!shared) {
    return std::nullopt;
  }
  for (auto& factor : rule.factors) {
    factor.allow_empty = batched.empty;
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    // The last dimensions get no factor (einsum index letter), so they are not sharded.
    TensorFactors& factors = input_of(rule, tensors[i]);
    factors.resize(factors.size() + batched.inputs[i]);
  }
  for (std::size_t own : batched.results) {
    TensorFactors& result = rule.outputs.emplace_back(*shared);
    for (std::size_t i = 0; i < own; ++i) {
      // Most of these sizes follow from other arguments. The rule declares them unknown; they are
      // taken from the local result.
      result.push_back({add_unsharded(rule, kUnknown)});
    }
  }
  for (int ordinal : batched.linear) {
    add_linear(rule, {tensors[static_cast<std::size_t>(ordinal)]});
  }
  if (batched.sizes_arg < 0) {
    return rule;
  }
  // A backward takes the sizes of its result as an argument. If the argument is given, its sizes
  // are used, and are replaced by local sizes on each rank.
  const Sizes sizes = call.integers(static_cast<std::size_t>(batched.sizes_arg));
  if (sizes.size() != rule.outputs[0].size()) {
    return std::nullopt;
  }
  for (std::size_t dim = shared->size(); dim < sizes.size(); ++dim) {
    for (int factor : rule.outputs[0][dim]) {
      rule.factors[static_cast<std::size_t>(factor)].size = sizes[dim];
    }
  }
  rule.size_arguments.push_back({batched.sizes_arg, 0});
  return rule;
}

RuleFunction::Body on_last(const Batched& batched) {
  return [=](const OpCall& call) { return batched_rule(call, batched); };
}

/// Returns the rule of an operator with a flag: if argument `arg` is off, only result `always` is
/// computed and all other results are empty.
RuleFunction::Body on_last_if(std::size_t arg, const Batched& batched, std::size_t always) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    std::optional<ShardingRule> rule = batched_rule(call, batched);
    if (!rule || call.boolean_or(arg, true)) {
      return rule;
    }
    for (std::size_t i = 0; i < rule->outputs.size(); ++i) {
      if (i != always) {
        rule->outputs[i].clear();
      }
    }
    // Results that are not computed are empty and belong to no TensorGroup.
    rule->groups = {{tensor_arguments(call), {static_cast<int>(always)}}};
    return rule;
  };
}

/// Returns the rule of an operator on the last `dims` dimensions that is linear in the first
/// tensor. No shard of the batch may be empty.
RuleFunction::Body in_space(std::size_t dims, std::size_t inputs = 1, int sizes_arg = -1) {
  return on_last({.inputs = std::vector<std::size_t>(inputs, dims),
                  .results = {dims},
                  .linear = {0},
                  .sizes_arg = sizes_arg,
                  .empty = false});
}

/// The rule of qr(A, mode). There is none for mode "r", which omits one result.
std::optional<ShardingRule> qr_rule(const OpCall& call) {
  const auto* mode = call.args.size() > 1 ? std::get_if<std::string>(&call.args[1]) : nullptr;
  if (!mode || *mode == "r") {
    return std::nullopt;
  }
  return batched_rule(call, {{2}, {2, 2}});
}

/// The rule of _linalg_solve_ex(A, B, left, check) -> result, LU, pivots, info. B is a batch of
/// vectors if it has the sizes of A without the last size, otherwise a batch of matrices.
std::optional<ShardingRule> solve_rule(const OpCall& call) {
  const Sizes& a = call.tensor(0).sizes;
  const Sizes& b = call.tensor(1).sizes;
  if (a.size() < 2) {
    return std::nullopt;
  }
  // libtorch uses the same criterion to recognise a batch of vectors.
  const bool vectors = b.size() == 1 || b == Sizes(a.begin(), a.end() - 1);
  const std::size_t own = vectors ? 1 : 2;
  return batched_rule(call, {.inputs = {2, own}, .results = {own, 2, 1, 0}});
}

/// The rule of diag_embed(self, offset, dim1, dim2). The last dimension of self becomes two
/// dimensions of the result.
std::optional<ShardingRule> diag_embed_rule(const OpCall& call) {
  const int ndim = call.tensor(0).ndim() + 1;
  if (ndim < 2) {
    return std::nullopt;
  }
  const int first = wrap_dim(call, call.integer_or(2, -2), ndim);
  const int second = wrap_dim(call, call.integer_or(3, -1), ndim);
  UnaryRule embedded(call);
  TensorFactors factors = embedded.input;
  keep_unsharded(embedded.rule, factors.back());
  const std::int64_t offset = call.integer_or(1, 0);
  const std::int64_t size = call.tensor(0).sizes.back() + (offset < 0 ? -offset : offset);
  factors.pop_back();
  for (const int dim : {std::min(first, second), std::max(first, second)}) {
    factors.insert(factors.begin() + dim, Factors{add_unsharded(embedded.rule, size)});
  }
  return std::move(embedded).linear(factors);
}

/// The rule of a Fourier transform (self, dims, ...): linear, and independent along all dimensions
/// except `dims`. The size of the last of `dims` changes if the input or result is real.
std::optional<ShardingRule> fourier_rule(const OpCall& call) {
  UnaryRule fourier(call);
  TensorFactors factors = fourier.input;
  // Not every kernel of a Fourier transform accepts an empty batch.
  forbid_empty_shards(fourier.rule);
  for (std::int64_t dim : call.integers(1)) {
    Factors& along =
        factors.at(static_cast<std::size_t>(wrap_dim(call, dim, call.tensor(0).ndim())));
    keep_unsharded(fourier.rule, along);
    along = {add_unsharded(fourier.rule, kUnknown)};
  }
  return std::move(fourier).linear(factors);
}

/// The rule of constant_pad_nd(self, pad, value). `pad` lists pairs, from the last dimension on.
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

/// The rule of cdist(x1 (..., p, m), x2 (..., r, m)), the distances between all pairs of rows.
std::optional<ShardingRule> cdist_rule(const OpCall& call) {
  std::optional<ShardingRule> rule = batched_rule(call, {{2, 2}, {2}});
  if (!rule) {
    return rule;
  }
  TensorFactors& result = rule->outputs[0];
  for (std::size_t i = 0; i < 2; ++i) {
    const TensorMeta& x = call.tensor(i);
    const Factors rows{add_factor(*rule, x.size(x.ndim() - 2))};
    input_of(*rule, call.tensor_index(i))[x.sizes.size() - 2] = rows;
    result[result.size() - 2 + i] = rows;
  }
  return rule;
}

/// The rule of cross(self, other, dim).
std::optional<ShardingRule> cross_rule(const OpCall& call) {
  ShardingRule rule = start(call);
  const auto result = add_broadcast(rule, call, {0, 1});
  if (!result || call.tensor(0).ndim() != call.tensor(1).ndim() || result->empty()) {
    return std::nullopt;
  }
  const int dim = wrap_dim(call, call.integer_or(2, -1), call.tensor(0).ndim());
  keep_unsharded(rule, (*result)[static_cast<std::size_t>(dim)]);
  rule.outputs.push_back(*result);
  add_linear(rule, {0});
  add_linear(rule, {1});
  return rule;
}

}  // namespace

Table batched_table() {
  const auto matrix = [](const std::vector<std::size_t>& results) {
    return on_last({{2}, results});
  };
  return {
      "last dimensions",
      {
          // Linear algebra and Fourier transforms. A factorisation may throw for one matrix of the
          // batch; all ranks then throw together (docs/design.md).
          {"linalg_inv_ex linalg_cholesky_ex", matrix({2, 0})},
          {"_linalg_det", matrix({0, 2, 1})},
          {"_linalg_slogdet", matrix({0, 0, 2, 1})},
          {"linalg_lu_factor_ex linalg_ldl_factor_ex", matrix({2, 1, 0})},
          {"linalg_lu", matrix({2, 2, 2})},
          {"_linalg_solve_ex", solve_rule},
          {"diag_embed", diag_embed_rule},
          {"linalg_eig", matrix({1, 2})},
          {"linalg_eigvals _linalg_eigvals", matrix({1})},
          {"linalg_matrix_exp cholesky_inverse", matrix({2})},
          {"linalg_qr", qr_rule},
          {"_linalg_eigh", on_last_if(2, {{2}, {1, 2}}, 0)},
          {"_linalg_svd", on_last_if(2, {{2}, {2, 1, 2}}, 1)},
          {"linalg_solve_triangular", on_last({.inputs = {2, 2}, .results = {2}, .linear = {1}})},
          {"cholesky_solve", on_last({.inputs = {2, 2}, .results = {2}, .linear = {0}})},
          {"triangular_solve", on_last({{2, 2}, {2, 2}})},
          {"linalg_lu_solve", on_last({.inputs = {2, 1, 2}, .results = {2}, .linear = {2}})},
          {"linalg_householder_product", on_last({{2, 1}, {2}})},
          {"linalg_cross", cross_rule},
          {"_cdist_forward", cdist_rule},
          {"_fft_c2c _fft_r2c _fft_c2r", fourier_rule},
          // Pooling. Averages are linear. Maxima come with indices, for which no reduction is
          // correct.
          {"{avg_pool2d,adaptive_avg_pool2d,_adaptive_avg_pool2d}", in_space(2)},
          {"{avg_pool3d,adaptive_avg_pool3d,_adaptive_avg_pool3d}", in_space(3)},
          {"{avg_pool2d,_adaptive_avg_pool2d}_backward", in_space(2, 2)},
          {"{avg_pool3d,_adaptive_avg_pool3d}_backward", in_space(3, 2)},
          {"max_pool2d_with_indices adaptive_max_pool2d",
           on_last({.inputs = {2}, .results = {2, 2}, .empty = false})},
          {"max_pool3d_with_indices adaptive_max_pool3d",
           on_last({.inputs = {3}, .results = {3, 3}, .empty = false})},
          {"{max_pool2d_with_indices,adaptive_max_pool2d}_backward", in_space(2, 3)},
          {"{max_pool3d_with_indices,adaptive_max_pool3d}_backward", in_space(3, 3)},
          // Resampling and padding operators.
          {"upsample_{nearest1d,linear1d} _upsample_nearest_exact1d reflection_pad1d "
           "replication_pad1d",
           in_space(1)},
          {"upsample_{nearest2d,bilinear2d,bicubic2d} reflection_pad2d replication_pad2d "
           "_upsample_{nearest_exact2d,bilinear2d_aa,bicubic2d_aa}",
           in_space(2)},
          {"upsample_{nearest3d,trilinear3d} _upsample_nearest_exact3d reflection_pad3d "
           "replication_pad3d",
           in_space(3)},
          {"{upsample_nearest1d,upsample_linear1d,_upsample_nearest_exact1d}_backward",
           in_space(1, 1, 2)},
          {"{upsample_nearest2d,upsample_bilinear2d,upsample_bicubic2d}_backward "
           "_upsample_{nearest_exact2d,bilinear2d_aa,bicubic2d_aa}_backward",
           in_space(2, 1, 2)},
          {"{upsample_nearest3d,upsample_trilinear3d,_upsample_nearest_exact3d}_backward",
           in_space(3, 1, 2)},
          {"{reflection_pad1d,replication_pad1d}_backward", in_space(1, 2)},
          {"{reflection_pad2d,replication_pad2d}_backward", in_space(2, 2)},
          {"{reflection_pad3d,replication_pad3d}_backward", in_space(3, 2)},
          {"constant_pad_nd", constant_pad_rule, true},
          {"pixel_shuffle pixel_unshuffle channel_shuffle", in_space(3)},
          {"grid_sampler_2d", on_last({.inputs = {3, 3}, .results = {3}, .empty = false})},
          {"grid_sampler_3d", on_last({.inputs = {4, 4}, .results = {4}, .empty = false})},
      }};
}

}  // namespace tessera::rules
