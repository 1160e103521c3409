// Scaled dot product attention, by the kernels that libtorch chooses from. Batch and heads may be
// sharded (tensor parallelism shards heads), and queries where no causal mask counts them. Keys
// stay whole: to shard them needs a running softmax across ranks (ring attention).
#include <cstddef>
#include <optional>

#include "rules/rule_builder.h"
#include "rules/rule_table.h"

namespace tessera::rules {
namespace {

/// The factors of scaled dot product attention: query (batch, heads, queries, width), key and value
/// (batch, kv heads, keys, width). With fewer kv heads than heads (grouped-query attention, Ainslie
/// et al. 2023) head i reads kv head i / group. The heads then are the two factors (kv heads,
/// group), so that sharding kv heads shards query, key and value alike.
struct AttentionFactors {
  TensorFactors query, key, value, result;
  Factors batch, heads, queries, keys;

  // No rule for shapes that the kernels would refuse or broadcast in their own way.
  static std::optional<AttentionFactors> add(ShardingRule& rule, const TensorMeta& q,
                                             const TensorMeta& k, const TensorMeta& v,
                                             bool split_queries) {
    if (q.ndim() != 4 || k.ndim() != 4 || v.ndim() != 4) {
      return std::nullopt;
    }
    // Heads must group evenly: head i reads kv head i / group on every rank only then.
    const std::int64_t kv_heads = k.size(1);
    if (v.size(1) != kv_heads || kv_heads == 0 || q.size(1) % kv_heads != 0 ||
        q.size(0) != k.size(0) || q.size(0) != v.size(0)) {
      return std::nullopt;
    }
    // In a backward, a gradient that lacks one of these (of key, value or bias) is a sum over it.
    // The kernels divide by each of these sizes: no shard may be empty.
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

  /// The factors of a mask or bias that broadcasts to (batch, heads, queries, keys).
  /// Aligned at the last dimension, as broadcasting is. A dimension of size 1 has no factor and is
  /// replicated.
  TensorFactors bias(const ShardingRule& rule, const TensorMeta& tensor) const {
    const TensorFactors scores{batch, heads, queries, keys};
    TensorFactors result(tensor.sizes.size());
    for (std::size_t i = 0; i < result.size() && i < scores.size(); ++i) {
      const std::size_t dim = result.size() - 1 - i;
      const Factors& factors = scores[scores.size() - 1 - i];
      if (tensor.sizes[dim] == size_of(rule, factors)) {
        result[dim] = factors;
      }
    }
    return result;
  }
};

/// Where a kernel has its arguments, and the shape of its log-sum-exp.
struct Kernel {
  enum Statistics { kRows, kRowsAndOne, kPaddedRows };
  int bias = -1;
  int dropout = 3;
  int causal = 4;
  int debug = -1;  ///< flag that asks for the dropout mask, which this rule does not describe
  Statistics statistics = kRows;
  int asks_statistics = -1;       ///< flag; without it the log-sum-exp is (batch, heads, 0)
  std::size_t other_outputs = 0;  ///< replicated ones: seeds, offsets, empty tensors
};

/// The factors of the log-sum-exp: (batch, heads, queries), with a last 1, or with queries padded
/// to 32s. The backward kernel reads it as the forward left it, padding included.
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

/// A causal mask starts at query 0 of the local tensor, so queries can be sharded only without one.
bool splits_queries(const OpCall& call, const Kernel& kernel) {
  return kernel.statistics != Kernel::kPaddedRows && !is_set(call, kernel.causal);
}

/// A dropout of 0 draws nothing, so that the call is not random.
bool drops(const OpCall& call, const Kernel& kernel) {
  const auto arg = static_cast<std::size_t>(kernel.dropout);
  return !call.is_none(arg) && call.number(arg) != 0;
}

/// kernel(query, key, value, ...) -> result, log-sum-exp, others.
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
    if (kernel.bias >= 0 && call.has_tensor(static_cast<std::size_t>(kernel.bias))) {
      const int bias = call.tensor_index(static_cast<std::size_t>(kernel.bias));
      input_of(rule, bias) = f->bias(rule, meta_of(call, bias));
    }
    rule.outputs = {f->result, statistics_factors(rule, *f, kernel, call.tensor(0).size(2))};
    if (kernel.asks_statistics >= 0 && !is_set(call, kernel.asks_statistics)) {
      rule.outputs[1].back() = {add_unsharded(rule, 0)};
    }
    rule.outputs.resize(rule.outputs.size() + kernel.other_outputs);
    rule.random = drops(call, kernel);
    // Seeds and offsets, the other outputs, are in no group: they are replicated.
    rule.groups = {group_of_inputs(call, {0, 1})};
    return rule;
  };
}

/// Where a backward has its tensors; the first four are (grad, query, key, value).
struct Backward {
  Kernel kernel;
  int result = 4;
  int statistics = 5;
  bool bias_gradient = false;
};

/// kernel_backward(grad, query, key, value, ...) -> gradients of query, key, value (and bias).
/// Linear in the gradient.
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
    if (backward.bias_gradient) {
      rule.outputs.emplace_back();
    }
    if (kernel.bias >= 0 && call.has_tensor(static_cast<std::size_t>(kernel.bias))) {
      const int bias = call.tensor_index(static_cast<std::size_t>(kernel.bias));
      input_of(rule, bias) = f->bias(rule, meta_of(call, bias));
      if (backward.bias_gradient) {
        rule.outputs.back() = input_of(rule, bias);
      }
    }
    add_linear(rule, {call.tensor_index(0)});
    rule.random = drops(call, kernel);
    return rule;
  };
}

}  // namespace

/// Positions of arguments are those of native_functions.yaml. All rows read numbers: the dropout's
/// probability decides whether a call is random.
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
