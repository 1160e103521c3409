#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

#include "rules/rule_table.h"

namespace tessera::rules {

// The rules of operators that make a new tensor like an input tensor. The result gets the input's
// layout. Nothing is sent, because the input's values are not read.

namespace {

/// The rule of zeros_like and similar operators, which do not read the values of their input.
std::optional<ShardingRule> like_rule(const OpCall& call) {
  ShardingRule rule = unchanged(call);
  rule.unread.push_back(call.tensor_index(0));
  return rule;
}

/// The rule of new_zeros(self, size, ...). A dimension with the same size as in self is sharded as
/// in self, because gradient formulas copy a gradient of self into the zeros.
std::optional<ShardingRule> new_rule(const OpCall& call) {
  const Sizes sizes = call.integers(1);
  const Sizes& own = call.tensor(0).sizes;
  const int self = call.tensor_index(0);
  ShardingRule rule = start(call);
  TensorFactors result;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    const bool follows = sizes.size() == own.size() && sizes[dim] == own[dim];
    result.push_back({follows ? add_factor(rule, sizes[dim]) : add_unsharded(rule, sizes[dim])});
    if (follows) {
      input_of(rule, self)[dim] = result[dim];
    }
  }
  rule.outputs.push_back(result);
  rule.unread.push_back(self);
  rule.size_arguments.push_back({1, 0});
  return rule;
}

/// The rule of new_empty_strided. The caller passes global strides; the local result is contiguous.
std::optional<ShardingRule> new_strided_rule(const OpCall& call) {
  std::optional<ShardingRule> rule = new_rule(call);
  ShardingRule::LocalCall local{"aten::new_empty", call.args};
  local.args.erase(local.args.begin() + 2);
  rule->local_call = local;
  return rule;
}

/// Returns the rule of an operator whose tensors broadcast. `linear` says which Partial tensors
/// give a Partial result, in the notation of add_linear_terms().
std::optional<ShardingRule> pointwise_rule(const OpCall& call, std::string_view linear,
                                           std::size_t outputs) {
  const std::vector<int> tensors = tensor_arguments(call);
  ShardingRule rule = start(call);
  std::optional<TensorFactors> result = add_broadcast(rule, call, tensors);
  if (!result || tensors.empty()) {
    return std::nullopt;
  }
  rule.outputs.assign(outputs, *result);
  add_linear_terms(rule, linear, tensors);
  return rule;
}

/// Returns the rule of a pointwise random operator, whose tensors must not be Partial. `reads`:
/// whether the operator reads the values of its tensors.
RuleFunction::Body draw(std::size_t outputs, bool reads) {
  return [=](const OpCall& call) {
    std::optional<ShardingRule> rule = pointwise_rule(call, "", outputs);
    if (rule && !reads) {
      rule->unread.push_back(tensor_arguments(call).front());
    }
    if (rule) {
      rule->random = true;
    }
    return rule;
  };
}

}  // namespace

Table creation_table() {
  return {"creation",
          {
              {"{empty,zeros,ones,full}_like", like_rule},
              {"new_{empty,zeros,ones,full}", new_rule},
              {"new_empty_strided", new_strided_rule},
          }};
}

Table random_table() {
  return {
      "random",
      {
          {"native_dropout", draw(2, true)},
          {"normal_functional {rand,randn}_like bernoulli_.float normal_ uniform_", draw(1, false)},
      }};
}

// Rules of pointwise operators, which permit all shardings. Rows declare which Partial inputs give
// a Partial result (see add_linear_terms()). A wrong declaration gives wrong numbers; a missing
// declaration costs an all-reduce.

namespace {

RuleFunction::Body pointwise(std::string_view linear = "", std::size_t outputs = 1) {
  return [=](const OpCall& call) { return pointwise_rule(call, linear, outputs); };
}

/// The rule of masked_fill with a constant. Filling with 0 commutes with every reduction, another
/// constant only with average, maximum and minimum: a sum would add the constant once for each
/// rank.
std::optional<ShardingRule> masked_fill_scalar(const OpCall& call) {
  const bool zero = !call.is_none(2) && call.number(2) == 0;
  return pointwise_rule(call, zero ? "0*" : "0~ 0<", 1);
}

/// Returns the rule of an operator that overwrites its first tensor in place without reading it.
/// The tensor keeps its layout.
RuleFunction::Body overwrite(std::string_view linear) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    std::optional<ShardingRule> rule = pointwise_rule(call, linear, 1);
    if (rule) {
      rule->unread.push_back(call.tensor_index(0));
    }
    return rule;
  };
}

