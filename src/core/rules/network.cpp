#include <cstddef>
#include <optional>
#include <vector>

#include "rules/rule_table.h"

namespace tessera::rules {

// Rules of layer norm, RMS norm and batch norm. The dimensions over which statistics are computed
// are not sharded: the normalised dimensions, and for batch norm also the samples.

namespace {

/// The factors (einsum index letters) of a layer norm; the normalised dimensions are unsharded. If
/// `reduce` is true, the gradients of weight and bias are sums over the leading dimensions.
struct NormFactors {
  TensorFactors input;
  TensorFactors normalised;  ///< factors (einsum index letters) of the norm's weight and bias
  TensorFactors statistics;  ///< factors of mean and rstd; normalised dimensions have size 1

  NormFactors(ShardingRule& rule, const Sizes& sizes, std::size_t normalised_dims, bool reduce) {
    for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
      const bool leading = dim + normalised_dims < sizes.size();
      const int factor = !leading ? add_unsharded(rule, sizes[dim])
                         : reduce ? add_reduced(rule, sizes[dim], ReduceOp::kSum)
                                  : add_factor(rule, sizes[dim]);
      input.push_back({factor});
      if (!leading) {
        normalised.push_back({factor});
      }
      statistics.push_back(leading ? Factors{factor} : Factors{});
    }
  }
};

/// Returns the rule of a norm (input, normalised shape, parameters...) -> result, statistics.
RuleFunction::Body norm_forward(const std::vector<std::size_t>& parameters,
                                std::size_t statistics) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const std::size_t dims = call.integers(1).size();
    if (dims > call.tensor(0).sizes.size()) {
      return std::nullopt;
    }
    ShardingRule rule = start(call);
    const NormFactors factors(rule, call.tensor(0).sizes, dims, false);
    set_input(rule, call, 0, factors.input);
    for (std::size_t arg : parameters) {
      set_input(rule, call, arg, factors.normalised);
    }
    rule.outputs.push_back(factors.input);
    rule.outputs.insert(rule.outputs.end(), statistics, factors.statistics);
    return rule;
  };
}

/// Returns the rule of a norm's backward (grad, input, normalised shape, statistics..., ...). The
/// parameters' gradients are sums over all shards of the leading dimensions.
RuleFunction::Body norm_backward(const std::vector<std::size_t>& statistics,
                                 const std::vector<std::size_t>& parameters) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const std::size_t dims = call.integers(2).size();
    if (dims > call.tensor(1).sizes.size()) {
      return std::nullopt;
    }
    ShardingRule rule = start(call);
    const NormFactors factors(rule, call.tensor(1).sizes, dims, true);
    set_input(rule, call, 0, factors.input);
    set_input(rule, call, 1, factors.input);
    for (std::size_t arg : statistics) {
      set_input(rule, call, arg, factors.statistics);
    }
    for (std::size_t arg : parameters) {
      set_input(rule, call, arg, factors.normalised);
    }
    rule.outputs.push_back(factors.input);
    rule.outputs.insert(rule.outputs.end(), parameters.size(), factors.normalised);
    add_linear(rule, {call.tensor_index(0)});
    return rule;
  };
}

/// The rule of native_batch_norm(input, weight, bias, running mean, running variance, training,
/// ...) in training: only channels may be sharded, and the running statistics are written.
std::optional<ShardingRule> batch_norm_rule(const OpCall& call) {
  if (call.tensor(0).ndim() < 2 || !call.boolean_or(5, false)) {
    return std::nullopt;
  }
  ShardingRule rule = start(call);
  TensorFactors input;
  for (const std::int64_t size : call.tensor(0).sizes) {
    input.push_back({input.size() == 1 ? add_factor(rule, size) : add_unsharded(rule, size)});
  }
  forbid_empty_shards(rule);
  const TensorFactors channels{input[1]};
  set_input(rule, call, 0, input);
  for (std::size_t arg = 1; arg <= 4; ++arg) {
    set_input(rule, call, arg, channels);
  }
  rule.outputs = {input, channels, channels};
  // The running statistics, which the operator writes, are outputs of the rule after the returned
  // outputs, because the operator's schema does not mark these arguments as written.
  for (std::size_t arg : {3, 4}) {
    if (!call.has_tensor(arg)) {
      continue;
    }
    rule.inplace.push_back({call.tensor_index(arg), static_cast<int>(rule.outputs.size())});
    rule.outputs.push_back(channels);
  }
  return rule;
}

}  // namespace

