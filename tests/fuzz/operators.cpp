#include "fuzz/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/sigmoid.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>

#include "tessera/core/register_rule.h"

namespace tessera::fuzz {
namespace {

at::Tensor swish(const at::Tensor& x) {
  return x * at::sigmoid(x);
}

/// The same with a gradient that is written out.
struct SwishFunction : torch::autograd::Function<SwishFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const std::string& name) {
    ctx->save_for_backward({x});
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_operator(name, x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    const at::Tensor x = ctx->get_saved_variables()[0];
    const at::Tensor s = at::sigmoid(x);
    return {gradients[0] * (s + x * s * (1 - s)), at::Tensor()};
  }
};

at::Tensor with_autograd(const at::Tensor& x) {
  return SwishFunction::apply(x, "fuzz::with_autograd");
}

at::Tensor without_rule(const at::Tensor& x) {
  return SwishFunction::apply(x, "fuzz::without_rule");
}

TORCH_LIBRARY(fuzz, library) {
  library.def("composite(Tensor x) -> Tensor");
  library.def("kernel_of_aten(Tensor x) -> Tensor");
  library.def("with_autograd(Tensor x) -> Tensor");
  library.def("without_rule(Tensor x) -> Tensor");
  library.impl("composite", torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, &swish));
  library.impl("kernel_of_aten", torch::dispatch(c10::DispatchKey::CPU, &swish));
  library.impl("with_autograd", torch::dispatch(c10::DispatchKey::CPU, &swish));
  library.impl("with_autograd", torch::dispatch(c10::DispatchKey::Autograd, &with_autograd));
  library.impl("without_rule", torch::dispatch(c10::DispatchKey::CPU, &swish));
  library.impl("without_rule", torch::dispatch(c10::DispatchKey::Autograd, &without_rule));
}

std::optional<ShardingRule> elementwise(const OpCall& call) {
  ShardingRule rule;
  ShardingRule::TensorFactors dims;
  for (const std::int64_t size : call.tensor(0).sizes) {
    dims.push_back({static_cast<int>(rule.factors.size())});
    rule.factors.push_back({.size = size});
  }
  rule.inputs = {dims};
  rule.outputs = {dims};
  return rule;
}

}  // namespace

at::Tensor call_operator(const std::string& name, const at::Tensor& x) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name.c_str(), "")
      .typed<at::Tensor(const at::Tensor&)>()
      .call(x);
}

void register_operator_rules() {
  for (const char* name : {"fuzz::kernel_of_aten", "fuzz::with_autograd"}) {
    register_rule(name, &elementwise);
  }
}

}  // namespace tessera::fuzz
