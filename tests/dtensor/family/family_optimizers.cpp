// The list operators of optimizers.
#include <ATen/ATen.h>

#include "family_table.h"

namespace tessera::testing {
namespace {

Tensors clones(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) {
    result.push_back(tensor.detach().clone());
  }
  return result;
}

/// One parameter with its gradient and state.
Tensors fused_adamw(const Tensors& t) {
  const auto all = clones(t);
  const Tensors parameter{all[0]}, gradient{all[1]}, average{all[2]}, square{all[3]};
  const Tensors steps{at::ones({}, at::kFloat)};
  at::_fused_adamw_(parameter, gradient, average, square, {}, steps, 0.1, 0.9, 0.95, 0.01, 1e-8,
                    false, false);
  return {all[0], all[2], all[3]};
}

}  // namespace

std::vector<Family> optimizer_families() {
  const Operand matrix{{8, 6}}, vector{{6}};
  return {{
      "foreach and fused optimizers",
      {
          {"_foreach_add_",
           {matrix, vector, matrix, vector},
           [](auto& t) {
             const auto all = clones(t);
             const Tensors lists[] = {{all[0], all[1]}, {all[2], all[3]}};
             at::_foreach_add_(lists[0], lists[1], 0.5);
             return lists[0];
           },
           {{"S0 R S0 R", "S0 R", "-"},
            {"S0 S0 S0 S0", "S0 S0", "-"},
            {"S0,S1 R,S0 S0,S1 R,S0", "S0,S1 R,S0", "-"}},
           false},
          {"_foreach_mul_",
           {matrix, vector},
           [](auto& t) {
             const auto all = clones(t);
             at::_foreach_mul_(all, 0.5);
             return all;
           },
           {{"S0 R", "S0 R", "-"}, {"P P", "P P", "-"}},
           false},
          {"_foreach_lerp_",
           {matrix, matrix},
           [](auto& t) {
             const auto all = clones(t);
             at::_foreach_lerp_({all[0]}, {all[1]}, 0.1);
             return Tensors{all[0]};
           },
           {{"S0 S0", "S0", "-"}},
           false},
          {"_foreach_addcdiv_",
           {matrix, matrix, {{8, 6}, Operand::kPositive}},
           [](auto& t) {
             const auto all = clones(t);
             at::_foreach_addcdiv_({all[0]}, {all[1]}, {all[2]}, -0.1);
             return Tensors{all[0]};
           },
           {{"S0 S0 S0", "S0", "-"}},
           false},
          {"_foreach_sqrt",
           {{{8, 6}, Operand::kPositive}},
           [](auto& t) { return at::_foreach_sqrt(t); },
           {{"S0", "S0", "-"}},
           false},
          {"_fused_adamw_",
           {matrix, matrix, matrix, {{8, 6}, Operand::kPositive}},
           fused_adamw,
           {{"S0 S0 S0 S0", "S0 S0 S0", "-"},
            {"S0,S1 S0,S1 S0,S1 S0,S1", "S0,S1 S0,S1 S0,S1", "-"},
            {"R R R R", "R R R", "-"}},
           false},
      },
  }};
}

}  // namespace tessera::testing