Table normalisation_table() {
  return {"normalisation",
          {
              {"native_layer_norm", norm_forward({2, 3}, 2)},
              {"native_layer_norm_backward", norm_backward({3, 4}, {5, 6})},
              {"_fused_rms_norm", norm_forward({2}, 1)},
              {"_fused_rms_norm_backward", norm_backward({3}, {4})},
              {"native_batch_norm", batch_norm_rule},
          }};
}

// The sharding rules of convolutions: the batch and the channels may be sharded.

namespace {

/// The factors (einsum index letters) of a convolution's input (batch, in, space), weight (out, in,
/// window) and result (batch, out, space). Space and window are not sharded; channels only without
/// groups.
struct ConvolutionFactors {
  Factors batch, in, out;
  TensorFactors input, weight, result;

  ConvolutionFactors(ShardingRule& rule, const TensorMeta& input_meta,
                     const TensorMeta& weight_meta, std::int64_t groups)
      : batch{add_reduced(rule, input_meta.size(0), ReduceOp::kSum)},
        in{add_reduced(rule, input_meta.size(1), ReduceOp::kSum)},
        out{add_reduced(rule, weight_meta.size(0), ReduceOp::kSum)},
        input{batch, in},
        weight{out, in},
        result{batch, out} {
    forbid_empty_shards(rule);
    // If a convolution has several groups, a shard of the input channels affects only the output
    // channels of the same groups.
    if (groups != 1) {
      keep_unsharded(rule, in);
      keep_unsharded(rule, out);
      weight.assign(2, {});
    }
    input.resize(input_meta.sizes.size());
    weight.resize(weight_meta.sizes.size());
  }
};

/// Whether the convolution has a rule; a transposed convolution has no rule. For 0 input channels
/// the rule would be wrong, because libtorch computes other sizes of the result.
bool is_supported(const TensorMeta& input, const TensorMeta& weight, bool transposed) {
  return !transposed && input.ndim() == weight.ndim() && input.ndim() >= 3 && input.size(1) != 0;
}

/// The rule of convolution(input, weight, bias, stride, padding, dilation, transposed, ...).
std::optional<ShardingRule> convolution_rule(const OpCall& call) {
  if (!is_supported(call.tensor(0), call.tensor(1), call.boolean_or(6, false))) {
    return std::nullopt;
  }
  const int input = call.tensor_index(0), weight = call.tensor_index(1);
  ShardingRule rule = start(call);
  ConvolutionFactors factors(rule, call.tensor(0), call.tensor(1), call.integer(8));
  // Sharding the batch needs no reduction, because the result also has the batch dimension.
  rule.factors[static_cast<std::size_t>(factors.batch[0])].reduction.reset();
  input_of(rule, input) = factors.input;
  input_of(rule, weight) = factors.weight;
  std::vector<int> with_input{input}, with_weight{weight};
  if (call.has_tensor(2)) {
    const int bias = call.tensor_index(2);
    input_of(rule, bias) = {factors.out};
    rule.additive.push_back(bias);
    with_input.push_back(bias);
    with_weight.push_back(bias);
  }
  // Spatial sizes of the result depend on stride, padding and dilation. The rule declares these
  // sizes unknown, so the sizes are read from the local result.
  while (factors.result.size() < factors.input.size()) {
    factors.result.push_back({add_unsharded(rule, ShardingRule::kUnknown)});
  }
  rule.outputs.push_back(factors.result);
  add_linear(rule, with_input);
  add_linear(rule, with_weight);
  return rule;
}

/// The rule of convolution_backward. Input channels are not sharded if the gradient of the bias is
/// requested: each rank would compute the whole gradient, and the sum over ranks would be wrong.
std::optional<ShardingRule> convolution_backward_rule(const OpCall& call) {
  if (!is_supported(call.tensor(1), call.tensor(2), call.boolean_or(7, false))) {
    return std::nullopt;
  }
  ShardingRule rule = start(call);
  const ConvolutionFactors factors(rule, call.tensor(1), call.tensor(2), call.integer(9));
  const Sizes mask = call.integers(10);
  if (mask.size() != 3 || mask[2] != 0) {
    keep_unsharded(rule, factors.in);
  }
  TensorFactors grad = factors.result;
  grad.resize(call.tensor(0).sizes.size());
  input_of(rule, call.tensor_index(0)) = grad;
  input_of(rule, call.tensor_index(1)) = factors.input;
  input_of(rule, call.tensor_index(2)) = factors.weight;
  for (std::size_t i : {1, 2}) {
    TensorFactors& output = rule.outputs.emplace_back(i == 1 ? factors.input : factors.weight);
    for (std::size_t dim = 0; dim < output.size(); ++dim) {
      // An unsharded dimension of the input or weight has no factor (einsum index letter). The same
      // dimension of the gradient needs a factor, because the gradient is an output.
      if (output[dim].empty()) {
        output[dim] = {add_unsharded(rule, call.tensor(i).sizes[dim])};
      }
    }
  }
  rule.outputs.push_back({factors.out});
  // If output channels are sharded, the argument with the sizes of the bias gets local sizes.
  if (!call.is_none(3) && !call.integers(3).empty()) {
    rule.size_arguments.push_back({3, 2});
  }
  add_linear(rule, {call.tensor_index(0)});
  return rule;
}

}  // namespace

