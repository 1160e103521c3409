#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "laws.h"
#include "rule_builder.h"
#include "rule_table.h"

namespace tessera::rules {
namespace {

std::optional<ShardingRule> pointwise_rule(const OpCall& call, std::string_view laws,
                                           std::size_t outputs) {
  const std::vector<int> tensors = tensor_arguments(call);
  ShardingRule rule = start(call);
  std::optional<TensorFactors> result = add_broadcast(rule, call, tensors);
  if (!result || tensors.empty()) return std::nullopt;
  rule.outputs.assign(outputs, *result);
  add_laws(rule, laws, tensors);
  return rule;
}

RuleFunction::Body pointwise(std::string_view laws = "", std::size_t outputs = 1) {
  return [=](const OpCall& call) { return pointwise_rule(call, laws, outputs); };
}

/// A constant is written where the mask says: a sum keeps it only if it is 0.
std::optional<ShardingRule> masked_fill_scalar(const OpCall& call) {
  const bool zero = !call.is_none(2) && call.number(2) == 0;
  return pointwise_rule(call, zero ? "0*" : "0~ 0<", 1);
}

/// The first tensor is overwritten, not read.
RuleFunction::Body overwrite(std::string_view laws) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    std::optional<ShardingRule> rule = pointwise_rule(call, laws, 1);
    if (rule) rule->unread.push_back(call.tensor_index(0));
    return rule;
  };
}

/// Numbers of libtorch's scalar types (c10::ScalarType).
enum ScalarType {
  kChar = 1,
  kLong = 4,
  kHalf = 5,
  kDouble = 7,
  kComplexDouble = 10,
  kBFloat16 = 15
};

bool is_floating(std::int64_t type) {
  return (type >= kHalf && type <= kComplexDouble) || type == kBFloat16;
}

std::int64_t itemsize_of(std::int64_t type) {
  constexpr std::int64_t kItemsize[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16};
  return type <= kComplexDouble ? kItemsize[type] : 2;
}

/// A cast: a sum is kept by a floating type that is no narrower (so that the rounding is that of
/// the reduced value), an order by every ordered type; none by bool and unsigned ones.
std::optional<ShardingRule> to_copy(const OpCall& call) {
  if (call.is_none(1)) return pointwise_rule(call, "0*", 1);
  const std::int64_t type = call.integer(1);
  const bool widens = is_floating(type) && itemsize_of(type) >= call.tensor(0).itemsize;
  const bool ordered = (type >= kChar && type <= kDouble) || type == kBFloat16;
  return pointwise_rule(call, widens ? (ordered ? "0 0<" : "0") : (ordered ? "0<" : ""), 1);
}

}  // namespace

