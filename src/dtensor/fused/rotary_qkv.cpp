// Queries, keys and values of one product, the first two turned by their positions. The three are
// dense, so that the product is not kept for backward, which gives its gradient in one tensor.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "fused/fused_operator.h"
#include "tessera/core/error.h"
#include "tessera/core/rule_builder.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/kernels/fused.h"

namespace tessera::detail {
namespace {

using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

struct RotaryQkv : FusedOperator<RotaryQkv, ThreeTensors(const at::Tensor&, const at::Tensor&,
                                                         const at::Tensor&)> {
  static constexpr const char* name = "tessera::rotary_qkv";
  static constexpr const char* signature =
      "(Tensor qkv, Tensor cos, Tensor sin) -> (Tensor, Tensor, Tensor)";
};

struct RotaryQkvBackward
    : FusedOperator<RotaryQkvBackward,
                    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&)> {
  static constexpr const char* name = "tessera::rotary_qkv_backward";
  static constexpr const char* signature =
      "(Tensor q_grad, Tensor k_grad, Tensor v_grad, Tensor cos, Tensor sin) -> Tensor";
};

void check_rotary_qkv(c10::IntArrayRef qkv, c10::IntArrayRef cos, c10::IntArrayRef sin) {
  TESSERA_CHECK(qkv.size() == 5 && qkv[3] > 2 && qkv[4] % 2 == 0, "rotary_qkv of sizes ", qkv,
                " was asked for; it takes (batch, sequence, groups, query heads + 2, head_dim), "
                "head_dim even");
  for (const c10::IntArrayRef table : {cos, sin}) {
    TESSERA_CHECK(table.size() == 2 && table[0] == qkv[1] && table[1] == qkv[4],
                  "rotary_qkv of sizes ", qkv, " was asked for with a table of sizes ", table,
                  "; it takes (sequence, head_dim)");
  }
}

ThreeTensors run_rotary_qkv(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin) {
  check_rotary_qkv(qkv.sizes(), cos.sizes(), sin.sizes());
  return kernels::rotary_qkv(qkv, cos, sin);
}

/// Groups are whole; so are heads.
struct QkvFactors {
  rules::TensorFactors qkv, q, kv, table;

  /// `sizes`: of qkv.
  QkvFactors(ShardingRule& rule, const rules::Sizes& sizes) {
    for (const std::size_t d : {0, 1, 2}) {
      kv.push_back({rules::add_factor(rule, sizes[d])});
    }
    const rules::Factors of_head{rules::add_unsharded(rule, sizes[4])};
    qkv = q = kv;
    qkv.push_back({rules::add_unsharded(rule, sizes[3])});
    q.push_back({rules::add_unsharded(rule, sizes[3] - 2)});
    for (rules::TensorFactors* each : {&qkv, &q, &kv}) {
      each->push_back(of_head);
    }
    table = {kv[1], of_head};
  }
};

std::optional<ShardingRule> rotary_qkv_rule(const OpCall& call) {
  const rules::Sizes& sizes = call.tensor(0).sizes;
  check_rotary_qkv(sizes, call.tensor(1).sizes, call.tensor(2).sizes);
  ShardingRule rule = rules::start(call);
  const QkvFactors factors(rule, sizes);
  rules::input_of(rule, 0) = factors.qkv;
  rules::input_of(rule, 1) = rules::input_of(rule, 2) = factors.table;
  rule.outputs = {factors.q, factors.kv, factors.kv};
  return rule;
}

std::optional<ShardingRule> rotary_qkv_backward_rule(const OpCall& call) {
  rules::Sizes sizes = call.tensor(0).sizes;
  sizes[3] += 2;
  ShardingRule rule = rules::start(call);
  const QkvFactors factors(rule, sizes);
  rules::input_of(rule, 0) = factors.q;
  rules::input_of(rule, 1) = rules::input_of(rule, 2) = factors.kv;
  rules::input_of(rule, 3) = rules::input_of(rule, 4) = factors.table;
  rule.outputs = {factors.qkv};
  return rule;
}

struct RotaryQkvNode final : FusedNode {
  RotaryQkvNode() : FusedNode("rotary_qkv", "RotaryQkvBackward") {}
  c10::SmallVector<std::int64_t, 5> sizes;  ///< of qkv

 private:
  variable_list differentiate_all(const variable_list& gradients) override {
    const auto given = [&](std::size_t i) {
      return gradients[i].defined() ? gradients[i] : zeros(gradients, i == 0);
    };
    return {RotaryQkvBackward::call(given(0), given(1), given(2), saved(0), saved(1))};
  }

  /// The gradient of a result that the loss does not depend on.
  at::Tensor zeros(const variable_list& gradients, bool of_queries) const {
    c10::SmallVector<std::int64_t, 5> of_result = sizes;
    if (of_queries) {
      of_result[3] -= 2;
    } else {
      of_result.erase(of_result.begin() + 3);
    }
    const auto known = std::ranges::find_if(gradients, [](const auto& g) { return g.defined(); });
    return known->new_zeros(of_result);
  }
};

ThreeTensors differentiable_rotary_qkv(const at::Tensor& qkv, const at::Tensor& cos,
                                       const at::Tensor& sin) {
  TESSERA_CHECK(!is_recorded(cos, sin),
                "rotary_qkv takes tables that need no gradient; detach them");
  const auto node = node_for<RotaryQkvNode>(qkv);
  if (node != nullptr) {
    node->save(cos, sin);
    node->sizes = qkv.sizes();
  }
  ThreeTensors result = RotaryQkv::call_below_autograd(qkv, cos, sin);
  recorded(node, std::get<0>(result));
  recorded(node, std::get<1>(result));
  recorded(node, std::get<2>(result));
  return result;
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  define<RotaryQkv>(library, &run_rotary_qkv, rotary_qkv_rule, &differentiable_rotary_qkv);
  define<RotaryQkvBackward>(library, &kernels::rotary_qkv_backward, rotary_qkv_backward_rule);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> rotary_qkv(const at::Tensor& qkv,
                                                          const at::Tensor& cos,
                                                          const at::Tensor& sin) {
  return RotaryQkv::call(qkv, cos, sin);
}

}  // namespace tessera::detail