Table convolution_table() {
  return {"convolution",
          {
              {"convolution", convolution_rule},
              {"convolution_backward", convolution_backward_rule},
          }};
}

// The sharding rules of embeddings. Columns of the table are sharded like any dimension; sharding
// rows (the vocabulary) gives Partial sums.

namespace {

/// The rule of embedding(weight, indices). If the vocabulary is sharded, each rank returns zeros
/// for rows that it lacks, so the result is Partial(sum), as in Megatron-LM.
std::optional<ShardingRule> embedding_rule(const OpCall& call) {
  const int weight = call.tensor_index(0), indices = call.tensor_index(1);
  if (meta_of(call, weight).ndim() != 2) {
    return std::nullopt;
  }
  const std::int64_t rows = meta_of(call, weight).sizes[0];
  ShardingRule rule = start(call);
  TensorFactors result = add_factors(rule, meta_of(call, indices).sizes);
  input_of(rule, indices) = result;
  result.push_back({add_factor(rule, meta_of(call, weight).sizes[1])});
  const int row = add_reduced(rule, rows, ReduceOp::kSum);
  // A rank's rows must be contiguous, because the local operator gets the rows as one range.
  rule.factors[static_cast<std::size_t>(row)].contiguous = true;
  input_of(rule, weight) = {{row}, result.back()};
  rule.outputs.push_back(result);
  rule.additive = {weight};
  add_any_linear(rule, {weight});
  // embedding_rows runs locally, because at::embedding throws for a row that the rank lacks.
  rule.local_call = {.op = ShardingRule::LocalCall::PartOperator::kEmbeddingRows,
                     .args = {TensorRef{weight}, TensorRef{indices}, std::int64_t{0}, rows},
                     .when_split = {row}};
  rule.offset_arguments = {{.arg = 2, .input = weight, .dim = 0}};
  return rule;
}

/// The rule of embedding_dense_backward. The gradient is a sum over all shards of the indices.
/// Returns nullopt for scale_grad_by_freq, which needs the counts of all indices.
std::optional<ShardingRule> embedding_backward_rule(const OpCall& call) {
  const int grad = call.tensor_index(0), indices = call.tensor_index(1);
  if (meta_of(call, grad).ndim() != meta_of(call, indices).ndim() + 1 ||
      call.boolean_or(4, false)) {
    return std::nullopt;
  }
  ShardingRule rule = start(call);
  for (std::int64_t size : meta_of(call, indices).sizes) {
    const int factor = add_reduced(rule, size, ReduceOp::kSum);
    // Until here only `indices` has factors (einsum index letters), so factor number i belongs to
    // dimension i of `indices`.
    input_of(rule, indices)[rule.factors.size() - 1] = {factor};
  }
  input_of(rule, grad) = input_of(rule, indices);
  input_of(rule, grad).push_back({add_factor(rule, meta_of(call, grad).sizes.back())});
  rule.outputs.push_back({{add_unsharded(rule, call.integer(2))}, input_of(rule, grad).back()});
  add_linear(rule, {grad});
  return rule;
}

}  // namespace

Table embedding_table() {
  return {"embedding",
          {
              {"embedding", embedding_rule},
              {"embedding_dense_backward", embedding_backward_rule},
          }};
}

// The sharding rules of libtorch's kernels for scaled dot product attention. Batch and heads can be
// sharded, queries only without a causal mask. Sharded keys would need a softmax across ranks.

namespace {

/// Properties of an attention kernel: indices of arguments in its schema, and the shape of the
/// log-sum-exp that it returns.
struct Kernel {
  enum Statistics { kRows, kRowsAndOne, kPaddedRows };
  int bias = -1;
  int dropout = 3;
  int causal = 4;
  int debug = -1;  ///< index of the flag that requests the dropout mask; if set, no rule
  Statistics statistics = kRows;
  /// Index of the flag that requests the log-sum-exp. Without the flag, the log-sum-exp is empty.
  int asks_statistics = -1;
  /// Number of replicated outputs after the log-sum-exp: seeds, offsets, empty tensors.
  std::size_t other_outputs = 0;
};

/// The factors (einsum index letters) of attention. In grouped-query attention (Ainslie et al.
/// 2023), query heads are two factors (kv heads, group), so that sharding kv heads shards query,
/// key and value equally.
struct AttentionFactors {
  TensorFactors query, key, value, result;
  Factors batch, heads, queries, keys;

