// Fused operators of a Transformer block: silu(x) * y, dropout, rotary embedding, RMSNorm.

#include <tuple>
#include <utility>

#include "fused/fused_operator.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/core/sharding_rule.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/kernels/detail/fused.h"
#include "tessera/kernels/detail/random.h"

namespace tessera::detail {

// The operator silu(gate) * up in one kernel, for the middle of a gated MLP. If silu and the
// product were separate operators, autograd would also save silu(gate).

namespace {

struct SiluMul : FusedOperator<SiluMul, at::Tensor(const at::Tensor&, const at::Tensor&)> {
  static constexpr const char* name = "tessera::silu_mul";
  static constexpr const char* signature = "(Tensor gate, Tensor up) -> Tensor";
};

struct SiluMulBackward
    : FusedOperator<SiluMulBackward,
                    TwoTensors(const at::Tensor&, const at::Tensor&, const at::Tensor&)> {
  static constexpr const char* name = "tessera::silu_mul_backward";
  static constexpr const char* signature =
      "(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)";
};

struct SiluMulWithGradients
    : FusedOperator<SiluMulWithGradients,
                    ThreeTensors(const at::Tensor&, const at::Tensor&, const at::Tensor&)> {
  static constexpr const char* name = "tessera::silu_mul_with_gradients";
  static constexpr const char* signature =
      "(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor, Tensor)";
};

void check_silu_mul_sizes(c10::IntArrayRef gate, c10::IntArrayRef up) {
  TESSERA_CHECK(gate == up, "silu_mul: gate has sizes ", gate, " and up has sizes ", up,
                "; the sizes must be equal");
}

at::Tensor run_silu_mul(const at::Tensor& gate, const at::Tensor& up) {
  check_silu_mul_sizes(gate.sizes(), up.sizes());
  TESSERA_CHECK(gate.scalar_type() == up.scalar_type(), "silu_mul: gate has type ",
                gate.scalar_type(), " and up has type ", up.scalar_type(), "; pass equal types");
  return kernels::silu_mul(gate, up);
}

TwoTensors run_silu_mul_backward(const at::Tensor& grad, const at::Tensor& gate,
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

  variable_list differentiate(const variable_list& gradients) override {
    auto [of_gate, of_up] = SiluMulBackward::call(gradients[0], saved(0), saved(1));
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

// Dropout with a mask drawn from the random key and each element's global index, so every mesh gets
// the same mask. Backward draws the mask again, so the mask is never saved.

namespace {

/// `seed` and `stream`: the bits of a RandomKey. `first_element`: the global index of the first
/// element of x. `place`: flat_place() of a shard `x`, otherwise empty. Cache keys lack the
/// Scalars, because `stream` changes.
struct Dropout : FusedOperator<Dropout, at::Tensor(const at::Tensor&, double, const at::Scalar&,
                                                   const at::Scalar&, const at::Scalar&,
                                                   c10::SymIntArrayRef)> {
  static constexpr const char* name = "tessera::dropout";
  static constexpr const char* signature =
      "(Tensor x, float p, Scalar seed, Scalar stream, Scalar first_element=0, SymInt[] place=[])"
      " -> Tensor";
};

std::uint64_t bits_of(const at::Scalar& number) {
  return static_cast<std::uint64_t>(number.toLong());
}
at::Scalar number_of(std::uint64_t bits) {
  return static_cast<std::int64_t>(bits);
}

kernels::GlobalPlace place_of(const at::Tensor& x, c10::IntArrayRef place, std::int64_t first) {
  if (place.empty()) {
    return kernels::GlobalPlace::whole(x.sizes().vec(), first);
  }
  FlatPlace part = read_flat_place(place, static_cast<std::size_t>(x.dim()));
  return {std::move(part.boxes), std::move(part.sizes), first};
}

at::Tensor run_dropout(const at::Tensor& x, double p, const at::Scalar& seed,
                       const at::Scalar& stream, const at::Scalar& first_element,
                       c10::SymIntArrayRef place) {
  TESSERA_CHECK(p >= 0.0 && p < 1.0, "dropout: the probability is ", p, ", but must be in [0, 1)");
  if (x.is_meta()) {
    return at::empty_like(x, at::MemoryFormat::Contiguous);
  }
  return kernels::dropout(x, place_of(x, C10_AS_INTARRAYREF_SLOW(place), first_element.toLong()), p,
                          {bits_of(seed), bits_of(stream)});
}

std::optional<ShardingRule> dropout_rule(const OpCall& call) {
  std::optional<ShardingRule> rule = elementwise_rule(1)(call);
  rule->place_arguments = {{.arg = 5, .input = 0}};
  return rule;
}

at::Tensor differentiable_dropout(const at::Tensor& x, double p, const at::Scalar& seed,
                                  const at::Scalar& stream, const at::Scalar& first_element,
                                  c10::SymIntArrayRef place) {
  const auto backward = [=, place = place.vec()](FusedNode&, const variable_list& gradients) {
    return variable_list{Dropout::call(gradients[0], p, seed, stream, first_element, place)};
  };
  return recorded(formula_node("dropout", "DropoutBackward", backward, x),
                  Dropout::call_below_autograd(x, p, seed, stream, first_element, place));
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  define<Dropout>(library, &run_dropout, dropout_rule, &differentiable_dropout);
}

}  // namespace

at::Tensor dropout(const at::Tensor& x, double p, RandomKey key, std::int64_t first_element) {
  return Dropout::call(x, p, number_of(key.seed), number_of(key.stream), first_element, {});
}

// Rotary position embedding of (batch, sequence, heads, head_dim) by tables of cosines and sines.
// Backward rotates the gradient back and needs no saved input.

namespace {

struct RotaryEmbedding
    : FusedOperator<RotaryEmbedding,
                    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool)> {
  static constexpr const char* name = "tessera::rotary_embedding";
  static constexpr const char* signature =
      "(Tensor x, Tensor cos, Tensor sin, bool transposed=False) -> Tensor";
};

void check_rotary_sizes(c10::IntArrayRef x, c10::IntArrayRef cos, c10::IntArrayRef sin) {
  TESSERA_CHECK(x.size() == 4 && x[3] % 2 == 0, "rotary_embedding: the input has sizes ", x,
                "; pass (batch, sequence, heads, head_dim) with an even head_dim");
  for (const c10::IntArrayRef table : {cos, sin}) {
    TESSERA_CHECK(table.size() == 2 && table[0] == x[1] && table[1] == x[3],
                  "rotary_embedding: the input has sizes ", x, " and a table has sizes ", table,
                  "; each table must be (sequence, head_dim)");
  }
}

struct RotaryEmbeddingQk
    : FusedOperator<RotaryEmbeddingQk, TwoTensors(const at::Tensor&, const at::Tensor&,
                                                  const at::Tensor&, const at::Tensor&, bool)> {
  static constexpr const char* name = "tessera::rotary_embedding_qk";
  static constexpr const char* signature =
      "(Tensor q, Tensor k, Tensor cos, Tensor sin, bool transposed=False) -> (Tensor, Tensor)";
};

at::Tensor run_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                      bool transposed) {
  check_rotary_sizes(x.sizes(), cos.sizes(), sin.sizes());
  return kernels::rotary_embedding(x, cos, sin, transposed);
}

/// The sharding rule of rotary embedding. Heads may be sharded, because a rotation combines two
/// elements of one head. The cos and sin tables are sharded like the sequence.
std::optional<ShardingRule> rotary_rule(const OpCall& call) {
  const rules::Sizes& sizes = call.tensor(0).sizes;
  check_rotary_sizes(sizes, call.tensor(1).sizes, call.tensor(2).sizes);
  ShardingRule rule = rules::start(call);
  rules::TensorFactors x = rules::add_factors(rule, sizes);
  rules::keep_unsharded(rule, x[3]);
  rules::input_of(rule, 0) = x;
  rules::input_of(rule, 1) = rules::input_of(rule, 2) = {x[1], x[3]};
  rule.outputs = {x};
  return rule;
}

void check_tables_are_constant(const at::Tensor& cos, const at::Tensor& sin) {
  TESSERA_CHECK(!is_recorded(cos, sin),
                "rotary_embedding: the tables must not require a gradient; detach them");
}

at::Tensor differentiable_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                                 bool transposed) {
  check_tables_are_constant(cos, sin);
  const auto backward = [transposed](FusedNode& node, const variable_list& gradients) {
    return variable_list{
        RotaryEmbedding::call(gradients[0], node.saved(0), node.saved(1), !transposed)};
  };
  const auto node = formula_node("rotary_embedding", "RotaryEmbeddingBackward", backward, x);
  if (node != nullptr) {
    node->save(cos, sin);
  }
  return recorded(node, RotaryEmbedding::call_below_autograd(x, cos, sin, transposed));
}

void check_qk(c10::IntArrayRef q, c10::IntArrayRef k, c10::IntArrayRef cos, c10::IntArrayRef sin) {
  check_rotary_sizes(q, cos, sin);
  check_rotary_sizes(k, cos, sin);
  TESSERA_CHECK(q[0] == k[0], "rotary_embedding: the queries have sizes ", q,
                " and the keys have sizes ", k, "; only the numbers of heads may differ");
}

TwoTensors run_rotary_qk(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                         const at::Tensor& sin, bool transposed) {
  check_qk(q.sizes(), k.sizes(), cos.sizes(), sin.sizes());
  TESSERA_CHECK(q.scalar_type() == k.scalar_type(), "rotary_embedding: the queries have type ",
                q.scalar_type(), " and the keys have type ", k.scalar_type(), "; pass equal types");
  return kernels::rotary_embedding_qk(q, k, cos, sin, transposed);
}

/// The sharding rule of rotary_embedding_qk: a key head is on the same rank as its query heads.
std::optional<ShardingRule> rotary_qk_rule(const OpCall& call) {
  const rules::Sizes& sizes = call.tensor(1).sizes;
  check_qk(call.tensor(0).sizes, sizes, call.tensor(2).sizes, call.tensor(3).sizes);
  const std::int64_t query_heads = call.tensor(0).sizes[2];
  ShardingRule rule = rules::start(call);
  const rules::TensorFactors k = rules::add_factors(rule, sizes);
  rules::keep_unsharded(rule, k[3]);
  rules::TensorFactors q = k;
  if (sizes[2] > 0 && query_heads % sizes[2] == 0) {
    q[2].push_back(rules::add_unsharded(rule, query_heads / sizes[2]));
  } else {
    q[2] = {rules::add_factor(rule, query_heads)};
  }
  rules::input_of(rule, 0) = q;
  rules::input_of(rule, 1) = k;
  rules::input_of(rule, 2) = rules::input_of(rule, 3) = {q[1], q[3]};
  rule.outputs = {q, k};
  return rule;
}

TwoTensors differentiable_rotary_qk(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                                    const at::Tensor& sin, bool transposed) {
  check_tables_are_constant(cos, sin);
  const auto backward = [transposed](FusedNode& node, const variable_list& gradients) {
    const auto turned_back = [&](const at::Tensor& gradient) {
      return gradient.defined()
                 ? RotaryEmbedding::call(gradient, node.saved(0), node.saved(1), !transposed)
                 : at::Tensor();
    };
    if (!gradients[0].defined() || !gradients[1].defined()) {
      return variable_list{turned_back(gradients[0]), turned_back(gradients[1])};
    }
    auto [of_q, of_k] = RotaryEmbeddingQk::call(gradients[0], gradients[1], node.saved(0),
                                                node.saved(1), !transposed);
    return variable_list{std::move(of_q), std::move(of_k)};
  };
  const auto node = formula_node("rotary_embedding", "RotaryEmbeddingQkBackward", backward, q, k);
  if (node != nullptr) {
    node->save(cos, sin);
  }
  auto result = RotaryEmbeddingQk::call_below_autograd(q, k, cos, sin, transposed);
  recorded(node, std::get<0>(result));
  recorded(node, std::get<1>(result));
  return result;
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  define<RotaryEmbedding>(library, &run_rotary, rotary_rule, &differentiable_rotary);
  define<RotaryEmbeddingQk>(library, &run_rotary_qk, rotary_qk_rule, &differentiable_rotary_qk);
}

}  // namespace

at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  return RotaryEmbedding::call(x, cos, sin, /*transposed=*/false);
}

