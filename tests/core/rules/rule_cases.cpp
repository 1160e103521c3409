#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/round.h>
#include <ATen/ops/sin.h>

#include <limits>
#include <optional>
#include <utility>

#include "rule_cases.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "testing/layouts.h"
#include "testing/values.h"

namespace tessera::testing {
namespace {

/// Rounds to multiples of 2^-20, so that the terms of a Partial tensor add up exactly.
at::Tensor exact(const at::Tensor& values) {
  return at::round(values * 1048576.0) / 1048576.0;
}

c10::IValue cloned(const c10::IValue& value) {
  if (value.isTensor()) {
    return value.toTensor().clone();
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(tensor.clone());
    }
    return list;
  }
  return value;
}

}  // namespace

at::Tensor reals(Ints sizes) {
  return exact(values(sizes, 0.3));
}
at::Tensor units(Ints sizes) {
  return exact(at::sin(counting_values(sizes) * 1.3 + 0.1) * 0.4 + 0.5);
}
at::Tensor indices(Ints sizes, std::int64_t limit) {
  return (counting_values(sizes) * 5 + 2).to(at::kLong).remainder(limit);
}
at::Tensor mask(Ints sizes) {
  return counting_values(sizes).remainder(3) == 0;
}

c10::List<at::Tensor> tensor_list(std::initializer_list<at::Tensor> tensors) {
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : tensors) {
    list.push_back(tensor);
  }
  return list;
}

c10::List<std::optional<at::Tensor>> index_list(std::initializer_list<at::Tensor> tensors) {
  c10::List<std::optional<at::Tensor>> list;
  for (const at::Tensor& tensor : tensors) {
    list.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
  }
  return list;
}

RuleCase make_case(const std::string& op, std::vector<c10::IValue> arguments) {
  const std::string full = op.find("::") == std::string::npos ? "aten::" + op : op;
  const auto dot = full.find('.');
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
      full.substr(0, dot).c_str(), dot == std::string::npos ? "" : full.substr(dot + 1).c_str());
  const auto& schema = handle.schema().arguments();
  for (std::size_t i = arguments.size(); i < schema.size(); ++i) {
    arguments.push_back(schema[i].default_value().value_or(c10::IValue()));
  }
  return {full, [arguments = std::move(arguments)] {
            std::vector<c10::IValue> copies;
            for (const auto& value : arguments) {
              copies.push_back(cloned(value));
            }
            return copies;
          }};
}