/// The rule of a cast. A Partial sum remains Partial if no term is rounded (floating-point, not
/// narrower). A Partial maximum or minimum remains Partial if the cast preserves the order of
/// numbers.
std::optional<ShardingRule> to_copy(const OpCall& call) {
  if (call.is_none(1)) {
    return pointwise_rule(call, "0*", 1);
  }
  using Kind = DType::Kind;
  const DType& type = call.dtype(1);
  const bool continuous = type.kind == Kind::kFloating || type.kind == Kind::kComplex;
  const bool widens = continuous && type.itemsize >= call.tensor(0).itemsize;
  const bool ordered = type.kind == Kind::kSigned || type.kind == Kind::kFloating;
  return pointwise_rule(call, widens ? (ordered ? "0 0<" : "0") : (ordered ? "0<" : ""), 1);
}

}  // namespace

Table pointwise_table() {
  return {
      "pointwise",
      {
          // Linear operators: Partial sums and averages remain Partial.
          {"add{.Tensor,.out,_.Tensor} sub{.Tensor,.out,_.Tensor} "
           "lerp{.Scalar,.Scalar_out,.Tensor,.Tensor_out,_.Scalar,_.Tensor} addcdiv{,.out,_} "
           "complex rsub.Tensor",
           pointwise("01")},
          {"mul{.Tensor,.out,_.Tensor}", pointwise("0 1")},
          {"conj_physical{,.out,_} div{.Scalar,.Tensor,.out,_.Scalar,_.Tensor} true_divide.Tensor "
           "mul{.Scalar,_.Scalar} rad2deg{,.out,_} deg2rad{,.out,_} neg{,.out,_} gelu_backward "
           "silu_backward threshold_backward sigmoid_backward logit_backward tanh_backward "
           "leaky_relu_backward elu_backward hardtanh_backward hardswish_backward "
           "hardsigmoid_backward softplus_backward softshrink_backward hardshrink_backward "
           "mish_backward native_dropout_backward resolve_conj resolve_neg _conj _neg_view",
           pointwise("0")},
          {"addcmul{,.out,_}", pointwise("01 02")},
          // Affine operators (averages remain Partial), monotone operators (maxima and minima
          // remain Partial), and operators that select elements (all reductions remain Partial).
          {"add{.Scalar,_.Scalar} sub{.Scalar,_.Scalar}", pointwise("0~ 0<")},
          {"rsub.Scalar", pointwise("0~")},
          {"asinh{,.out,_} atan{,.out,_} ceil{,.out,_} clamp{,.out,_} clamp_max{,.out,_} "
           "clamp_min{,.out,_} clip{,.out,_} erf{,.out,_} exp{,.out,_} exp2{,.out,_} "
           "expm1{,.out,_} floor{,.out,_} round{,.decimals,.decimals_out,.out,_,_.decimals} "
           "relu{,_} relu6{,_} selu{,_} sigmoid{,.out,_} sinh{,.out,_} tanh{,.out,_} "
           "trunc{,.out,_} hardsigmoid{,.out,_} hardtanh{,.out,_}",
           pointwise("0<")},
          {"maximum{,.out} max{.other,.out}", pointwise("01^")},
          {"minimum{,.out} min{.other,.out}", pointwise("01v")},
          {"where{.self,.self_out}", pointwise("12*")},
          {"masked_fill{.Tensor,_.Tensor}", pointwise("02*")},
          {"masked_fill{.Scalar,_.Scalar}", masked_fill_scalar, true},
          // Operators that copy a tensor, and operators that fill a tensor with a constant.
          {"positive clone detach{,_,_copy} alias{,_copy} lift lift_fresh{,_copy} contiguous "
           "_pin_memory",
           pointwise("0*")},
          {"_to_copy", to_copy},
          {"copy_", overwrite("1*")},
          {"fill_.Tensor", overwrite("1*")},
          {"fill_.Scalar", overwrite("0~ 0<")},
          {"zero_", overwrite("0*")},
          // Pointwise operators whose results are never Partial.
          {"abs{,.out,_} angle{,.out} sgn{,.out,_} acos{,.out,_} acosh{,.out,_} atanh{,.out,_} "
           "asin{,.out,_} cos{,.out,_} cosh{,.out,_} erfc{,.out,_} erfinv{,.out,_} frac{,.out,_} "
           "log{,.out,_} log10{,.out,_} log1p{,.out,_} log2{,.out,_} reciprocal{,.out,_} "
           "rsqrt{,.out,_} sin{,.out,_} sinc{,.out,_} sqrt{,.out,_} square{,.out,_} tan{,.out,_} "
           "digamma{,.out,_} lgamma{,.out,_} polygamma{,.out,_} mvlgamma{,.out,_} i0{,.out,_} "
           "sign{,.out,_} signbit{,.out} nan_to_num{,.out,_} isnan isfinite isinf isposinf{,.out} "
           "isneginf{,.out} _conj_physical",
           pointwise()},
          {"gelu{,.out,_} hardshrink{,.out} celu{,_} silu{,.out,_} mish{,.out,_} logit{,.out,_} "
           "threshold{,.out,_} elu{,.out,_} softshrink{,.out} leaky_relu{,.out,_} "
           "hardswish{,.out,_} softplus{,.out} _prelu_kernel rrelu_with_noise_backward",
           pointwise()},
          {"{clamp,clamp_min,clamp_max}{,_}.Tensor {clamp,clamp_min,clamp_max}.Tensor_out "
           "clip.Tensor clip_.Tensor gcd{,.out,_} lcm{,.out,_} logaddexp{,.out} logaddexp2{,.out} "
           "atan2{,.out,_} hypot{,.out,_} igamma{,.out,_} igammac{,.out,_} nextafter{,.out,_} "
           "heaviside{,.out,_} fmin{,.out} fmax{,.out} polar ldexp.Tensor ldexp.out ldexp_",
           pointwise()},
          {"copysign.{Scalar,Tensor,Scalar_out,out} copysign_.{Scalar,Tensor} "
           "div{,_}.{Scalar_mode,Tensor_mode} xlogy.{Tensor,Scalar_Self,Scalar_Other} "
           "xlogy_.{Tensor,Scalar_Other} floor_divide{,.Scalar,.out} floor_divide_.{Scalar,Tensor} "
           "{fmod,remainder}.{Scalar,Tensor}{,_out} {fmod,remainder}_.{Scalar,Tensor} "
           "remainder.Scalar_Tensor {pow,float_power}_.{Scalar,Tensor} "
           "{pow,float_power}.{Scalar,Tensor_Scalar,Tensor_Tensor}{,_out}",
           pointwise()},
          {"{eq,ne,ge,le,gt,lt}.{Scalar,Tensor}{,_out} {eq,ne,ge,le,gt,lt}_.{Scalar,Tensor}",
           pointwise()},
          {"{bitwise_not,logical_not,logical_xor,logical_and,logical_or}{,.out,_} "
           "bitwise_{and,or,xor}.{Scalar,Tensor}{,_out} bitwise_{and,or,xor}_.{Scalar,Tensor} "
           "bitwise_{and,or,xor}.Scalar_Tensor {__xor__,__lshift__,__rshift__}.{Scalar,Tensor} "
           "bitwise_{left,right}_shift.{Tensor,Tensor_Scalar}{,_out} "
           "bitwise_{left,right}_shift_.{Tensor,Tensor_Scalar} "
           "bitwise_{left,right}_shift.Scalar_Tensor",
           pointwise()},
          // Pointwise operators with two results, and the backwards of such operators.
          {"frexp.Tensor log_sigmoid_forward", pointwise("", 2)},
          {"_prelu_kernel_backward", pointwise("0", 2)},
          {"log_sigmoid_backward", pointwise("0")},
      }};
}

}  // namespace tessera::rules
