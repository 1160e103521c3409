#include "own_operators.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/core/register_rule.h"

namespace tessera::own_operators {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Kernels. What is made of libtorch's operators autograd can record; what reads memory it cannot.

at::Tensor sin_of_product(const at::Tensor& x, const at::Tensor& w) {
  return (x * w).sin();
}

at::Tensor product_of_matrices(const at::Tensor& a, const at::Tensor& b) {
  return at::mm(a, b);
}

at::Tensor square_in_memory(const at::Tensor& x) {
  const at::Tensor in = x.contiguous();
  at::Tensor out = at::empty_like(in);
  for (std::int64_t i = 0; i < in.numel(); ++i) {
    const double value = in.const_data_ptr<double>()[i];
    out.mutable_data_ptr<double>()[i] = value * value;
  }
  return out;
}

at::Tensor& halve_in_place(at::Tensor& x) {
  return x.div_(2);
}

at::Tensor first_half(const at::Tensor& x) {
  return x.narrow(0, 0, x.size(0) / 2);
}

std::tuple<at::Tensor, at::Tensor> exp_and_sign(const at::Tensor& x,
                                                const std::optional<at::Tensor>& scale) {
  const at::Tensor scaled = scale ? x * *scale : x;
  return {scaled.exp(), scaled.gt(0).to(at::kLong)};
}

std::vector<at::Tensor> cubes(at::TensorList tensors) {
  std::vector<at::Tensor> results;
  for (const at::Tensor& tensor : tensors) {
    results.push_back(tensor.pow(3));
  }
  return results;
}

/// Its gradient is written out. As an autograd kernel, and called as it is.
struct SinOfProduct : torch::autograd::Function<SinOfProduct> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_binary("explicit_with_autograd", x, w);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor inner = gradients[0] * (saved[0] * saved[1]).cos();
    return {inner * saved[1], (inner * saved[0]).sum_to_size(saved[1].sizes())};
  }
};

at::Tensor sin_of_product_with_autograd(const at::Tensor& x, const at::Tensor& w) {
  return SinOfProduct::apply(x, w);
}

struct SquareInMemory : torch::autograd::Function<SquareInMemory> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_unary("memory_with_autograd", x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {2 * gradients[0] * context->get_saved_variables()[0]};
  }
};

at::Tensor square_in_memory_with_autograd(const at::Tensor& x) {
  return SquareInMemory::apply(x);
}

/// A Function without an operator: its forward is libtorch's operators.
struct CubeByHand : torch::autograd::Function<CubeByHand> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * x * x;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor x = context->get_saved_variables()[0];
    return {3 * gradients[0] * x * x};
  }
};

/// Element by element; a `w` of fewer dimensions is broadcast over the first ones of `x`.
std::optional<ShardingRule> elementwise(const OpCall& call, std::size_t outputs) {
  ShardingRule rule;
  ShardingRule::TensorFactors dims;
  for (const std::int64_t size : call.tensor(0).sizes) {
    dims.push_back({static_cast<int>(rule.factors.size())});
    rule.factors.push_back({.size = size});
  }
  for (const TensorMeta& tensor : call.tensors) {
    rule.inputs.push_back({dims.end() - tensor.ndim(), dims.end()});
  }
  rule.outputs.assign(outputs, dims);
  return rule;
}

std::optional<ShardingRule> elementwise_rule(const OpCall& call) {
  return elementwise(call, 1);
}

