// silu(gate) * up in one kernel: the middle of a gated MLP. As separate operators, autograd would
// keep silu(gate) as well.

#include "fused/fused_operator.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/kernels/fused.h"

namespace tessera::detail {
namespace {

struct SiluMul : FusedOperator<SiluMul, at::Tensor(const at::Tensor&, const at::Tensor&)> {
  static constexpr const char* name = "tessera::silu_mul";
  static constexpr const char* signature = "(Tensor gate, Tensor up) -> Tensor";
};

struct SiluMulBackward
    : FusedOperator<SiluMulBackward, std::tuple<at::Tensor, at::Tensor>(
                                         const at::Tensor&, const at::Tensor&, const at::Tensor&)> {
  static constexpr const char* name = "tessera::silu_mul_backward";
  static constexpr const char* signature =
      "(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)";
};

/// The result as well, where that is to be computed again.
struct SiluMulWithGradients
    : FusedOperator<SiluMulWithGradients,
                    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
                        const at::Tensor&, const at::Tensor&, const at::Tensor&)> {
  static constexpr const char* name = "tessera::silu_mul_with_gradients";
  static constexpr const char* signature =
      "(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor, Tensor)";
};

void check_silu_mul_sizes(c10::IntArrayRef gate, c10::IntArrayRef up) {
  TESSERA_CHECK(gate == up, "silu_mul of tensors of sizes ", gate, " and ", up,
                " was asked for; they must agree");
}

at::Tensor run_silu_mul(const at::Tensor& gate, const at::Tensor& up) {
  check_silu_mul_sizes(gate.sizes(), up.sizes());
  TESSERA_CHECK(gate.scalar_type() == up.scalar_type(), "silu_mul of tensors of types ",
                gate.scalar_type(), " and ", up.scalar_type(), " was asked for; they must agree");
  return kernels::silu_mul(gate, up);
}

std::tuple<at::Tensor, at::Tensor> run_silu_mul_backward(const at::Tensor& grad,
                                                         const at::Tensor& gate,
                                                         const at::Tensor& up) {
  return kernels::silu_mul_backward(grad, gate, up);
}

std::optional<ShardingRule> silu_mul_rule(const OpCall& call) {
  check_silu_mul_sizes(call.tensor(0).sizes, call.tensor(1).sizes);
  return elementwise_rule(1)(call);
}

struct SiluMulNode final : RecomputableNode {
  SiluMulNode() : RecomputableNode("silu_mul", "SiluMulBackward") {}
  bool takes_gradient() const override { return true; }

 private:
  at::Tensor compute() override {
    return c10::GradMode::is_enabled() ? silu_mul(saved(0), saved(1))
                                       : SiluMul::call_below_autograd(saved(0), saved(1));
  }

  torch::autograd::variable_list differentiate(const at::Tensor& gradient) override {
    auto [of_gate, of_up] = SiluMulBackward::call(gradient, saved(0), saved(1));
    return {std::move(of_gate), std::move(of_up)};
  }

  WithGradients compute_with(const at::Tensor& gradient) override {
    auto [result, of_gate, of_up] = SiluMulWithGradients::call(gradient, saved(0), saved(1));
    return {std::move(result), {std::move(of_gate), std::move(of_up)}};
  }
};

at::Tensor differentiable_silu_mul(const at::Tensor& gate, const at::Tensor& up) {
  const auto node = node_for<SiluMulNode>(gate, up);
  if (node != nullptr) {
    // Inputs alone, which the matmuls before this have made anyway.
    node->save(gate, up);
  }
  at::Tensor result = SiluMul::call_below_autograd(gate, up);
  if (node != nullptr) {
    node->record_with(result, gate, up);
  }
  return result;
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  define<SiluMul>(library, &run_silu_mul, silu_mul_rule, &differentiable_silu_mul);
  define<SiluMulBackward>(library, &run_silu_mul_backward, elementwise_rule(2));
  define<SiluMulWithGradients>(library, &kernels::silu_mul_with_gradients, elementwise_rule(3));
}

}  // namespace

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) {
  return SiluMul::call(gate, up);
}

}  // namespace tessera::detail