std::pair<at::Tensor, at::Tensor> rotary_embedding(const at::Tensor& q, const at::Tensor& k,
                                                   const at::Tensor& cos, const at::Tensor& sin) {
  auto [turned_q, turned_k] = RotaryEmbeddingQk::call(q, k, cos, sin, /*transposed=*/false);
  return {std::move(turned_q), std::move(turned_k)};
}

// RMS norm in one kernel: x / rms(x) * weight along the last dimension, which is unsharded.
// add_rms_norm also returns the sum x + residual. Backward needs the input and `rstd` = 1 / rms(x).

namespace {

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
  TESSERA_CHECK(!x.empty(), "rms_norm: the input is a scalar; pass at least one dimension");
  TESSERA_CHECK(!weight || (weight->size() == 1 && weight->front() == x.back()),
                "rms_norm: the input has sizes ", x, " and the weight has sizes ",
                weight.value_or(c10::IntArrayRef()),
                "; the weight must have the size of the last dimension");
}

at::Tensor defined_or_not(const OptionalTensor& tensor) {
  return tensor.value_or(at::Tensor());
}

TwoTensors run_rms_norm(const at::Tensor& x, const OptionalTensor& weight, double eps) {
  const at::Tensor scale = defined_or_not(weight);
  check_rms_norm_sizes(x.sizes(), scale.defined() ? std::optional(scale.sizes()) : std::nullopt);
  auto [out, rstd] = kernels::rms_norm(x, scale, eps);
  return {std::move(out), std::move(rstd)};
}

