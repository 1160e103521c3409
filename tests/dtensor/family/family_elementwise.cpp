// Operators on elements, one by one or along nothing that is split.
#include <ATen/ATen.h>

#include "family_table.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::testing {
namespace {

Family pointwise() {
  return {"pointwise",
          {
              {"silu",
               {{{8, 6}}},
               [](auto& t) { return Tensors{at::silu(t[0])}; },
               {{"S0", "S0", "-", "S0", "-"},
                {"S1", "S1", "-", "S1", "-"},
                {"R", "R", "-", "R", "-"},
                {"P", "R", "all_reduce 384", "R", "all_reduce 384"},
                {"S0,S1", "S0,S1", "-", "S0,S1", "-"},
                {"S0,S0", "S0,S0", "-", "S0,S0", "-"}}},
              {"neg",
               {{{8, 6}}},
               [](auto& t) { return Tensors{at::neg(t[0])}; },
               {{"S0", "S0", "-", "S0", "-"},
                {"P", "P", "-", "R", "-"},
                {"S1,P", "S1,P", "-", "S1,R", "-"}}},
              {"add",
               {{{8, 8}}, {{8, 8}}},
               [](auto& t) { return Tensors{t[0] + t[1]}; },
               {{"S0 S0", "S0", "-", "S0 S0", "-"},
                {"S0 R", "S0", "-", "S0 S0", "-"},
                {"R S1", "S1", "-", "S1 S1", "-"},
                {"P P", "P", "-", "R R", "-"},
                {"P R", "P", "-", "R R", "-"},
                {"P S0", "S0", "reduce_scatter 512", "S0 S0", "-"},
                {"S0 S1", "S0", "all_to_all 128", "S0 S0", "-"},
                {"S0,S1 S0,S1", "S0,S1", "-", "S0,S1 S0,S1", "-"}}},
              {"add, broadcast",
               {{{8, 6}}, {{6}}},
               [](auto& t) { return Tensors{t[0] + t[1]}; },
               {{"S0 R", "S0", "-", "S0 P", "-"},
                {"S1 S0", "S1", "-", "S1 S0", "-"},
                {"S1 R", "S1", "-", "S1 S0", "-"},
                {"S0,S1 R,S0", "S0,S1", "-", "S0,S1 P,S0", "-"}}},
              {"mul",
               {{{8, 6}}, {{8, 6}}},
               [](auto& t) { return Tensors{t[0] * t[1]}; },
               {{"S0 S0", "S0", "-", "S0 S0", "-"},
                {"S0 R", "S0", "-", "S0 S0", "-"},
                {"P R", "P", "-", "R P", "-"},
                {"S1,P S1,R", "S1,P", "-", "S1,R S1,P", "-"}}},
              {"div",
               {{{8, 6}}, {{8, 6}, Operand::kPositive}},
               [](auto& t) { return Tensors{t[0] / t[1]}; },
               {{"S0 S0", "S0", "-", "S0 S0", "-"}, {"P R", "P", "-", "R P", "-"}}},
              {"pow",
               {{{8, 6}}},
               [](auto& t) { return Tensors{t[0].pow(2)}; },
               {{"S0", "S0", "-", "S0", "-"}, {"P", "R", "all_reduce 384", "R", "all_reduce 384"}}},
              {"gelu",
               {{{7, 6}}},
               [](auto& t) { return Tensors{at::gelu(t[0])}; },
               {{"S0", "S0", "-", "S0", "-"}, {"S1", "S1", "-", "S1", "-"}}},
              {"clamp",
               {{{8, 6}}},
               [](auto& t) { return Tensors{t[0].clamp(-0.5, 0.5)}; },
               {{"S0", "S0", "-", "S0", "-"}, {"S1", "S1", "-", "S1", "-"}}},
              {"add_ in place",
               {{{8, 6}}, {{8, 6}}},
               [](auto& t) { return Tensors{t[0].clone().add_(t[1])}; },
               {{"S0 S0", "S0", "-", "S0 S0", "-"},
                {"S0 R", "S0", "-", "S0 S0", "-"},
                {"S0 P", "S0", "reduce_scatter 384", "S0 S0", "-"},
                {"P P", "P", "-", "R R", "-"}}},
              {"mul_ in place",
               {{{8, 6}}, {{6}}},
               [](auto& t) { return Tensors{t[0].clone().mul_(t[1])}; },
               {{"S0 R", "S0", "-", "S0 P", "-"}, {"S1 S0", "S1", "-", "S1 S0", "-"}}},
              {"exp, out=",
               {{{8, 6}}, {{8, 6}}},
               [](auto& t) {
                 auto out = t[1].detach().clone();
                 return Tensors{at::exp_out(out, t[0].detach())};
               },
               {{"S0 S0", "S0", "-"}, {"S1 S1", "S1", "-"}},
               false},
              {"relu",
               {{{8, 6}}},
               [](auto& t) { return Tensors{at::relu(t[0])}; },
               {{"S0", "S0", "-", "S0", "-"}, {"S0,S0", "S0,S0", "-", "S0,S0", "-"}}},
          }};
}

Family masking() {
  return {"where, masked_fill, tril, triu",
          {
              {"where",
               {{{8, 6}, Operand::kMask}, {{8, 6}}, {{8, 6}}},
               [](auto& t) { return Tensors{at::where(t[0], t[1], t[2])}; },
               {{"S0 S0 S0", "S0", "-", "S0 S0", "-"},
                {"S1 S1 R", "S1", "-", "S1 S1", "-"},
                {"R P P", "P", "-", "R R", "-"},
                {"S0,S1 S0,S1 S0,S1", "S0,S1", "-", "S0,S1 S0,S1", "-"}}},
              {"masked_fill",
               {{{8, 6}}, {{8, 6}, Operand::kMask}},
               [](auto& t) { return Tensors{t[0].masked_fill(t[1], 0.0)}; },
               {{"S0 S0", "S0", "-", "S0", "-"},
                {"S1 R", "S1", "-", "S1", "-"},
                {"P R", "P", "-", "R", "-"}}},
              {"tril",
               {{{4, 8, 6}}},
               [](auto& t) { return Tensors{t[0].tril()}; },
               {{"S0", "S0", "-", "S0", "-"}, {"P", "P", "-", "R", "-"}}},
              {"triu",
               {{{4, 8, 6}}},
               [](auto& t) { return Tensors{t[0].triu(1)}; },
               {{"S0", "S0", "-", "S0", "-"}}},
          }};
}

Family copies() {
  return {"copy_, to, clone, detach",
          {
              {"clone",
               {{{8, 6}}},
               [](auto& t) { return Tensors{t[0].clone()}; },
               {{"S0", "S0", "-", "S0", "-"},
                {"P", "P", "-", "R", "-"},
                {"S0,P", "S0,P", "-", "S0,R", "-"}}},
              {"detach",
               {{{8, 6}}},
               [](auto& t) { return Tensors{t[0].detach()}; },
               {{"S0", "S0", "-"}, {"P", "P", "-"}},
               false},
              {"to(float).to(double)",
               {{{8, 6}}},
               [](auto& t) { return Tensors{t[0].round().to(at::kFloat).to(at::kDouble)}; },
               {{"S0", "S0", "-", "S0", "-"}, {"S0,S1", "S0,S1", "-", "S0,S1", "-"}}},
              {"contiguous of a transpose",
               {{{8, 6}}},
               [](auto& t) { return Tensors{t[0].t().contiguous()}; },
               {{"S0", "S1", "-", "S0", "-"}, {"P", "P", "-", "R", "-"}}},
              {"copy_",
               {{{8, 6}}, {{8, 6}}},
               [](auto& t) { return Tensors{t[0].clone().copy_(t[1])}; },
               {{"S0 S0", "S0", "-", "S0 S0", "-"},
                {"S0 R", "S0", "-", "S0 S0", "-"},
                {"S0 P", "S0", "reduce_scatter 384", "S0 S0", "-"},
                {"P P", "P", "-", "R R", "-"}}},
              {"zero_",
               {{{8, 6}}},
               [](auto& t) { return Tensors{t[0].clone().zero_()}; },
               {{"S0", "S0", "-"}, {"P", "P", "-"}},
               false},
              {"fill_",
               {{{8, 6}}},
               [](auto& t) { return Tensors{t[0].clone().fill_(3)}; },
               {{"S0", "S0", "-"}, {"P", "P", "-"}},
               false},
              {"zeros_like",
               {{{8, 6}}},
               [](auto& t) { return Tensors{at::zeros_like(t[0])}; },
               {{"S0", "S0", "-"}, {"P", "R", "-"}},
               false},
              {"equal",
               {{{8, 6}}, {{8, 6}}},
               [](auto& t) {
                 const bool equal = at::equal(t[0], t[1]);
                 return Tensors{at::scalar_tensor(equal ? 1 : 0)};
               },
               {{"S0 S0", "plain", "all_reduce 1"}, {"S0,S1 S0,S1", "plain", "all_reduce 1"}},
               false},
          }};
}

Family random_numbers() {
  return {"random",
          {
              {"dropout",
               {{{8, 6}}},
               [](auto& t) { return Tensors{at::dropout(t[0], 0.5, true)}; },
               {{"S0", "S0", "-", "S0", "-"},
                {"S1", "S1", "-", "S1", "-"},
                {"S0,S1", "S0,S1", "-", "S0,S1", "-"},
                {"S0,S0", "S0,S0", "-", "S0,S0", "-"}},
               true,
               true},
              {"rand_like",
               {{{8, 6}}},
               [](auto& t) { return Tensors{at::rand_like(t[0])}; },
               {{"S0", "S0", "-"}, {"S0,S1", "S0,S1", "-"}},
               false,
               true},
              {"uniform_, normal_, bernoulli_",
               {{{7, 6}}},
               [](auto& t) {
                 return Tensors{t[0].clone().uniform_(-1, 1), t[0].clone().normal_(),
                                t[0].clone().bernoulli_(0.3)};
               },
               {{"S0", "S0 S0 S0", "-"}, {"S1", "S1 S1 S1", "-"}},
               false,
               true},
          }};
}

}  // namespace

std::vector<Family> elementwise_families() {
  return {pointwise(), masking(), copies(), random_numbers()};
}

}  // namespace tessera::testing
