#include "rule_cases.h"

namespace tessera::testing {

std::vector<RuleCase> pointwise_cases() {
  std::vector<RuleCase> cases;
  for (const char* op : {"abs",        "neg",         "exp",          "log",
                         "sqrt",       "rsqrt",       "sin",          "cos",
                         "tanh",       "sigmoid",     "relu",         "silu",
                         "gelu",       "reciprocal",  "square",       "floor",
                         "ceil",       "round",       "trunc",        "sign",
                         "erf",        "expm1",       "log1p",        "atan",
                         "asinh",      "sinh",        "hardtanh",     "hardsigmoid",
                         "hardswish",  "softplus",    "elu",          "leaky_relu",
                         "selu",       "mish",        "logit",        "isnan",
                         "isfinite",   "logical_not", "frac",         "digamma",
                         "lgamma",     "nan_to_num",  "clone",        "detach",
                         "alias",      "lift_fresh",  "positive",     "rad2deg",
                         "zeros_like", "ones_like",   "exp2",         "softshrink",
                         "hardshrink", "relu6",       "special_entr", "log_sigmoid_forward",
                         "sinc",       "i0",          "erfinv",       "bitwise_not"}) {
    const bool integer = std::string(op) == "bitwise_not";
    cases.push_back(row(op, integer ? indices({7, 5}, 9) : units({7, 5})));
  }
  for (const char* op : {"relu_", "exp_", "neg_", "silu_", "sqrt_", "zero_", "detach_", "floor_"}) {
    cases.push_back(row(op, units({7, 5})));
  }
  for (const char* op : {"add.Tensor",
                         "sub.Tensor",
                         "mul.Tensor",
                         "div.Tensor",
                         "add_.Tensor",
                         "sub_.Tensor",
                         "mul_.Tensor",
                         "div_.Tensor",
                         "maximum",
                         "minimum",
                         "fmax",
                         "pow.Tensor_Tensor",
                         "atan2",
                         "eq.Tensor",
                         "lt.Tensor",
                         "rsub.Tensor",
                         "remainder.Tensor",
                         "logaddexp",
                         "copysign.Tensor",
                         "hypot",
                         "xlogy.Tensor",
                         "copy_",
                         "floor_divide",
                         "logical_and",
                         "max.other"}) {
    cases.push_back(row(op, units({7, 5}), units({7, 5})));
    cases.push_back(row(op, units({7, 5}), units({5})));
    cases.push_back(row(op, units({2, 7, 5}), units({7, 1})));
  }
  for (const char* op :
       {"add.Scalar", "sub.Scalar", "mul.Scalar", "div.Scalar", "add_.Scalar", "mul_.Scalar",
        "div_.Scalar", "rsub.Scalar", "pow.Tensor_Scalar", "eq.Scalar", "gt.Scalar",
        "remainder.Scalar", "fill_.Scalar", "pow_.Scalar", "clamp_min", "clamp_max", "clamp",
        "full_like", "leaky_relu_"}) {
    cases.push_back(row(op, reals({7, 5}), 2));
    cases.push_back(row(op, reals({7, 5}), -0.5));
  }
  for (const char* op : {"silu_backward", "sigmoid_backward", "tanh_backward", "gelu_backward"}) {
    cases.push_back(row(op, reals({7, 5}), units({7, 5})));
  }
  const auto out = [](Ints sizes) { return reals(std::move(sizes)); };
  std::vector<RuleCase> others{
      row("threshold_backward", reals({7, 5}), reals({7, 5}), 0.1),
      row("leaky_relu_backward", reals({7, 5}), reals({7, 5}), 0.1, false),
      row("hardtanh_backward", reals({7, 5}), reals({7, 5}), -0.5, 0.5),
      row("elu_backward", reals({7, 5}), 1.0, 1.0, 1.0, false, reals({7, 5})),
      row("softplus_backward", reals({7, 5}), reals({7, 5}), 1.0, 20.0),
      row("where.self", mask({7, 5}), reals({7, 5}), units({5})),
      row("where.self", mask({7, 1}), reals({7, 5}), units({7, 5})),
      row("masked_fill.Scalar", reals({7, 5}), mask({7, 5}), 3.5),
      row("masked_fill.Scalar", reals({7, 5}), mask({5}), 0),
      row("masked_fill_.Scalar", reals({7, 5}), mask({7, 5}), -1.5),
      row("masked_fill.Tensor", reals({7, 5}), mask({7, 5}), reals({})),
      row("fill_.Tensor", reals({7, 5}), reals({})),
      row("lerp.Scalar", reals({7, 5}), units({7, 5}), 0.3),
      row("lerp.Tensor", reals({7, 5}), units({7, 5}), units({5})),
      row("lerp_.Scalar", reals({7, 5}), units({7, 5}), 0.3),
      row("addcmul", reals({7, 5}), units({7, 5}), reals({5}), 0.5),
      row("addcmul_", reals({7, 5}), units({7, 5}), reals({7, 5}), 0.5),
      row("addcdiv", reals({7, 5}), units({7, 5}), units({7, 5}), 0.5),
      row("addcdiv_", reals({7, 5}), units({7, 5}), units({7, 5}), 0.5),
      row("add.Tensor", reals({7, 5}), units({7, 5}), -2.5),
      row("add.Tensor", reals({7, 5}), units({}), 2),
      row("mul.Tensor", reals({1, 5}), units({7, 1})),
      row("mul.Tensor", reals({1, 5}), units({1, 5})),
      row("clamp", reals({7, 5}), -0.5, 0.5),
      row("clamp.Tensor", reals({7, 5}), units({7, 5}), units({5})),
      row("div.Tensor_mode", reals({7, 5}), units({7, 5}), std::string("floor")),
      row("_to_copy", reals({7, 5}), int64_t{6}),
      row("_to_copy", reals({7, 5}), int64_t{7}),
      row("_to_copy", reals({7, 5}), int64_t{4}),
      row("_to_copy", reals({7, 5}), int64_t{11}),
      row("_to_copy", reals({7, 5}).to(at::kFloat), int64_t{7}),
      row("_to_copy", mask({7, 5}), int64_t{7}),
      row("add.out", reals({7, 5}), units({7, 5}), 1, out({7, 5})),
      row("exp.out", reals({7, 5}), out({7, 5})),
      row("mul.out", reals({7, 5}), units({5}), out({7, 5})),
      row("_prelu_kernel", reals({7, 5}), units({1, 5})),
      row("_prelu_kernel_backward", reals({7, 5}), units({1, 5}), reals({7, 5})),
      row("polar", units({7, 5}), reals({7, 5})),
      row("native_dropout_backward", reals({7, 5}), mask({7, 5}), 2.0),
      row("frexp.Tensor", reals({7, 5})),
      row("new_zeros", reals({7, 5}), Ints{7, 5}),
      row("new_zeros", reals({7, 5}), Ints{3, 2}),
      row("new_full", reals({7, 5}), Ints{7, 5}, 2.5),
      row("bitwise_and.Tensor", indices({7, 5}, 9), indices({5}, 7)),
  };
  cases.insert(cases.end(), others.begin(), others.end());
  return cases;
}

}  // namespace tessera::testing
