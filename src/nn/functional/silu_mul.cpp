// silu(gate) * up in one kernel: the middle of a gated MLP. As separate operators, autograd would
// keep silu(gate) as well. Elementwise, so that any layout will do if both operands have it.

#include <torch/csrc/autograd/custom_function.h>

#include "functional/autograd_helpers.h"
#include "tessera/core/error.h"
#include "tessera/kernels/detail/fused.h"
#include "tessera/nn/functional.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct SiluMulFunction : torch::autograd::Function<SiluMulFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate,
                            const at::Tensor& up) {
    // Inputs alone, which the matmuls before this have made anyway.
    context->save_for_backward({gate, up});
    context->set_materialize_grads(false);
    return wrap_local(kernels::silu_mul(local_tensor(gate), local_tensor(up)), spec_of(gate),
                      gate.sizes().vec());
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_double_backward("silu_mul");
    if (!grads[0].defined()) {
      return {{}, {}};
    }
    const variable_list saved = context->get_saved_variables();
    // Both operands', as silu_mul() has checked.
    const MaybeSpec spec = spec_of(saved[0]);
    const std::vector<std::int64_t> sizes = saved[0].sizes().vec();
    const auto [gate_grad, up_grad] = kernels::silu_mul_backward(
        local_gradient(grads[0], spec), local_tensor(saved[0]), local_tensor(saved[1]));
    return {wrap_local(gate_grad, spec, sizes), wrap_local(up_grad, spec, sizes)};
  }
};

}  // namespace

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) {
  const MaybeSpec spec = spec_of(gate);
  TESSERA_CHECK(gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(),
                "silu_mul of tensors of sizes ", gate.sizes(), " and ", up.sizes(), ", types ",
                gate.scalar_type(), " and ", up.scalar_type(), " was asked for; they must agree");
  TESSERA_CHECK(spec == spec_of(up),
                "silu_mul of tensors of different layouts was asked for; redistribute one of them");
  refuse_partial("silu_mul", spec);
  return SiluMulFunction::apply(gate, up);
}

}  // namespace tessera::nn