std::vector<RuleCase> view_cases() {
  std::vector<RuleCase> cases;
  const std::pair<Ints, Ints> shapes[] = {
      {{4, 6}, {24}},         {{7, 5}, {-1}},
      {{24}, {4, 6}},         {{8, 6}, {2, 4, -1}},
      {{8, 6}, {8, 2, 3}},    {{6, 4}, {4, 6}},
      {{6, 1, 4}, {6, 4, 1}}, {{2, 3, 4, 5}, {6, 20}},
      {{3, 2}, {2, 3}},       {{5, 2, 3, 7}, {5, 3, 2, 7}},
      {{0, 4}, {2, 0, 2}},    {{1}, {}},
      {{}, {1, 1}},           {{7, 5}, {7, 5}},
  };
  for (const char* op : {"view", "_unsafe_view"}) {
    for (const auto& [from, to] : shapes) {
      cases.push_back(row(op, reals(from), to));
    }
  }
  std::vector<RuleCase> others{
      row("permute", reals({2, 3, 5}), Ints{2, 0, -2}),
      row("transpose.int", reals({7, 5}), -1, 0),
      row("t", reals({7, 5})),
      row("t", reals({7})),
      row("squeeze", reals({7, 1, 5, 1})),
      row("squeeze", reals({3, 4})),
      row("squeeze.dim", reals({7, 1, 5}), 1),
      row("squeeze.dim", reals({3, 1, 5}), 0),
      row("squeeze.dims", reals({3, 1, 5, 1}), Ints{0, -1}),
      row("unsqueeze", reals({7, 5}), -1),
      row("unsqueeze", reals({7, 5}), 0),
      row("expand", reals({7, 1}), Ints{2, -1, 5}),
      row("expand", reals({7, 5}), Ints{7, 5}),
      row("expand", reals({}), Ints{3}),
      row("repeat", reals({3, 5}), Ints{2, 1, 3}),
      row("view_as_real", at::complex(reals({7, 5}), units({7, 5}))),
      row("select.int", reals({7, 5}), 0, 3),
      row("select.int", reals({7, 5}), -1, -2),
      row("slice.Tensor", reals({7, 5}), 0, 1, 4),
      row("slice.Tensor", reals({7, 5}), 1, c10::IValue(), c10::IValue()),
      row("slice.Tensor", reals({7, 5}), 0, 0, -2),
      row("slice.Tensor", reals({7, 5}), 0, -9, 100, 2),
      row("slice.Tensor", reals({7, 5}), 0, 0, std::numeric_limits<std::int64_t>::max()),
      row("slice.Tensor", reals({7, 5}), 1, 4, 2),
      row("slice.Tensor", reals({6, 5}), 0, 2, 4),
      row("split.Tensor", reals({7, 5}), 3, 0),
      row("split.Tensor", reals({7, 5}), 2, -1),
      row("split.Tensor", reals({6, 5}), 3, 0),
      row("split_with_sizes", reals({7, 5}), Ints{3, 4}, 0),
      row("split_with_sizes", reals({7, 6}), Ints{2, 2, 2}, 1),
      row("unbind.int", reals({3, 5}), 0),
      row("unbind.int", reals({3, 5}), -1),
      row("cat", tensor_list({reals({7, 5}), reals({2, 5})}), 0),
      row("cat", tensor_list({reals({7, 5}), units({7, 5})}), -1),
      row("cat", tensor_list({reals({7, 5}), reals({0})}), 1),
      row("stack", tensor_list({reals({7, 5}), units({7, 5})}), 0),
      row("constant_pad_nd", reals({7, 5}), Ints{1, 2}, 0),
      row("constant_pad_nd", reals({7, 5}), Ints{0, 0, 1, -2}, 3.5),
      row("stack", tensor_list({reals({7, 5}), units({7, 5})}), -1),
  };
  cases.insert(cases.end(), others.begin(), others.end());
  return cases;
}