  // Adds the factors (einsum index letters) to a rule. Returns nullopt for shapes that the kernels
  // reject, or broadcast in a special way.
  static std::optional<AttentionFactors> add(ShardingRule& rule, const TensorMeta& q,
                                             const TensorMeta& k, const TensorMeta& v,
                                             bool split_queries) {
    if (q.ndim() != 4 || k.ndim() != 4 || v.ndim() != 4) {
      return std::nullopt;
    }
    const std::int64_t kv_heads = k.size(1);
    if (v.size(1) != kv_heads || kv_heads == 0 || q.size(1) % kv_heads != 0 ||
        q.size(0) != k.size(0) || q.size(0) != v.size(0)) {
      return std::nullopt;
    }
    // Each gradient is a sum over the dimensions that the gradient lacks. The kernels divide by the
    // sizes of these dimensions, so no shard may be empty.
    const auto add_reduced = [](ShardingRule& in, std::int64_t size, ReduceOp op) {
      const int factor = rules::add_reduced(in, size, op);
      in.factors.back().allow_empty = false;
      return factor;
    };
    AttentionFactors f;
    f.batch = {add_reduced(rule, q.size(0), ReduceOp::kSum)};
    const Factors kv{add_reduced(rule, kv_heads, ReduceOp::kSum)};
    f.heads = kv;
    if (q.size(1) != kv_heads) {
      f.heads.push_back(add_reduced(rule, q.size(1) / kv_heads, ReduceOp::kSum));
    }
    f.queries = {split_queries ? add_reduced(rule, q.size(2), ReduceOp::kSum)
                               : add_unsharded(rule, q.size(2))};
    f.keys = {add_unsharded(rule, k.size(2))};
    const Factors width{add_unsharded(rule, q.size(3))},
        value_width{add_unsharded(rule, v.size(3))};
    f.query = {f.batch, f.heads, f.queries, width};
    f.key = {f.batch, kv, f.keys, width};
    f.value = {f.batch, kv, f.keys, value_width};
    f.result = {f.batch, f.heads, f.queries, value_width};
    return f;
  }

  /// Sets the factors of the attention mask or bias, which broadcasts to (batch, heads, queries,
  /// keys), and returns the factors; none if the call has no mask or bias.
  TensorFactors set_bias(ShardingRule& rule, const OpCall& call, const Kernel& kernel) const {
    const auto arg = static_cast<std::size_t>(kernel.bias);
    if (kernel.bias < 0 || !call.has_tensor(arg)) {
      return {};
    }
    return input_of(rule, call.tensor_index(arg)) =
               factors_of_broadcast(rule, call.tensor(arg).sizes, {batch, heads, queries, keys});
  }
};

/// Returns the factors of the log-sum-exp (batch, heads, queries). Some kernels add a last
/// dimension of size 1, or pad queries to a multiple of 32.
TensorFactors statistics_factors(ShardingRule& rule, const AttentionFactors& f,
                                 const Kernel& kernel, std::int64_t queries) {
  TensorFactors result{f.batch, f.heads, f.queries};
  if (kernel.statistics == Kernel::kRowsAndOne) {
    result.emplace_back();
  }
  if (kernel.statistics == Kernel::kPaddedRows) {
    result.back() = {add_unsharded(rule, (queries + 31) / 32 * 32)};
  }
  return result;
}

bool is_set(const OpCall& call, int flag) {
  return flag >= 0 && call.boolean_or(static_cast<std::size_t>(flag), false);
}

/// Whether the queries can be sharded. A causal mask forbids sharding, because the kernel would use
/// the first local query as query 0 of the whole sequence.
bool splits_queries(const OpCall& call, const Kernel& kernel) {
  return kernel.statistics != Kernel::kPaddedRows && !is_set(call, kernel.causal);
}

/// Whether the attention call has dropout. With probability 0 the call draws no random numbers.
bool drops(const OpCall& call, const Kernel& kernel) {
  const auto arg = static_cast<std::size_t>(kernel.dropout);
  return !call.is_none(arg) && call.number(arg) != 0;
}

/// Returns the rule of an attention kernel (query, key, value, ...) -> result, log-sum-exp, ....
RuleFunction::Body attention(Kernel kernel) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    ShardingRule rule = start(call);
    const auto f = AttentionFactors::add(rule, call.tensor(0), call.tensor(1), call.tensor(2),
                                         splits_queries(call, kernel));
    if (!f || is_set(call, kernel.debug)) {
      return std::nullopt;
    }
    input_of(rule, call.tensor_index(0)) = f->query;
    input_of(rule, call.tensor_index(1)) = f->key;
    input_of(rule, call.tensor_index(2)) = f->value;
    f->set_bias(rule, call, kernel);
    rule.outputs = {f->result, statistics_factors(rule, *f, kernel, call.tensor(0).size(2))};
    if (kernel.asks_statistics >= 0 && !is_set(call, kernel.asks_statistics)) {
      rule.outputs[1].back() = {add_unsharded(rule, 0)};
    }
    rule.outputs.resize(rule.outputs.size() + kernel.other_outputs);
    rule.random = drops(call, kernel);
    rule.groups = {group_of_inputs(call, {0, 1})};
    return rule;
  };
}

