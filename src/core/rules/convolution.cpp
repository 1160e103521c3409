#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "rule_builder.h"
#include "rule_table.h"

namespace tessera::rules {
namespace {

/// The factors of a convolution: input (batch, in channels, space...), weight (out channels, in
/// channels, window...), the two swapped where it is transposed, result (batch, out channels,
/// space...). Space and window stay whole; so do channels in several groups.
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
    for (auto& factor : rule.factors) factor.empty = false;
    if (groups != 1) {
      keep_whole(rule, in);
      keep_whole(rule, out);
      weight.assign(2, {});
    }
    if (transposed) std::swap(weight[0], weight[1]);
    input.resize(input_meta.sizes.size());
    weight.resize(weight_meta.sizes.size());
  }
};

/// What libtorch makes of no in channels has sizes of its own.
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
  // The batch is in every result: it is no sum here.
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
  while (factors.result.size() < factors.input.size()) {
    factors.result.push_back({add_whole(rule, ShardingRule::kUnknown)});
  }
  rule.outputs.push_back(factors.result);
  add_linear(rule, with_input);
  add_linear(rule, with_weight);
  return rule;
}

/// convolution_backward(grad, input, weight, bias sizes, stride, padding, dilation, transposed,
/// output padding, groups, mask) -> gradients of input, weight, bias. The bias's is no sum over the
/// in channels, which every shard of them has whole: where it is asked for, they stay whole.
std::optional<ShardingRule> convolution_backward_rule(const OpCall& call) {
  if (call.tensor(1).ndim() != call.tensor(2).ndim() || call.tensor(1).ndim() < 3 ||
      has_no_channels(call.tensor(1))) {
    return std::nullopt;
  }
  ShardingRule rule = start(call);
  const ConvolutionFactors factors(rule, call.tensor(1), call.tensor(2), call.boolean_or(7, false),
                                   call.integer(9));
  const Sizes mask = call.integers(10);
  if (mask.size() != 3 || mask[2] != 0) keep_whole(rule, factors.in);
  TensorFactors grad = factors.result;
  grad.resize(call.tensor(0).sizes.size());
  input_of(rule, call.tensor_index(0)) = grad;
  input_of(rule, call.tensor_index(1)) = factors.input;
  input_of(rule, call.tensor_index(2)) = factors.weight;
  for (std::size_t i : {1, 2}) {
    TensorFactors& output = rule.outputs.emplace_back(i == 1 ? factors.input : factors.weight);
    for (std::size_t dim = 0; dim < output.size(); ++dim) {
      if (output[dim].empty()) output[dim] = {add_whole(rule, call.tensor(i).sizes[dim])};
    }
  }
  rule.outputs.push_back({factors.out});
  if (!call.is_none(3) && !call.integers(3).empty()) rule.size_arguments.push_back({3, 2});
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