void check_residual(c10::IntArrayRef x, c10::IntArrayRef residual) {
  TESSERA_CHECK(x == residual, "add_rms_norm: x has sizes ", x, " and residual has sizes ",
                residual, "; the sizes must be equal");
}

ThreeTensors run_add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                              const OptionalTensor& weight, double eps) {
  const at::Tensor scale = defined_or_not(weight);
  check_rms_norm_sizes(x.sizes(), scale.defined() ? std::optional(scale.sizes()) : std::nullopt);
  check_residual(x.sizes(), residual.sizes());
  TESSERA_CHECK(x.scalar_type() == residual.scalar_type(), "add_rms_norm: x has type ",
                x.scalar_type(), " and residual has type ", residual.scalar_type(),
                "; pass equal types");
  auto [out, sum, rstd] = kernels::add_rms_norm(x, residual, scale, eps);
  return {std::move(out), std::move(sum), std::move(rstd)};
}

TwoTensors run_rms_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                 const OptionalTensor& weight, const at::Tensor& rstd,
                                 const OptionalTensor& sum_grad) {
  return kernels::rms_norm_backward(grad, x, defined_or_not(weight), rstd,
                                    defined_or_not(sum_grad));
}

struct NormFactors {
  rules::TensorFactors x, rows, weight;

