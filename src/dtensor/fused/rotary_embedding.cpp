// Rotary position embeddings on (batch, sequence, heads, head_dim), by tables of cos and sin. A
// rotation is orthogonal, so that backward is the transposed rotation of the gradient and needs no
// input.

#include <tuple>
#include <utility>

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

/// Turns queries and keys in one launch.
struct RotaryEmbeddingQk
    : FusedOperator<RotaryEmbeddingQk, std::tuple<at::Tensor, at::Tensor>(
                                           const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                           const at::Tensor&, bool)> {
  static constexpr const char* name = "tessera::rotary_embedding_qk";
  static constexpr const char* signature =
      "(Tensor q, Tensor k, Tensor cos, Tensor sin, bool transposed=False) -> (Tensor, Tensor)";
};

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
  TESSERA_CHECK(!is_recorded(cos, sin),
                "rotary_embedding takes tables that need no gradient; detach them");
  const auto node = node_for<RotaryNode>(x);
  if (node != nullptr) {
    // The tables, which all layers share; x is not needed.
    node->save(cos, sin);
    node->transposed = transposed;
  }
  return recorded(node, RotaryEmbedding::call_below_autograd(x, cos, sin, transposed));
}

void check_qk(c10::IntArrayRef q, c10::IntArrayRef k, c10::IntArrayRef cos, c10::IntArrayRef sin) {
  check_rotary_sizes(q, cos, sin);
  check_rotary_sizes(k, cos, sin);
  TESSERA_CHECK(q[0] == k[0], "rotary_embedding of queries and keys of sizes ", q, " and ", k,
                " was asked for; they must agree but for the heads");
}

std::tuple<at::Tensor, at::Tensor> run_rotary_qk(const at::Tensor& q, const at::Tensor& k,
                                                 const at::Tensor& cos, const at::Tensor& sin,
                                                 bool transposed) {
  check_qk(q.sizes(), k.sizes(), cos.sizes(), sin.sizes());
  TESSERA_CHECK(q.scalar_type() == k.scalar_type(),
                "rotary_embedding of queries and keys of types ", q.scalar_type(), " and ",
                k.scalar_type(), " was asked for; they must agree");
  return kernels::rotary_embedding_qk(q, k, cos, sin, transposed);
}

/// Heads are split as those of the keys are, each with its group of queries.
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

struct RotaryQkNode final : FusedNode {
  RotaryQkNode() : FusedNode("rotary_embedding", "RotaryEmbeddingQkBackward") {}
  bool transposed = false;

 private:
  variable_list differentiate_all(const variable_list& gradients) override {
    const auto turned_back = [this](const at::Tensor& gradient) {
      return gradient.defined() ? RotaryEmbedding::call(gradient, saved(0), saved(1), !transposed)
                                : at::Tensor();
    };
    if (!gradients[0].defined() || !gradients[1].defined()) {
      return {turned_back(gradients[0]), turned_back(gradients[1])};
    }
    auto [of_q, of_k] =
        RotaryEmbeddingQk::call(gradients[0], gradients[1], saved(0), saved(1), !transposed);
    return {std::move(of_q), std::move(of_k)};
  }
};

std::tuple<at::Tensor, at::Tensor> differentiable_rotary_qk(const at::Tensor& q,
                                                            const at::Tensor& k,
                                                            const at::Tensor& cos,
                                                            const at::Tensor& sin,
                                                            bool transposed) {
  TESSERA_CHECK(!is_recorded(cos, sin),
                "rotary_embedding takes tables that need no gradient; detach them");
  const auto node = node_for<RotaryQkNode>(q, k);
  if (node != nullptr) {
    node->save(cos, sin);
    node->transposed = transposed;
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

}  // namespace tessera::detail
