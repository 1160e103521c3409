// Softmax and normalisations.
#include <ATen/ATen.h>

#include "family_table.h"

namespace tessera::testing {

std::vector<Family> normalisation_families() {
  return {
      {"softmax",
       {
           {"softmax(-1)",
            {{{8, 12}}},
            [](auto& t) { return Tensors{at::softmax(t[0], -1)}; },
            {{"S0", "S0", "-", "S0", "-"},
             {"S0,S0", "S0,S0", "-", "S0,S0", "-"},
             {"S1", "R", "all_gather 192", "R", "-"}}},
           {"log_softmax(-1)",
            {{{8, 12}}},
            [](auto& t) { return Tensors{at::log_softmax(t[0], -1)}; },
            {{"S0", "S0", "-", "S0", "-"},
             {"S0,S0", "S0,S0", "-", "S0,S0", "-"},
             {"S1", "R", "all_gather 192", "R", "-"}}},
       }},
      {"normalisation",
       {
           {"layer_norm",
            {{{4, 8, 6}}, {{6}}, {{6}}},
            [](auto& t) { return Tensors{at::layer_norm(t[0], {6}, t[1], t[2])}; },
            {{"S0 R R", "S0", "-", "S0 P P", "-"},
             {"S1 R R", "S1", "-", "S1 P P", "-"},
             {"S0,S1 R,R R,R", "S0,S1", "-", "S0,S1 P,P P,P", "-"},
             {"S2 R R", "R", "all_gather 512", "R R R", "all_gather 512"}}},
           {"rms_norm",
            {{{4, 8, 6}}, {{6}}},
            [](auto& t) { return Tensors{at::rms_norm(t[0], {6}, t[1], 1e-5)}; },
            {{"S0 R", "S0", "-", "S0 P", "-"},
             {"S1 R", "S1", "-", "S1 P", "-"},
             {"S0,S1 R,R", "S0,S1", "-", "S0,S1 P,P", "-"},
             {"S2 R", "S2", "2 all_reduce 512", "S2 S0", "reduce_scatter 2048"}}},
           {"group_norm",
            {{{8, 6, 3}}, {{6}}, {{6}}},
            [](auto& t) { return Tensors{at::group_norm(t[0], 2, t[1], t[2])}; },
            {{"S0 R R", "S0", "-", "S0 P P", "-"},
             {"S0,S0 R,R R,R", "S0,S0", "-", "S0,S0 P,P P,P", "-"}}},
           {"batch_norm in training",
            {{{8, 4, 3}}, {{4}}, {{4}}},
            [](auto& t) {
              return Tensors{at::batch_norm(t[0], t[1], t[2], {}, {}, true, 0.1, 1e-5, false)};
            },
            {{"S1 S0 S0", "S1", "-", "S1 S0 S0", "-"},
             {"S0 R R", "S0", "2 all_reduce 64", "S0 R R", "all_reduce 64"},
             {"S0,S1 R,S0 R,S0", "S0,S1", "2 all_reduce 32", "S0,S1 R,S0 R,S0", "all_reduce 32"}}},
           {"batch_norm with given statistics",
            {{{8, 4, 3}}, {{4}}, {{4}}, {{4}}, {{4}, Operand::kPositive}},
            [](auto& t) {
              return Tensors{at::batch_norm(t[0], t[1], t[2], t[3].detach(), t[4].detach(), false,
                                            0.1, 1e-5, false)};
            },
            {{"S0 R R R R", "S0", "-", "S0 P P - -", "-"},
             {"S1 S0 S0 S0 S0", "S1", "-", "S1 S0 S0 - -", "-"}}},
       }},
  };
}

}  // namespace tessera::testing
