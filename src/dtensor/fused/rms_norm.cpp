// RMS norm in one kernel: x / rms(x) * weight along the last dimension, also of the sum of two
// tensors, which is a result then. Rows are independent, so that any other dimension may be split.
// Backward needs x or the sum, and one number a row.

#include "fused/fused_operator.h"
#include "tessera/core/error.h"
#include "tessera/core/rule_builder.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/kernels/fused.h"

namespace tessera::detail {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

struct RmsNorm
    : FusedOperator<RmsNorm, TwoTensors(const at::Tensor&, const OptionalTensor&, double)> {
  static constexpr const char* name = "tessera::rms_norm";
  static constexpr const char* signature =
      "(Tensor x, Tensor? weight, float eps) -> (Tensor out, Tensor rstd)";
};

struct AddRmsNorm : FusedOperator<AddRmsNorm, ThreeTensors(const at::Tensor&, const at::Tensor&,
                                                           const OptionalTensor&, double)> {
  static constexpr const char* name = "tessera::add_rms_norm";
  static constexpr const char* signature =
      "(Tensor x, Tensor residual, Tensor? weight, float eps) -> "
      "(Tensor out, Tensor sum, Tensor rstd)";
};

/// `sum_grad`: the gradient of the sum of an add_rms_norm, whose `x` is the sum here.
struct RmsNormBackward
    : FusedOperator<RmsNormBackward,
                    TwoTensors(const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                               const at::Tensor&, const OptionalTensor&)> {
  static constexpr const char* name = "tessera::rms_norm_backward";
  static constexpr const char* signature =
      "(Tensor grad, Tensor x, Tensor? weight, Tensor rstd, Tensor? sum_grad=None) -> "
      "(Tensor, Tensor)";
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

void check_residual(c10::IntArrayRef x, c10::IntArrayRef residual) {
  TESSERA_CHECK(x == residual, "add_rms_norm of tensors of sizes ", x, " and ", residual,
                " was asked for; they must agree");
}

ThreeTensors run_add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                              const OptionalTensor& weight, double eps) {
  const at::Tensor scale = defined_or_not(weight);
  check_rms_norm_sizes(x.sizes(), scale.defined() ? std::optional(scale.sizes()) : std::nullopt);
  check_residual(x.sizes(), residual.sizes());
  TESSERA_CHECK(x.scalar_type() == residual.scalar_type(), "add_rms_norm of tensors of types ",
                x.scalar_type(), " and ", residual.scalar_type(),
                " was asked for; they must agree");
  auto [out, sum, rstd] = kernels::add_rms_norm(x, residual, scale, eps);
  return {std::move(out), std::move(sum), std::move(rstd)};
}

TwoTensors run_rms_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                 const OptionalTensor& weight, const at::Tensor& rstd,
                                 const OptionalTensor& sum_grad) {
  return kernels::rms_norm_backward(grad, x, defined_or_not(weight), rstd,
                                    defined_or_not(sum_grad));
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

/// The factors of a tensor that a call may leave out.
void set_optional(ShardingRule& rule, const OpCall& call, std::size_t arg,
                  const rules::TensorFactors& factors) {
  if (call.has_tensor(arg)) {
    rules::input_of(rule, call.tensor_index(arg)) = factors;
  }
}

/// The rule of a norm of `tensors` tensors, one or a sum of two. It has as many results like x.
RuleFunction::Body rule_of_norm(std::size_t tensors) {
  return [tensors](const OpCall& call) -> std::optional<ShardingRule> {
    check_rms_norm_sizes(call.tensor(0).sizes,
                         call.has_tensor(tensors)
                             ? std::optional<c10::IntArrayRef>(call.tensor(tensors).sizes)
                             : std::nullopt);
    ShardingRule rule = rules::start(call);
    const NormFactors factors(rule, call.tensor(0).sizes);
    for (std::size_t arg = 0; arg < tensors; ++arg) {
      check_residual(call.tensor(0).sizes, call.tensor(arg).sizes);
      rules::input_of(rule, call.tensor_index(arg)) = factors.x;
    }
    set_optional(rule, call, tensors, factors.weight);
    rule.outputs.assign(tensors, factors.x);
    rule.outputs.push_back(factors.rows);
    return rule;
  };
}

std::optional<ShardingRule> rms_norm_backward_rule(const OpCall& call) {
  ShardingRule rule = rules::start(call);
  const NormFactors factors(rule, call.tensor(1).sizes);
  rules::input_of(rule, call.tensor_index(0)) = factors.x;
  rules::input_of(rule, call.tensor_index(1)) = factors.x;
  set_optional(rule, call, 2, factors.weight);
  rules::input_of(rule, call.tensor_index(3)) = factors.rows;
  set_optional(rule, call, 4, factors.x);
  rule.outputs = {factors.x, factors.weight};
  return rule;
}

/// Saves what is normed, the weight and one number a row.
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

  at::Tensor compute() override {
    if (c10::GradMode::is_enabled()) {
      return rms_norm(saved(0), saved(1), eps_);
    }
    return std::get<0>(RmsNorm::call_below_autograd(saved(0), optional(weight_), eps_));
  }

  /// The second result, if there is one, is the sum of the first two inputs.
  variable_list differentiate_all(const variable_list& gradients) override {
    const bool adds = gradients.size() == 2;
    const at::Tensor of_sum = adds ? gradients[1] : at::Tensor();
    if (!gradients[0].defined()) {
      return {of_sum, of_sum, at::Tensor()};
    }
    const auto [of_x, of_weight] =
        RmsNormBackward::call(gradients[0], saved(0), saved(1), saved(2), optional(of_sum));
    return adds ? variable_list{of_x, of_x, of_weight} : variable_list{of_x, of_weight};
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

ThreeTensors differentiable_add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                         const OptionalTensor& weight, double eps) {
  const auto node = node_for<RmsNormNode>(x, residual, weight);
  ThreeTensors result = AddRmsNorm::call_below_autograd(x, residual, weight, eps);
  if (node != nullptr) {
    const auto& [out, sum, rstd] = result;
    node->take(defined_or_not(weight), eps);
    node->record_with(out, sum);
    node->record(sum);
    node->save_result(sum);
    node->save(defined_or_not(weight), rstd);
  }
  return result;
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  define<RmsNorm>(library, &run_rms_norm, rule_of_norm(1), &differentiable_rms_norm);
  define<AddRmsNorm>(library, &run_add_rms_norm, rule_of_norm(2), &differentiable_add_rms_norm);
  define<RmsNormBackward>(library, &run_rms_norm_backward, rms_norm_backward_rule);
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return std::get<0>(RmsNorm::call(x, optional(weight), eps));
}

std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                               const at::Tensor& weight, double eps) {
  // What an addition promotes or expands.
  if (x.scalar_type() != residual.scalar_type() || x.sizes() != residual.sizes()) {
    const at::Tensor sum = x.add(residual);
    return {rms_norm(sum, weight, eps), sum};
  }
  auto [out, sum, rstd] = AddRmsNorm::call(x, residual, optional(weight), eps);
  return {std::move(out), std::move(sum)};
}

}  // namespace tessera::detail