  NormFactors(ShardingRule& rule, const rules::Sizes& sizes) {
    for (const std::int64_t size : std::span(sizes).first(sizes.size() - 1)) {
      // The gradient of the weight is a sum over rows, so each shard computes one term.
      x.push_back({rules::add_reduced(rule, size, ReduceOp::kSum)});
    }
    rows = x;
    rows.emplace_back();
    weight = {{rules::add_unsharded(rule, sizes.back())}};
    x.push_back(weight.front());
  }
};

void set_optional(ShardingRule& rule, const OpCall& call, std::size_t arg,
                  const rules::TensorFactors& factors) {
  if (call.has_tensor(arg)) {
    rules::input_of(rule, call.tensor_index(arg)) = factors;
  }
}

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

/// The autograd node of RMS norm. Saves `rstd` (1 / rms of each row), so that backward needs no
/// additional pass over the input.
struct RmsNormNode final : RecomputableNode {
  RmsNormNode() : RecomputableNode("rms_norm", "RmsNormBackward") {}

  void take(const at::Tensor& weight, double eps) {
    eps_ = eps;
    weight_ = weight;
    weight_writes_ = weight.defined() ? writes_of(weight) : 0;
  }

 private:
  /// Called when another autograd node saves this node instead of the norm's result. Copies the
  /// weight, because FSDP may free the gathered weight before the result is recomputed.
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
    return std::get<0>(RmsNorm::call_below_autograd(saved(0), optional_tensor(weight_), eps_));
  }

  variable_list differentiate(const variable_list& gradients) override {
    const bool adds = gradients.size() == 2;
    const at::Tensor of_sum = adds ? gradients[1] : at::Tensor();
    if (!gradients[0].defined()) {
      return {of_sum, of_sum, at::Tensor()};
    }
    const auto [of_x, of_weight] =
        RmsNormBackward::call(gradients[0], saved(0), saved(1), saved(2), optional_tensor(of_sum));
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
  return std::get<0>(RmsNorm::call(x, optional_tensor(weight), eps));
}

std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                               const at::Tensor& weight, double eps) {
  // The kernel of add_rms_norm does not promote dtypes or broadcast. For inputs that need either,
  // at::add and rms_norm are called.
  if (x.scalar_type() != residual.scalar_type() || x.sizes() != residual.sizes()) {
    const at::Tensor sum = x.add(residual);
    return {rms_norm(sum, weight, eps), sum};
  }
  auto [out, sum, rstd] = AddRmsNorm::call(x, residual, optional_tensor(weight), eps);
  return {std::move(out), std::move(sum)};
}

}  // namespace tessera::detail