/// Indices of the tensor arguments of an attention backward. The first four arguments are (grad,
/// query, key, value).
struct Backward {
  Kernel kernel;
  int result = 4;
  int statistics = 5;
  bool bias_gradient = false;
};

/// Returns the rule of an attention backward (grad, query, key, value, ...) -> gradients of query,
/// key, value (and bias).
RuleFunction::Body attention_backward(Backward backward) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    ShardingRule rule = start(call);
    const Kernel& kernel = backward.kernel;
    const auto f = AttentionFactors::add(rule, call.tensor(1), call.tensor(2), call.tensor(3),
                                         splits_queries(call, kernel));
    if (!f) {
      return std::nullopt;
    }
    const auto set = [&](int arg, const TensorFactors& factors) {
      input_of(rule, call.tensor_index(static_cast<std::size_t>(arg))) = factors;
    };
    set(0, f->result);
    set(1, f->query);
    set(2, f->key);
    set(3, f->value);
    set(backward.result, f->result);
    set(backward.statistics, statistics_factors(rule, *f, kernel, call.tensor(1).size(2)));
    rule.outputs = {f->query, f->key, f->value};
    const TensorFactors bias = f->set_bias(rule, call, kernel);
    if (backward.bias_gradient) {
      rule.outputs.push_back(bias);
    }
    add_linear(rule, {call.tensor_index(0)});
    rule.random = drops(call, kernel);
    return rule;
  };
}

}  // namespace

/// Argument indices are as in libtorch's native_functions.yaml. Each Row sets `reads_numbers`,
/// because each rule reads the float argument dropout_p: calls with dropout are random.
Table attention_table() {
  const Kernel cpu{.bias = 5, .dropout = 3, .causal = 4};
  const Kernel flash{.dropout = 3, .causal = 4, .debug = 5, .other_outputs = 5};
  const Kernel efficient{.bias = 3,
                         .dropout = 5,
                         .causal = 6,
                         .statistics = Kernel::kPaddedRows,
                         .asks_statistics = 4,
                         .other_outputs = 2};
  const Kernel cudnn{.bias = 3,
                     .dropout = 5,
                     .causal = 6,
                     .debug = 7,
                     .statistics = Kernel::kRowsAndOne,
                     .other_outputs = 5};
  return {"attention",
          {
              {"_scaled_dot_product_flash_attention_for_cpu", attention(cpu), true},
              {"_scaled_dot_product_flash_attention", attention(flash), true},
              {"_scaled_dot_product_efficient_attention", attention(efficient), true},
              {"_scaled_dot_product_cudnn_attention", attention(cudnn), true},
              {"_scaled_dot_product_flash_attention_for_cpu_backward",
               attention_backward({.kernel = {.bias = 8, .dropout = 6, .causal = 7}}), true},
              {"_scaled_dot_product_flash_attention_backward",
               attention_backward({.kernel = {.dropout = 10, .causal = 11}}), true},
              {"_scaled_dot_product_efficient_attention_backward",
               attention_backward(
                   {.kernel =
                        {.bias = 4, .dropout = 9, .causal = 11, .statistics = Kernel::kPaddedRows},
                    .result = 5,
                    .statistics = 6,
                    .bias_gradient = true}),
               true},
              {"_scaled_dot_product_cudnn_attention_backward",
               attention_backward({.kernel = {.bias = 8,
                                              .dropout = 13,
                                              .causal = 14,
                                              .statistics = Kernel::kRowsAndOne}}),
               true},
          }};
}

}  // namespace tessera::rules
