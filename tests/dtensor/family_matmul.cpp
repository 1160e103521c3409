// Products of matrices and what is built of them.
#include <ATen/ATen.h>

#include "family_table.h"

namespace tessera::testing {

std::vector<Family> matmul_families() {
  return {
      {"matmul",
       {
           {"mm",
            {{{8, 4}}, {{4, 12}}},
            [](auto& t) { return Tensors{at::mm(t[0], t[1])}; },
            {{"S0 R", "S0", "-", "S0 P", "-"},
             {"R S1", "S1", "-", "P S1", "-"},
             {"S1 S0", "P", "-", "S1 S0", "-"},
             {"P R", "P", "-", "R P", "-"},
             {"R R", "R", "-", "R R", "-"},
             {"S0,R R,S1", "S0,S1", "-", "S0,P P,S1", "-"},
             {"S0,S1 R,S0", "S0,P", "-", "S0,S1 P,S0", "-"},
             {"S0,S0 R,R", "S0,S0", "-", "S0,S0 P,P", "-"},
             {"R,S1 R,S0", "R,P", "-", "R,S1 R,S0", "-"}}},
           {"bmm",
            {{{8, 3, 6}}, {{8, 6, 2}}},
            [](auto& t) { return Tensors{at::bmm(t[0], t[1])}; },
            {{"S0 S0", "S0", "-", "S0 S0", "-"},
             {"S1 R", "S1", "-", "S1 P", "-"},
             {"R S2", "S2", "-", "P S2", "-"},
             {"S2 S1", "P", "-", "S2 S1", "-"},
             {"S0,S1 S0,R", "S0,S1", "-", "S0,S1 S0,P", "-"}}},
           {"addmm",
            {{{12}}, {{8, 4}}, {{4, 12}}},
            [](auto& t) { return Tensors{at::addmm(t[0], t[1], t[2])}; },
            {{"R S0 R", "S0", "-", "P S0 P", "-"},
             {"S0 R S1", "S1", "-", "S0 P S1", "-"},
             {"R S1 S0", "P", "-", "R S1 S0", "-"},
             {"R,S0 S0,R R,S1", "S0,S1", "-", "P,S0 S0,P P,S1", "-"}}},
           {"baddbmm",
            {{{8, 3, 2}}, {{8, 3, 6}}, {{8, 6, 2}}},
            [](auto& t) { return Tensors{at::baddbmm(t[0], t[1], t[2])}; },
            {{"S0 S0 S0", "S0", "-", "S0 S0 S0", "-"},
             {"S1 S1 R", "S1", "-", "S1 S1 P", "-"},
             {"R S2 S1", "P", "-", "R S2 S1", "-"}}},
           {"linear, 3-D input",
            {{{4, 8, 6}}, {{12, 6}}, {{12}}},
            [](auto& t) { return Tensors{at::linear(t[0], t[1], t[2])}; },
            {{"S0 R R", "S0", "-", "S0 P P", "-"},
             {"S1 R R", "S1", "-", "S1 P P", "-"},
             {"R S0 S0", "S2", "-", "P S0 S0", "-"},
             {"S2 S1 R", "P", "-", "S2 S1 R", "-"},
             {"S0,R R,S0 R,S0", "S0,S2", "-", "S0,P P,S0 P,S0", "-"},
             {"S0,S1 R,R R,R", "S0,S1", "-", "S0,S1 P,P P,P", "-"}}},
           {"linear without bias",
            {{{4, 8, 6}}, {{12, 6}}},
            [](auto& t) { return Tensors{at::linear(t[0], t[1])}; },
            {{"S1 R", "S1", "-", "S1 P", "-"},
             {"R S0", "S2", "-", "P S0", "-"},
             {"S2 S1", "P", "-", "S2 S1", "-"},
             {"S1,R R,S0", "S1,S2", "-", "S1,P P,S0", "-"},
             {"S0,S2 R,S1", "S0,P", "-", "S0,S2 P,S1", "-"}}},
           {"matmul, 4-D",
            {{{4, 2, 8, 6}}, {{4, 2, 6, 8}}},
            [](auto& t) { return Tensors{at::matmul(t[0], t[1])}; },
            {{"S0 S0", "S0", "-", "S0 S0", "-"},
             {"S0,S1 S0,S1", "S0,S1", "-", "S0,S1 S0,S1", "-"},
             {"S0,S2 S0,R", "S0,S2", "-", "S0,S2 S0,P", "-"}}},
           {"mv",
            {{{8, 4}}, {{4}}},
            [](auto& t) { return Tensors{at::mv(t[0], t[1])}; },
            {{"S0 R", "S0", "-", "S0 P", "-"}, {"S1 S0", "P", "-", "S1 S0", "-"}}},
           {"dot",
            {{{8}}, {{8}}},
            [](auto& t) { return Tensors{at::dot(t[0], t[1])}; },
            {{"S0 S0", "P", "-", "S0 S0", "-"}}},
           {"outer",
            {{{8}}, {{6}}},
            [](auto& t) { return Tensors{at::outer(t[0], t[1])}; },
            {{"S0 R", "S0", "-", "S0 P", "-"},
             {"R S0", "S1", "-", "P S0", "-"},
             {"S0,R R,S0", "S0,S1", "-", "S0,P P,S0", "-"}}},
           {"einsum bsi,io->bso",
            {{{4, 8, 6}}, {{6, 12}}},
            [](auto& t) {
              return Tensors{at::einsum("bsi,io->bso", {t[0], t[1]})};
            },
            {{"S0 R", "S0", "-", "S0 P", "-"},
             {"S1 R", "S1", "-", "S1 P", "-"},
             {"R S1", "S2", "-", "P S1", "-"}}},
       }},
      {"attention",
       {
           {"scaled_dot_product_attention",
            {{{4, 8, 5, 4}}, {{4, 8, 5, 4}}, {{4, 8, 5, 4}}},
            [](auto& t) {
              return Tensors{at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0.0, true)};
            },
            {{"S0 S0 S0", "S0", "-", "S0 S0 S0", "-"},
             {"S1 S1 S1", "S1", "-", "S1 S1 S1", "-"},
             {"S0,S1 S0,S1 S0,S1", "S0,S1", "-", "S0,S1 S0,S1 S0,S1", "-"}}},
           {"scaled_dot_product_attention with a mask",
            {{{4, 8, 5, 4}}, {{4, 8, 5, 4}}, {{4, 8, 5, 4}}, {{5, 5}}},
            [](auto& t) {
              return Tensors{at::scaled_dot_product_attention(t[0], t[1], t[2], t[3].detach())};
            },
            {{"S0 S0 S0 R", "S0", "-", "S0 S0 S0 -", "-"},
             {"S1 S1 S1 R", "S1", "-", "S1 S1 S1 -", "-"}}},
           {"scaled_dot_product_attention, grouped queries",
            {{{4, 8, 5, 4}}, {{4, 4, 5, 4}}, {{4, 4, 5, 4}}},
            [](auto& t) {
              return Tensors{
                  at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0.0, true, {}, true)};
            },
            {{"S0 S0 S0", "S0", "-", "S0 S0 S0", "-"}, {"S1 S1 S1", "S1", "-", "S1 S1 S1", "-"}}},
       }},
  };
}

}  // namespace tessera::testing