void register_rules() {
  // libtorch warns at every such gradient.
  torch::autograd::setAutogradFallbackMode(torch::autograd::AutogradFallbackMode::Nothing);
  for (const char* name : {"explicit", "explicit_with_autograd", "kernel", "memory",
                           "memory_with_autograd", "halve_"}) {
    register_rule(std::string("own_gradients::") + name, &elementwise_rule);
  }
  register_rule("own_gradients::exp_and_sign",
                [](const OpCall& call) { return elementwise(call, 2); });
  register_rule(
      "own_gradients::product",
      std::vector<AcceptedPlacements>{{.inputs = {Shard{0}, Replicate{}}, .outputs = {Shard{0}}},
                                      {.inputs = {Replicate{}, Shard{1}}, .outputs = {Shard{1}}},
                                      {.inputs = {Shard{1}, Shard{0}}, .outputs = {Partial{}}},
                                      {.inputs = {Partial{}, Replicate{}}, .outputs = {Partial{}}}},
      [](const OpCall& call) {
        return std::vector<std::vector<std::int64_t>>{
            {call.tensor(0).size(0), call.tensor(1).size(1)}};
      });
  register_rule(
      "own_gradients::column_maximum",
      std::vector<AcceptedPlacements>{{.inputs = {Shard{0}}, .outputs = {Partial{ReduceOp::kMax}}}},
      [](const OpCall& call) {
        return std::vector<std::vector<std::int64_t>>{{call.tensor(0).size(1)}};
      });
}

TORCH_LIBRARY(own_gradients, library) {
  const auto on_cpu = [](auto* kernel) { return torch::dispatch(c10::DispatchKey::CPU, kernel); };
  const auto composite = [](auto* kernel) {
    return torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, kernel);
  };
  const auto autograd = [](auto* kernel) {
    return torch::dispatch(c10::DispatchKey::Autograd, kernel);
  };
  library.def("implicit(Tensor x, Tensor w) -> Tensor", &sin_of_product);
  library.def("explicit(Tensor x, Tensor w) -> Tensor");
  library.impl("explicit", composite(&sin_of_product));
  library.def("explicit_with_autograd(Tensor x, Tensor w) -> Tensor");
  library.impl("explicit_with_autograd", composite(&sin_of_product));
  library.impl("explicit_with_autograd", autograd(&sin_of_product_with_autograd));
  library.def("kernel(Tensor x, Tensor w) -> Tensor");
  library.impl("kernel", on_cpu(&sin_of_product));
  library.def("kernel_without_rule(Tensor x, Tensor w) -> Tensor");
  library.impl("kernel_without_rule", on_cpu(&sin_of_product));
  library.def("product(Tensor a, Tensor b) -> Tensor");
  library.impl("product", on_cpu(&product_of_matrices));
  library.def("memory(Tensor x) -> Tensor");
  library.impl("memory", on_cpu(&square_in_memory));
  library.def("memory_with_autograd(Tensor x) -> Tensor");
  library.impl("memory_with_autograd", on_cpu(&square_in_memory));
  library.impl("memory_with_autograd", autograd(&square_in_memory_with_autograd));
  library.def("exp_and_sign(Tensor x, Tensor? scale) -> (Tensor, Tensor)");
  library.impl("exp_and_sign", on_cpu(&exp_and_sign));
  library.def("cubes(Tensor[] tensors) -> Tensor[]");
  library.impl("cubes", on_cpu(&cubes));
  library.def("halve_(Tensor(a!) x) -> Tensor(a!)");
  library.impl("halve_", on_cpu(&halve_in_place));
  library.def("first_half(Tensor(a) x) -> Tensor(a)");
  library.impl("first_half", on_cpu(&first_half));
  library.def("column_maximum(Tensor x) -> Tensor");
  library.impl("column_maximum", torch::dispatch(c10::DispatchKey::CPU,
                                                 [](const at::Tensor& x) { return x.amax(0); }));
  register_rules();
}

}  // namespace

at::Tensor call_binary(const char* name, const at::Tensor& x, const at::Tensor& w) {
  return call<at::Tensor(const at::Tensor&, const at::Tensor&)>(name, x, w);
}

at::Tensor call_unary(const char* name, const at::Tensor& x) {
  return call<at::Tensor(const at::Tensor&)>(name, x);
}

at::Tensor cube_by_hand(const at::Tensor& x) {
  return CubeByHand::apply(x);
}

}  // namespace tessera::own_operators