std::vector<RuleCase> indexing_cases() {
  const at::Tensor none;
  return {
      row("index.Tensor", reals({7, 5}), index_list({indices({4}, 7)})),
      row("index.Tensor", reals({7, 5}), index_list({none, indices({2, 3}, 5)})),
      row("index.Tensor", reals({7, 5, 3}), index_list({indices({4}, 7), none, indices({4}, 3)})),
      row("index.Tensor", reals({7, 5, 3}),
          index_list({none, indices({4, 1}, 5), indices({6}, 3)})),
      row("index_put", reals({7, 5}), index_list({indices({4}, 7)}), reals({4, 5}), true),
      row("index_put", reals({7, 5}), index_list({indices({4}, 7)}), reals({5}), false),
      row("index_put", reals({7, 5}), index_list({none, indices({3}, 5)}), reals({7, 3}), true),
      row("index_put_", reals({7, 5}), index_list({indices({4}, 7)}), reals({4, 5}), true),
      row("index_put_", reals({7, 5}), index_list({indices({4}, 7)}), reals({}), false),
      row("_index_put_impl_", reals({7, 5}), index_list({indices({4}, 7)}), reals({4, 5}), true),
      row("index_select", reals({7, 5}), 0, indices({6}, 7)),
      row("index_select", reals({7, 5}), -1, indices({3}, 5)),
      row("index_add", reals({7, 5}), 0, indices({6}, 7), reals({6, 5})),
      row("index_add_", reals({7, 5}), -1, indices({6}, 5), reals({7, 6})),
      row("gather", reals({7, 5}), 0, indices({4, 5}, 7)),
      row("gather", reals({7, 5}), -1, indices({7, 8}, 5)),
      row("gather", reals({7, 5}), 1, indices({3, 8}, 5)),
      row("gather", reals({7, 5}), 0, indices({1, 5}, 7)),
      row("gather", reals({7, 5}), 1, indices({6, 2}, 5)),
      row("scatter.src", reals({7, 5}), -1, indices({7, 1}, 5), reals({7, 1})),
      row("scatter.src", reals({7, 5}), 1, indices({4, 1}, 5), reals({7, 5})),
      row("scatter.value", reals({7, 5}), 0, indices({1, 5}, 7), 2.5),
      row("scatter_.value", reals({7, 5}), 0, indices({1, 5}, 7), 2.5),
      row("scatter_add", reals({7, 5}), 0, indices({6, 5}, 7), reals({6, 5})),
      row("scatter_add", reals({7, 5}), 1, indices({7, 9}, 5), reals({7, 9})),
      row("scatter_add_", reals({7, 5}), 1, indices({3, 9}, 5), reals({7, 9})),
      row("select_backward", reals({5}), Ints{7, 5}, 0, 3),
      row("select_backward", reals({7}), Ints{7, 5}, -1, 3),
      row("slice_backward", reals({3, 5}), Ints{7, 5}, 0, 1, 4, 1),
      row("select_scatter", reals({7, 5}), reals({7}), 1, 2),
      row("slice_scatter", reals({7, 5}), reals({3, 5}), 0, 1, 4),
      row("embedding", reals({7, 5}), indices({2, 3}, 7)),
      row("embedding", reals({7, 5}), indices({9}, 7), 2),
      row("embedding_dense_backward", reals({2, 3, 5}), indices({2, 3}, 7), 7, -1, false),
      row("embedding_dense_backward", reals({9, 5}), indices({9}, 7), 7, 2, false),
  };
}

