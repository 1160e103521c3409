// RMS norm in one kernel: x / rms(x) * weight along the last dimension. Rows are independent, so
// that any other dimension may be split. Backward needs x and one number a row.

#include "fused/fused_operator.h"
#include "tessera/core/error.h"
#include "tessera/core/rule_builder.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/memory_under_tensors.h"
#include "tessera/kernels/fused.h"

namespace tessera::detail {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

struct RmsNorm
    : FusedOperator<RmsNorm, TwoTensors(const at::Tensor&, const OptionalTensor&, double)> {
  static constexpr const char* name = "tessera::rms_norm";
  static constexpr const char* signature =
      "(Tensor x, Tensor? weight, float eps) -> (Tensor out, Tensor rstd)";
};

struct RmsNormBackward
    : FusedOperator<RmsNormBackward, TwoTensors(const at::Tensor&, const at::Tensor&,
                                                const OptionalTensor&, const at::Tensor&)> {
  static constexpr const char* name = "tessera::rms_norm_backward";
  static constexpr const char* signature =
      "(Tensor grad, Tensor x, Tensor? weight, Tensor rstd) -> (Tensor, Tensor)";
};

void check_rms_norm_sizes(c10::IntArrayRef x, std::optional<c10::IntArrayRef> weight) {
  TESSERA_CHECK(!x.empty(), "rms_norm of a scalar was asked for");
  TESSERA_CHECK(!weight || (weight->size() == 1 && weight->front() == x.back()),
                "rms_norm of sizes ", x, " was asked for with a weight of sizes ",
                weight.value_or(c10::IntArrayRef()));
}

at::Tensor defined_or_not(const OptionalTensor& tensor) {
  return tensor.value_or(at::Tensor());
}

OptionalTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

TwoTensors run_rms_norm(const at::Tensor& x, const OptionalTensor& weight, double eps) {
  const at::Tensor scale = defined_or_not(weight);
  check_rms_norm_sizes(x.sizes(), scale.defined() ? std::optional(scale.sizes()) : std::nullopt);
  auto [out, rstd] = kernels::rms_norm(x, scale, eps);
  return {std::move(out), std::move(rstd)};
}

TwoTensors run_rms_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                 const OptionalTensor& weight, const at::Tensor& rstd) {
  return kernels::rms_norm_backward(grad, x, defined_or_not(weight), rstd);
}

/// The factors of x, of one number a row, and of the weight.
struct NormFactors {
  rules::TensorFactors x, rows, weight;

  NormFactors(ShardingRule& rule, const rules::Sizes& sizes) {
    for (const std::int64_t size : std::span(sizes).first(sizes.size() - 1)) {
      // Each shard of the rows has its terms of the weight's gradient.
      x.push_back({rules::add_reduced(rule, size, ReduceOp::kSum)});
    }
    rows = x;
    rows.emplace_back();
    weight = {{rules::add_unsharded(rule, sizes.back())}};
    x.push_back(weight.front());
  }
};

void set_weight(ShardingRule& rule, const OpCall& call, std::size_t arg,
                const NormFactors& factors) {
  if (call.has_tensor(arg)) {
    rules::input_of(rule, call.tensor_index(arg)) = factors.weight;
  }
}

std::optional<ShardingRule> rms_norm_rule(const OpCall& call) {
  check_rms_norm_sizes(
      call.tensor(0).sizes,
      call.has_tensor(1) ? std::optional<c10::IntArrayRef>(call.tensor(1).sizes) : std::nullopt);
  ShardingRule rule = rules::start(call);
  const NormFactors factors(rule, call.tensor(0).sizes);
  rules::input_of(rule, call.tensor_index(0)) = factors.x;
  set_weight(rule, call, 1, factors);
  rule.outputs = {factors.x, factors.rows};
  return rule;
}

std::optional<ShardingRule> rms_norm_backward_rule(const OpCall& call) {
  ShardingRule rule = rules::start(call);
  const NormFactors factors(rule, call.tensor(1).sizes);
  rules::input_of(rule, call.tensor_index(0)) = factors.x;
  rules::input_of(rule, call.tensor_index(1)) = factors.x;
  set_weight(rule, call, 2, factors);
  rules::input_of(rule, call.tensor_index(3)) = factors.rows;
  rule.outputs = {factors.x, factors.weight};
  return rule;
}

struct RmsNormNode final : RecomputableNode {
  RmsNormNode() : RecomputableNode("rms_norm", "RmsNormBackward") {}

  /// What the result is made of beside x.
  void take(const at::Tensor& weight, double eps) {
    eps_ = eps;
    weight_ = weight;
    weight_writes_ = weight.defined() ? writes_of(weight) : 0;
  }

 private:
  /// A copy of the weight: the product that needs the result may run in backward while FSDP has
  /// not gathered the weight of the norm again.
  bool prepare() override {
    if (!weight_.defined() || copied_) {
      return true;
    }
    const bool moves = tessera::is_distributed(weight_)
                           ? !sharding_spec(weight_).layout->is_replicated()
                           : is_distributed();
    if (moves || writes_of(weight_) != weight_writes_ || !has_memory(local_tensor(weight_))) {
      return false;
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    weight_ = weight_.clone();
    return copied_ = true;
  }

  at::Tensor compute() const override {
    if (c10::GradMode::is_enabled()) {
      return rms_norm(saved(0), saved(1), eps_);
    }
    return std::get<0>(RmsNorm::call_below_autograd(saved(0), optional(weight_), eps_));
  }

  torch::autograd::variable_list differentiate(const at::Tensor& gradient) override {
    auto [of_x, of_weight] = RmsNormBackward::call(gradient, saved(0), saved(1), saved(2));
    return {std::move(of_x), std::move(of_weight)};
  }

  at::Tensor weight_;
  std::uint32_t weight_writes_ = 0;
  bool copied_ = false;
  double eps_ = 0;
};

TwoTensors differentiable_rms_norm(const at::Tensor& x, const OptionalTensor& weight, double eps) {
  const auto node = node_for<RmsNormNode>(x, weight);
  if (node != nullptr) {
    node->save(x, defined_or_not(weight));
  }
  TwoTensors result = RmsNorm::call_below_autograd(x, weight, eps);
  if (node != nullptr) {
    // It saves a pass over x in backward.
    node->save(std::get<1>(result));
    node->take(defined_or_not(weight), eps);
    node->record_with(std::get<0>(result), x);
  }
  return result;
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  define<RmsNorm>(library, &run_rms_norm, rms_norm_rule, &differentiable_rms_norm);
  define<RmsNormBackward>(library, &run_rms_norm_backward, rms_norm_backward_rule);
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return std::get<0>(RmsNorm::call(x, optional(weight), eps));
}

}  // namespace tessera::detail
