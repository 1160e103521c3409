// silu(gate) * up of one tensor that has both, as a fused projection leaves them: backward gives
// one gradient, which need not be put together of two.

#include "fused/fused_operator.h"
#include "tessera/core/error.h"
#include "tessera/core/rule_builder.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/kernels/fused.h"

namespace tessera::detail {
namespace {

struct SiluAndMul : FusedOperator<SiluAndMul, at::Tensor(const at::Tensor&)> {
  static constexpr const char* name = "tessera::silu_and_mul";
  static constexpr const char* signature = "(Tensor gate_up) -> Tensor";
};

struct SiluAndMulBackward
    : FusedOperator<SiluAndMulBackward, at::Tensor(const at::Tensor&, const at::Tensor&)> {
  static constexpr const char* name = "tessera::silu_and_mul_backward";
  static constexpr const char* signature = "(Tensor grad, Tensor gate_up) -> Tensor";
};

/// The result as well, where that is to be computed again.
struct SiluAndMulWithGradient
    : FusedOperator<SiluAndMulWithGradient,
                    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&)> {
  static constexpr const char* name = "tessera::silu_and_mul_with_gradient";
  static constexpr const char* signature = "(Tensor grad, Tensor gate_up) -> (Tensor, Tensor)";
};

void check_gate_up(c10::IntArrayRef sizes) {
  TESSERA_CHECK(!sizes.empty() && sizes.back() % 2 == 0, "silu_mul of one tensor of sizes ", sizes,
                " was asked for; the last dimension must be gate and up, as long as each other");
}

at::Tensor run_silu_and_mul(const at::Tensor& gate_up) {
  check_gate_up(gate_up.sizes());
  return kernels::silu_and_mul(gate_up);
}

std::tuple<at::Tensor, at::Tensor> run_silu_and_mul_with_gradient(const at::Tensor& grad,
                                                                  const at::Tensor& gate_up) {
  return kernels::silu_and_mul_with_gradient(grad, gate_up);
}

/// Factors of gate_up, whose last dimension is two of those of the result.
struct HalvesFactors {
  rules::TensorFactors both, one;

  HalvesFactors(ShardingRule& rule, rules::Sizes sizes) {
    check_gate_up(sizes);
    sizes.back() /= 2;
    one = both = rules::add_factors(rule, sizes);
    both.back().insert(both.back().begin(), rules::add_unsharded(rule, 2));
  }
};

std::optional<ShardingRule> silu_and_mul_rule(const OpCall& call) {
  ShardingRule rule = rules::start(call);
  const HalvesFactors factors(rule, call.tensor(0).sizes);
  rules::input_of(rule, 0) = factors.both;
  rule.outputs = {factors.one};
  return rule;
}

/// `kWithResult`: the operator gives the result, too, before the gradient.
template <bool kWithResult>
std::optional<ShardingRule> silu_and_mul_backward_rule(const OpCall& call) {
  ShardingRule rule = rules::start(call);
  const HalvesFactors factors(rule, call.tensor(1).sizes);
  rules::input_of(rule, 0) = factors.one;
  rules::input_of(rule, 1) = factors.both;
  rule.outputs = {factors.both};
  if (kWithResult) {
    rule.outputs.insert(rule.outputs.begin(), factors.one);
  }
  return rule;
}

struct SiluAndMulNode final : RecomputableNode {
  SiluAndMulNode() : RecomputableNode("silu_mul", "SiluAndMulBackward") {}
  bool takes_gradient() const override { return true; }

 private:
  at::Tensor compute() override {
    return c10::GradMode::is_enabled() ? silu_mul(saved(0))
                                       : SiluAndMul::call_below_autograd(saved(0));
  }

  torch::autograd::variable_list differentiate(const at::Tensor& gradient) override {
    return {SiluAndMulBackward::call(gradient, saved(0))};
  }

  WithGradients compute_with(const at::Tensor& gradient) override {
    auto [result, of_both] = SiluAndMulWithGradient::call(gradient, saved(0));
    return {std::move(result), {std::move(of_both)}};
  }
};

at::Tensor differentiable_silu_and_mul(const at::Tensor& gate_up) {
  const auto node = node_for<SiluAndMulNode>(gate_up);
  if (node != nullptr) {
    // The input alone, which the matmul before this has made anyway.
    node->save(gate_up);
  }
  at::Tensor result = SiluAndMul::call_below_autograd(gate_up);
  if (node != nullptr) {
    node->record_with(result, gate_up);
  }
  return result;
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  define<SiluAndMul>(library, &run_silu_and_mul, silu_and_mul_rule, &differentiable_silu_and_mul);
  define<SiluAndMulBackward>(library, &kernels::silu_and_mul_backward,
                             silu_and_mul_backward_rule<false>);
  define<SiluAndMulWithGradient>(library, &run_silu_and_mul_with_gradient,
                                 silu_and_mul_backward_rule<true>);
}

}  // namespace

at::Tensor silu_mul(const at::Tensor& gate_up) {
  return SiluAndMul::call(gate_up);
}

}  // namespace tessera::detail