std::vector<RuleCase> reduction_cases() {
  const double infinity = std::numeric_limits<double>::infinity();
  std::vector<RuleCase> cases;
  for (const char* op : {"sum", "mean", "prod", "max", "min", "any", "all", "argmax", "argmin",
                         "count_nonzero", "norm.Scalar"}) {
    cases.push_back(row(op, reals({7, 5})));
    cases.push_back(row(op, reals({6, 4})));
    cases.push_back(row(op, reals({})));
  }
  for (const char* op : {"sum.dim_IntList", "mean.dim", "amax", "amin", "logsumexp"}) {
    for (bool keepdim : {false, true}) {
      cases.push_back(row(op, reals({7, 5, 3}), Ints{0}, keepdim));
      cases.push_back(row(op, reals({7, 5, 3}), Ints{-1}, keepdim));
      cases.push_back(row(op, reals({7, 5, 3}), Ints{1, -1}, keepdim));
    }
  }
  for (const char* op :
       {"prod.dim_int", "any.dim", "all.dim", "argmax", "argmin", "max.dim", "min.dim"}) {
    cases.push_back(row(op, reals({7, 5, 3}), 0, false));
    cases.push_back(row(op, reals({7, 5, 3}), -1, true));
  }
  for (const char* op : {"_softmax", "_log_softmax"}) {
    cases.push_back(row(op, reals({7, 5, 3}), 1, false));
    cases.push_back(row(op, reals({7, 5, 3}), -1, false));
  }
  for (const char* op : {"cumsum", "cumprod", "sort", "cumsum_"}) {
    cases.push_back(row(op, reals({7, 5, 3}), 1));
    cases.push_back(row(op, reals({7, 5, 3}), -1));
    cases.push_back(row(op, reals({7, 5, 3}), 0));
  }
  for (double order : {0.0, 1.0, 2.0, 3.0, infinity, -infinity}) {
    cases.push_back(row("linalg_vector_norm", reals({7, 5}), order));
    cases.push_back(row("linalg_vector_norm", reals({7, 5}), order, Ints{-1}, true));
  }
  std::vector<RuleCase> others{
      row("sum", reals({7, 5}), int64_t{6}),
      row("sum.dim_IntList", reals({7, 5}) * 4.0, Ints{0}, false, int64_t{4}),
      row("sum.dim_IntList", reals({7, 5}), Ints{}, false),
      row("mean.dim", reals({7, 5}).to(at::kBFloat16).to(at::kDouble), Ints{0}, false),
      row("std.correction", reals({7, 5}), Ints{1}, 1, true),
      row("var.correction", reals({7, 5}), Ints{0}, 0, false),
      row("var_mean.correction", reals({7, 5}), c10::IValue(), 1, false),
      row("linalg__powsum", reals({7, 5}), 2.0, Ints{0}, false),
      row("_softmax_backward_data", reals({7, 5}), units({7, 5}), -1, int64_t{7}),
      row("_log_softmax_backward_data", reals({7, 5}), units({7, 5}), 0, int64_t{7}),
      row("topk", reals({7, 5}), 3, -2),
      row("sort.stable", reals({7, 5}), true, -1, true),
      row("flip", reals({7, 5}), Ints{-1}),
      row("roll", reals({7, 5}), Ints{2}, Ints{0}),
      row("roll", reals({7, 5}), Ints{2}),
      row("tril", reals({4, 7, 5})),
      row("triu", reals({7, 5}), 1),
      row("triu_", reals({7, 5}), 1),
      row("any", mask({7, 5})),
      row("any.dim", mask({7, 5}), 0, true),
      row("all.dim", mask({7, 5}), 1, false),
      row("sum", mask({7, 5})),
      row("sum.IntList_out", reals({7, 5}), Ints{0}, false, c10::IValue(), reals({5})),
      row("amax.out", reals({7, 5}), Ints{1}, false, reals({7})),
  };
  cases.insert(cases.end(), others.begin(), others.end());
  return cases;
}