Table pointwise_table() {
  return {
      "pointwise",
      {
          // Linear
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
          // Affine, monotone, selecting
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
          // Copies and constants
          {"positive clone detach{,_,_copy} alias{,_copy} lift lift_fresh{,_copy} contiguous "
           "_pin_memory",
           pointwise("0*")},
          {"_to_copy", to_copy},
          {"copy_", overwrite("1*")},
          {"fill_.Tensor", overwrite("1*")},
          {"fill_.Scalar", overwrite("0~ 0<")},
          {"zero_", overwrite("0*")},
          // Neither
          {"abs{,.out} angle{,.out} sgn{,.out,_} acos{,.out,_} acosh{,.out,_} atanh{,.out,_} "
           "asin{,.out,_} copysign{.Scalar,.Scalar_out,.Tensor,.out,_.Scalar,_.Tensor} "
           "clamp{.Tensor,.Tensor_out,_.Tensor} clamp_max{.Tensor,.Tensor_out,_.Tensor} "
           "clamp_min{.Tensor,.Tensor_out,_.Tensor} clip{.Tensor,_.Tensor} cos{,.out,_} "
           "cosh{,.out,_} div{.Scalar_mode,.Tensor_mode,.out_mode,_.Scalar_mode,_.Tensor_mode} "
           "erfc{,.out,_} frac{,.out,_} gcd{,.out,_} lcm{,.out,_} isnan nan_to_num{,.out,_} "
           "ldexp{.Tensor,.out,_} log{,.out,_} log10{,.out,_} log1p{,.out,_} log2{,.out,_} "
           "logaddexp{,.out} logaddexp2{,.out} "
           "xlogy{.OutScalar_Other,.OutScalar_Self,.OutTensor,.Scalar_Other,.Scalar_Self,.Tensor,_."
           "Scalar_Other,_.Tensor} "
           "mvlgamma{,.out,_} reciprocal{,.out,_} gelu{,.out,_} hardshrink{,.out} rsqrt{,.out,_} "
           "celu{,_} silu{,.out,_} mish{,.out,_} logit{,.out,_} sin{,.out,_} sinc{,.out,_} "
           "sqrt{,.out,_} square{,.out,_} tan{,.out,_} threshold{,.out,_} heaviside{,.out,_} "
           "digamma{,.out,_} lgamma{,.out,_} polygamma{,.out,_} erfinv{,.out,_} i0{,.out,_} "
           "sign{,.out,_} signbit{,.out} atan2{,.out,_} "
           "fmod{.Scalar,.Scalar_out,.Tensor,.Tensor_out,_.Scalar,_.Tensor} hypot{,.out,_} "
           "igamma{,.out,_} igammac{,.out,_} nextafter{,.out,_} "
           "remainder{.Scalar,.Scalar_Tensor,.Scalar_out,.Tensor,.Tensor_out,_.Scalar,_.Tensor} "
           "fmin{,.out} fmax{,.out} "
           "pow{.Scalar,.Scalar_out,.Tensor_Scalar,.Tensor_Scalar_out,.Tensor_Tensor,.Tensor_"
           "Tensor_out,_.Scalar,_.Tensor} "
           "float_power{.Scalar,.Scalar_out,.Tensor_Scalar,.Tensor_Scalar_out,.Tensor_Tensor,."
           "Tensor_Tensor_out,_.Scalar,_.Tensor} "
           "elu{,.out,_} softshrink{,.out} isfinite isinf isposinf{,.out} isneginf{,.out} "
           "leaky_relu{,.out,_} hardswish{,.out,_} _prelu_kernel polar "
           "floor_divide{,.Scalar,.out,_.Scalar,_.Tensor} rrelu_with_noise_backward "
           "_conj_physical softplus{,.out}",
           pointwise()},
          {"ne{.Scalar,.Scalar_out,.Tensor,.Tensor_out,_.Scalar,_.Tensor} "
           "eq{.Scalar,.Scalar_out,.Tensor,.Tensor_out,_.Scalar,_.Tensor} "
           "ge{.Scalar,.Scalar_out,.Tensor,.Tensor_out,_.Scalar,_.Tensor} "
           "le{.Scalar,.Scalar_out,.Tensor,.Tensor_out,_.Scalar,_.Tensor} "
           "gt{.Scalar,.Scalar_out,.Tensor,.Tensor_out,_.Scalar,_.Tensor} "
           "lt{.Scalar,.Scalar_out,.Tensor,.Tensor_out,_.Scalar,_.Tensor}",
           pointwise()},
          {"bitwise_not{,.out,_} logical_not{,.out,_} logical_xor{,.out,_} logical_and{,.out,_} "
           "logical_or{,.out,_} __xor__{.Scalar,.Tensor} __lshift__{.Scalar,.Tensor} "
           "bitwise_left_shift{.Scalar_Tensor,.Tensor,.Tensor_Scalar,.Tensor_Scalar_out,.Tensor_"
           "out,_.Tensor,_.Tensor_Scalar} "
           "__rshift__{.Scalar,.Tensor} "
           "bitwise_right_shift{.Scalar_Tensor,.Tensor,.Tensor_Scalar,.Tensor_Scalar_out,.Tensor_"
           "out,_.Tensor,_.Tensor_Scalar} "
           "bitwise_{and,or,xor}{.Scalar,.Scalar_Tensor,.Scalar_out,.Tensor,.Tensor_out,_.Scalar,_."
           "Tensor}",
           pointwise()},
          {"special_entr{,.out} special_ndtri{,.out} special_log_ndtr{,.out} special_erfcx{,.out} "
           "special_xlog1py{,.other_scalar,.other_scalar_out,.out,.self_scalar,.self_scalar_out} "
           "special_zeta{,.other_scalar,.other_scalar_out,.out,.self_scalar,.self_scalar_out} "
           "special_i0e{,.out} special_i1{,.out} special_i1e{,.out} special_airy_ai{,.out} "
           "special_bessel_j0{,.out} special_bessel_j1{,.out} special_bessel_y0{,.out} "
           "special_bessel_y1{,.out} special_modified_bessel_i0{,.out} "
           "special_modified_bessel_i1{,.out} special_modified_bessel_k0{,.out} "
           "special_modified_bessel_k1{,.out} special_scaled_modified_bessel_k0{,.out} "
           "special_scaled_modified_bessel_k1{,.out} special_spherical_bessel_j0{,.out}",
           pointwise()},
          {" "
           "special_{chebyshev_polynomial_t,chebyshev_polynomial_u,chebyshev_polynomial_v,"
           "chebyshev_polynomial_w,hermite_polynomial_h,hermite_polynomial_he,laguerre_polynomial_"
           "l,legendre_polynomial_p,shifted_chebyshev_polynomial_t,shifted_chebyshev_polynomial_u,"
           "shifted_chebyshev_polynomial_v,shifted_chebyshev_polynomial_w}{,.out,.n_scalar,.n_"
           "scalar_out,.x_scalar,.x_scalar_out}",
           pointwise()},
          // Two results
          {"frexp.Tensor log_sigmoid_forward", pointwise("", 2)},
          {"_prelu_kernel_backward", pointwise("0", 2)},
          {"log_sigmoid_backward", pointwise("0")},
      }};
}

}  // namespace tessera::rules
