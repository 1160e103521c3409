// Convolutions: data parallel over the batch, tensor parallel over channels.
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "rules/rule_builder.h"
#include "rules/rule_table.h"

namespace tessera::rules {
namespace {

/// The factors of a convolution: input (batch, in channels, space...), weight (out channels, in
/// channels, window...), result (batch, out channels, space...). A transposed one has the channels
/// of its weight swapped. Space and window stay unsharded, and so do channels of several groups.
/// (An input sharded in space takes a form: src/dtensor/forms/spatial_convolution.cpp.)
struct ConvolutionFactors {
  Factors batch, in, out;
  TensorFactors input, weight, result;

  ConvolutionFactors(ShardingRule& rule, const TensorMeta& input_meta,
                     const TensorMeta& weight_meta, bool transposed, std::int64_t groups)
      : batch{add_reduced(rule, input_meta.size(0), ReduceOp::kSum)},
        in{add_reduced(rule, input_meta.size(1), ReduceOp::kSum)},
        out{add_reduced(rule, weight_meta.size(transposed ? 1 : 0) * (transposed ? groups : 1),
                        ReduceOp::kSum)},
        input{batch, in},
        weight{out, in},
        result{batch, out} {
    forbid_empty_shards(rule);
    // A group ties blocks of in channels to blocks of out channels; a shard of one would need the
    // fitting shard of the other.
    if (groups != 1) {
      keep_unsharded(rule, in);
      keep_unsharded(rule, out);
      weight.assign(2, {});
    }
    // Its weight is (in, out / groups, window...).
    if (transposed) {
      std::swap(weight[0], weight[1]);
    }
    input.resize(input_meta.sizes.size());
    weight.resize(weight_meta.sizes.size());
  }
};

/// With no in channels libtorch computes other sizes for the result: no rule.
bool has_no_channels(const TensorMeta& input) {
  return input.size(1) == 0;
}

/// convolution(input, weight, bias, stride, padding, dilation, transposed, output padding, groups)
std::optional<ShardingRule> convolution_rule(const OpCall& call) {
  if (call.tensor(0).ndim() != call.tensor(1).ndim() || call.tensor(0).ndim() < 3 ||
      has_no_channels(call.tensor(0))) {
    return std::nullopt;
  }
  const int input = call.tensor_index(0), weight = call.tensor_index(1);
  ShardingRule rule = start(call);
  ConvolutionFactors factors(rule, call.tensor(0), call.tensor(1), call.boolean_or(6, false),
                             call.integer(8));
  // The batch is in the result of the forward: no reduction.
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
  // Sizes in space depend on stride, padding and dilation: the local result has them.
  while (factors.result.size() < factors.input.size()) {
    factors.result.push_back({add_unsharded(rule, ShardingRule::kUnknown)});
  }
  rule.outputs.push_back(factors.result);
  add_linear(rule, with_input);
  add_linear(rule, with_weight);
  return rule;
}

/// convolution_backward(grad, input, weight, bias sizes, stride, padding, dilation, transposed,
/// output padding, groups, mask) -> gradients of input, weight, bias. The bias's gradient lacks the
/// in channels and is no sum over them: each of their shards would compute all of it. Where it is
/// asked for, they stay unsharded.
std::optional<ShardingRule> convolution_backward_rule(const OpCall& call) {
  if (call.tensor(1).ndim() != call.tensor(2).ndim() || call.tensor(1).ndim() < 3 ||
      has_no_channels(call.tensor(1))) {
    return std::nullopt;
  }
  ShardingRule rule = start(call);
  const ConvolutionFactors factors(rule, call.tensor(1), call.tensor(2), call.boolean_or(7, false),
                                   call.integer(9));
  const Sizes mask = call.integers(10);
  // See above: the gradient of the bias is the same for all in channels.
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
      // What has no factor in the forward is whole, and needs its size as an output.
      if (output[dim].empty()) {
        output[dim] = {add_unsharded(rule, call.tensor(i).sizes[dim])};
      }
    }
  }
  rule.outputs.push_back({factors.out});
  // The sizes of the bias, which are local where out channels are sharded.
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

}  // namespace tessera::rules