std::vector<RuleCase> pointwise_cases() {
  std::vector<RuleCase> cases;
  const std::string unary =
      "abs neg exp log sqrt rsqrt sin cos tanh sigmoid relu silu gelu reciprocal square floor ceil "
      "round trunc sign erf expm1 log1p atan asinh sinh hardtanh hardsigmoid hardswish softplus "
      "elu "
      "leaky_relu selu mish logit isnan isfinite logical_not frac digamma lgamma nan_to_num clone "
      "detach alias lift_fresh positive rad2deg zeros_like ones_like exp2 softshrink hardshrink "
      "relu6 log_sigmoid_forward sinc i0 erfinv relu_ exp_ neg_ silu_ sqrt_ zero_ detach_ floor_";
  for (const std::string& op : split(unary, ' ')) {
    cases.push_back(row(op, units({7, 5})));
  }
  cases.push_back(row("bitwise_not", indices({7, 5}, 9)));
  const std::string binary =
      "add.Tensor sub.Tensor mul.Tensor div.Tensor add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor "
      "maximum minimum fmax pow.Tensor_Tensor atan2 eq.Tensor lt.Tensor rsub.Tensor "
      "remainder.Tensor logaddexp copysign.Tensor hypot xlogy.Tensor copy_ floor_divide "
      "logical_and "
      "max.other";
  for (const std::string& op : split(binary, ' ')) {
    cases.push_back(row(op, units({7, 5}), units({7, 5})));
    cases.push_back(row(op, units({7, 5}), units({5})));
    cases.push_back(row(op, units({2, 7, 5}), units({7, 1})));
  }
  const std::string scalar =
      "add.Scalar sub.Scalar mul.Scalar div.Scalar add_.Scalar mul_.Scalar div_.Scalar rsub.Scalar "
      "pow.Tensor_Scalar eq.Scalar gt.Scalar remainder.Scalar fill_.Scalar pow_.Scalar clamp_min "
      "clamp_max clamp full_like leaky_relu_";
  for (const std::string& op : split(scalar, ' ')) {
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

namespace {

std::vector<RuleCase> matmul_cases() {
  return {
      row("mm", reals({7, 5}), reals({5, 6})),
      row("bmm", reals({3, 7, 5}), reals({3, 5, 2})),
      row("mv", reals({7, 5}), reals({5})),
      row("dot", reals({7}), units({7})),
      row("addmm", reals({6}), reals({7, 5}), reals({5, 6}), 0.5, 2),
      row("addmm", reals({7, 6}), reals({7, 5}), reals({5, 6})),
      row("addmm", reals({7, 1}), reals({7, 5}), reals({5, 6})),
      row("addmm_", reals({7, 6}), reals({7, 5}), reals({5, 6})),
      row("baddbmm", reals({3, 7, 2}), reals({3, 7, 5}), reals({3, 5, 2})),
      row("linear", reals({2, 7, 5}), reals({6, 5}), reals({6})),
      row("linear", reals({7, 5}), reals({6, 5})),
      row("matmul", reals({2, 7, 5}), reals({5, 6})),
      row("matmul", reals({5}), reals({3, 5, 6})),
      row("matmul", reals({4, 1, 7, 5}), reals({3, 5, 6})),
      row("mm.out", reals({7, 5}), reals({5, 6}), reals({7, 6})),
  };
}

std::vector<RuleCase> loss_cases() {
  std::vector<RuleCase> cases;
  for (std::int64_t reduction : {0, 1, 2}) {
    cases.push_back(row("mse_loss", reals({7, 5}), units({7, 5}), reduction));
    cases.push_back(row("binary_cross_entropy_with_logits", reals({7, 5}), units({7, 5}),
                        c10::IValue(), units({5}), reduction));
    const auto grad = reduction == 0 ? reals({7, 5}) : reals({});
    cases.push_back(row("mse_loss_backward", grad, reals({7, 5}), units({7, 5}), reduction));
    cases.push_back(
        row("nll_loss_forward", reals({7, 5}), indices({7}, 5), units({5}), reduction, 2));
    cases.push_back(
        row("nll_loss_forward", reals({7, 5}), indices({7}, 5), c10::IValue(), reduction, -100));
    cases.push_back(row("nll_loss_backward", reduction == 0 ? reals({7}) : reals({}), reals({7, 5}),
                        indices({7}, 5), units({5}), reduction, 2, units({}) + 3.0));
    cases.push_back(row("nll_loss2d_forward", reals({2, 5, 3, 4}), indices({2, 3, 4}, 5),
                        c10::IValue(), reduction, 1));
  }
  return cases;
}

std::vector<RuleCase> norm_cases() {
  const auto statistics = [] { return units({2, 7, 1}); };
  const c10::List<bool> all({true, true, true});
  return {
      row("native_layer_norm", reals({2, 7, 5}), Ints{5}, units({5}), reals({5}), 1e-5),
      row("native_layer_norm", reals({7, 5}), Ints{7, 5}, c10::IValue(), c10::IValue(), 1e-5),
      row("native_layer_norm_backward", reals({2, 7, 5}), reals({2, 7, 5}), Ints{5}, statistics(),
          statistics(), units({5}), reals({5}), all),
      row("_fused_rms_norm", reals({2, 7, 5}), Ints{5}, units({5}), 1e-5),
  };
}

std::vector<RuleCase> attention_cases() {
  const auto q = [] { return reals({2, 4, 3, 8}); };
  const auto kv = [] { return units({2, 4, 3, 8}); };
  const auto statistics = [] { return reals({2, 4, 3}).to(at::kFloat) + 3; };
  return {
      row("_scaled_dot_product_flash_attention_for_cpu", q(), kv(), units({2, 4, 3, 8}), 0.0, true),
      row("_scaled_dot_product_flash_attention_for_cpu", q(), units({2, 4, 5, 8}),
          units({2, 4, 5, 8}), 0.0, false, reals({3, 5})),
      row("_scaled_dot_product_flash_attention_for_cpu", q(), units({2, 4, 5, 8}),
          units({2, 4, 5, 8}), 0.0, false),
      row("_scaled_dot_product_flash_attention_for_cpu_backward", reals({2, 4, 3, 8}), q(), kv(),
          units({2, 4, 3, 8}), units({2, 4, 3, 8}), statistics().to(at::kDouble), 0.0, false),
      row("_scaled_dot_product_flash_attention_for_cpu_backward", reals({2, 4, 3, 8}), q(), kv(),
          units({2, 4, 3, 8}), units({2, 4, 3, 8}), statistics().to(at::kDouble), 0.0, true),
  };
}

std::vector<RuleCase> convolution_cases() {
  const Ints one{1}, none{0};
  const c10::List<bool> all({true, true, true});
  return {
      row("convolution", reals({3, 4, 6}), reals({5, 4, 3}), reals({5}), one, one, one, false, none,
          1),
      row("convolution", reals({3, 4, 5, 6}), reals({6, 2, 3, 3}), reals({6}), Ints{2, 1},
          Ints{1, 0}, Ints{1, 1}, false, Ints{0, 0}, 2),
      row("convolution_backward", reals({3, 5, 6}), reals({3, 4, 6}), reals({5, 4, 3}), Ints{5},
          one, one, one, false, none, 1, all),
      row("convolution_backward", reals({3, 6, 2, 4}), reals({3, 4, 4, 6}), reals({6, 2, 3, 3}),
          Ints{6}, Ints{2, 1}, Ints{1, 0}, Ints{1, 1}, false, Ints{0, 0}, 2, all),
      row("convolution_backward", reals({3, 5, 6}), reals({3, 4, 6}), reals({5, 4, 3}),
          c10::IValue(), one, one, one, false, none, 1, c10::List<bool>({true, true, false})),
      row("native_batch_norm", reals({5, 4, 3}), units({4}), reals({4}), reals({4}), units({4}),
          true, 0.1, 1e-5),
  };
}

}  // namespace

std::vector<RuleCase> network_cases() {
  std::vector<RuleCase> cases;
  for (const auto& part :
       {matmul_cases(), loss_cases(), norm_cases(), attention_cases(), convolution_cases()}) {
    cases.insert(cases.end(), part.begin(), part.end());
  }
  return cases;
}

std::vector<RuleCase> list_cases() {
  const auto some = [] { return tensor_list({reals({7, 5}), reals({6}), reals({})}); };
  const auto others = [] { return tensor_list({units({7, 5}), units({6}), units({})}); };
  return {
      row("_foreach_sub_.List", some(), others()),
      row("_foreach_copy_", some(), others()),
      row("_foreach_exp", others()),
      row("_foreach_mul_.Scalar", some(), 2.0),
      row("_foreach_mul_.Tensor", some(), units({})),
      row("_foreach_addcmul_.Scalar", some(), others(), others(), 0.3),
      row("_foreach_norm.Scalar", some(), 2.0),
      row("_foreach_max", tensor_list({reals({7, 5}), reals({6})})),
  };
}

namespace {

std::vector<RuleCase> rms_norm_cases() {
  const auto rows = [] { return units({2, 7, 1}); };
  return {
      row("tessera::rms_norm", reals({2, 7, 5}), units({5}), 1e-5),
      row("tessera::rms_norm", reals({7, 5}), c10::IValue(), 1e-5),
      row("tessera::add_rms_norm", reals({2, 7, 5}), units({2, 7, 5}), units({5}), 1e-5),
      row("tessera::add_rms_norm", reals({7, 5}), units({7, 5}), c10::IValue(), 1e-5),
      row("tessera::rms_norm_backward", reals({2, 7, 5}), reals({2, 7, 5}), units({5}), rows()),
      row("tessera::rms_norm_backward", reals({2, 7, 5}), reals({2, 7, 5}), units({5}), rows(),
          units({2, 7, 5})),
  };
}

std::vector<RuleCase> chunked_attention_cases() {
  const auto q = [] { return reals({2, 4, 6, 8}); };
  const auto kv = [] { return units({2, 2, 9, 8}); };
  const std::vector<std::int64_t> firsts{0, 6}, documents{0, 7, 9, 18};
  return {
      row("tessera::chunked_attention", q(), kv(), units({2, 2, 9, 8}), firsts),
      row("tessera::chunked_attention", q(), kv(), units({2, 2, 9, 8}), firsts, 4),
      row("tessera::chunked_attention", q(), kv(), units({2, 2, 9, 8}), firsts, 0, documents),
      row("tessera::chunked_attention_backward", reals({2, 4, 6, 8}), q(), kv(),
          units({2, 2, 9, 8}), q(), reals({2, 4, 6}), firsts),
      row("tessera::chunked_attention_backward", reals({2, 4, 6, 8}), q(), kv(),
          units({2, 2, 9, 8}), q(), reals({2, 4, 6}), firsts, 0, documents),
  };
}

std::vector<RuleCase> fp8_linear_cases() {
  return {
      row("tessera::fp8_linear", reals({2, 7, 5}), reals({6, 5})),
      row("tessera::fp8_linear", reals({5}), reals({6, 5})),
      row("tessera::fp8_linear_input_grad", reals({2, 7, 6}), reals({6, 5})),
      row("tessera::fp8_linear_weight_grad", reals({2, 7, 6}), reals({2, 7, 5})),
  };
}

}  // namespace

std::vector<RuleCase> fused_cases() {
  // Without a call, the linker would drop the library that registers the tessera:: operators.
  const at::Tensor product = detail::silu_mul(reals({7, 5}), units({7, 5}));
  std::vector<RuleCase> cases{
      row("tessera::silu_mul", product, units({7, 5})),
      row("tessera::silu_mul_backward", reals({7, 5}), reals({7, 5}), units({7, 5})),
      row("tessera::silu_mul_with_gradients", reals({7, 5}), reals({7, 5}), units({7, 5})),
      row("tessera::dropout", reals({7, 5}), 0.4, 3, 4),
      row("tessera::dropout", reals({2, 3, 5}), 0.4, 3, 4, 60),
      row("tessera::embedding", reals({7, 5}), indices({2, 3}, 7)),
      row("tessera::embedding", reals({7, 5}), indices({}, 7)),
      row("tessera::embedding_backward", reals({2, 3, 5}), indices({2, 3}, 7), reals({7, 5})),
      row("tessera::cross_entropy", reals({7, 5}), indices({7}, 5), -100, 0.2, 0.1),
      row("tessera::cross_entropy_backward", reals({7}), reals({7, 5}), indices({7}, 5), reals({7}),
          -100, 0.2, 0.1),
      row("tessera::rotary_embedding", reals({3, 5, 2, 4}), reals({5, 4}), units({5, 4})),
      row("tessera::rotary_embedding", reals({3, 5, 2, 4}), reals({5, 4}), units({5, 4}), true),
      row("tessera::rotary_embedding_qk", reals({2, 5, 6, 4}), units({2, 5, 3, 4}), reals({5, 4}),
          units({5, 4})),
      row("tessera::rotary_embedding_qk", reals({2, 5, 2, 4}), units({2, 5, 3, 4}), reals({5, 4}),
          units({5, 4}), true),
  };
  for (const auto& part : {rms_norm_cases(), chunked_attention_cases(), fp8_linear_cases()}) {
    cases.insert(cases.end(), part.begin(), part.end());
  }
  return cases;
}

}  // namespace tessera::testing
