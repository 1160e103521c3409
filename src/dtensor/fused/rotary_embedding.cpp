// Rotary position embeddings on (batch, sequence, heads, head_dim), by tables of cos and sin. A
// rotation is orthogonal, so that backward is the transposed rotation of the gradient and needs no
// input.

#include "fused/fused_operator.h"
#include "tessera/core/error.h"
#include "tessera/core/rule_builder.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/kernels/fused.h"

namespace tessera::detail {
namespace {

struct RotaryEmbedding
    : FusedOperator<RotaryEmbedding,
                    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool)> {
  static constexpr const char* name = "tessera::rotary_embedding";
  static constexpr const char* signature =
      "(Tensor x, Tensor cos, Tensor sin, bool transposed=False) -> Tensor";
};

void check_rotary_sizes(c10::IntArrayRef x, c10::IntArrayRef cos, c10::IntArrayRef sin) {
  TESSERA_CHECK(x.size() == 4 && x[3] % 2 == 0, "rotary_embedding of sizes ", x,
                " was asked for; it takes (batch, sequence, heads, head_dim), head_dim even");
  for (const c10::IntArrayRef table : {cos, sin}) {
    TESSERA_CHECK(table.size() == 2 && table[0] == x[1] && table[1] == x[3],
                  "rotary_embedding of sizes ", x, " was asked for with a table of sizes ", table,
                  "; it takes (sequence, head_dim)");
  }
}

at::Tensor run_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                      bool transposed) {
  check_rotary_sizes(x.sizes(), cos.sizes(), sin.sizes());
  return kernels::rotary_embedding(x, cos, sin, transposed);
}

/// The pairs that turn are within a head; the tables are split as the sequence is.
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

struct RotaryNode final : FusedNode {
  RotaryNode() : FusedNode("rotary_embedding", "RotaryEmbeddingBackward") {}
  bool transposed = false;

 private:
  torch::autograd::variable_list differentiate(const at::Tensor& gradient) override {
    return {RotaryEmbedding::call(gradient, saved(0), saved(1), !transposed)};
  }
};

at::Tensor differentiable_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                                 bool transposed) {
  TESSERA_CHECK(!is_recorded(cos, sin), "rotary_embedding takes tables that need no gradient");
  const auto node = node_for<RotaryNode>(x);
  if (node != nullptr) {
    // The tables, which all layers share; x is not needed.
    node->save(cos, sin);
    node->transposed = transposed;
  }
  return recorded(node, RotaryEmbedding::call_below_autograd(x, cos, sin, transposed));
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  define<RotaryEmbedding>(library, &run_rotary, rotary_rule, &differentiable_rotary);
}

}  // namespace

at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  return RotaryEmbedding::call(x, cos, sin, /*transposed=*/false);
}

}  // namespace tessera::detail
