// The operators of this library (src/dtensor/fused/).
#include "family_table.h"
#include "tessera/dtensor/detail/fused_operators.h"

namespace tessera::testing {

std::vector<Family> fused_families() {
  return {
      {"operators of this library",
       {
           {"silu_mul",
            {{{8, 8}}, {{8, 8}}},
            [](auto& t) { return Tensors{detail::silu_mul(t[0], t[1])}; },
            {{"S0 S0", "S0", "-", "S0 S0", "-"},
             {"S1 S1", "S1", "-", "S1 S1", "-"},
             {"S0 R", "S0", "-", "S0 S0", "-"},
             {"R R", "R", "-", "R R", "-"},
             {"S0 S1", "S0", "all_to_all 128", "S0 S0", "all_to_all 128"},
             {"P R", "R", "all_reduce 512", "R R", "all_reduce 512"},
             {"S0,S1 S0,S1", "S0,S1", "-", "S0,S1 S0,S1", "-"}}},
           {"rms_norm",
            {{{4, 8, 6}}, {{6}}},
            [](auto& t) { return Tensors{detail::rms_norm(t[0], t[1], 1e-5)}; },
            {{"S0 R", "S0", "-", "S0 P", "-"},
             {"S1 R", "S1", "-", "S1 P", "-"},
             {"R R", "R", "-", "R R", "-"},
             {"R S0", "R", "all_gather 16", "R R", "all_gather 16"},
             {"S0,S1 R,R", "S0,S1", "-", "S0,S1 P,P", "-"},
             {"S2 R", "R", "all_gather 512", "R R", "all_gather 512"}}},
           {"add_rms_norm",
            {{{4, 8, 6}}, {{4, 8, 6}}, {{6}}},
            [](auto& t) {
              const auto [out, sum] = detail::add_rms_norm(t[0], t[1], t[2], 1e-5);
              return Tensors{out, sum};
            },
            {{"S0 S0 R", "S0 S0", "-", "S0 S0 P", "-"},
             {"S1 S1 R", "S1 S1", "-", "S1 S1 P", "-"},
             {"R R R", "R R", "-", "R R R", "-"},
             {"P S1 R", "S1 S1", "reduce_scatter 1536", "S1 S1 P", "-"},
             {"P R R", "R R", "all_reduce 1536", "R R R", "-"},
             {"S0 R R", "S0 S0", "-", "S0 S0 P", "-"},
             {"S0,S1 S0,S1 R,R", "S0,S1 S0,S1", "-", "S0,S1 S0,S1 P,P", "-"},
             {"S2 S2 R", "R R", "2 all_gather 1024", "R R R", "-"}}},
           {"dropout",
            {{{8, 6}}},
            [](auto& t) { return Tensors{detail::dropout(t[0], 0.4, {1, 2})}; },
            {{"S0", "S0", "-", "S0", "-"},
             {"S1", "S1", "-", "S1", "-"},
             {"P", "R", "all_reduce 384", "R", "-"},
             {"S0,S1", "S0,S1", "-", "S0,S1", "-"}}},
           {"embedding",
            {{{8, 6}}, {{4, 5}, Operand::kIndices, 8}},
            [](auto& t) { return Tensors{detail::embedding(t[0], t[1])}; },
            {{"R S0", "S0", "-", "P", "-"},
             {"S1 R", "S2", "-", "S1", "-"},
             {"S0 R", "P", "-", "S0", "-"},
             {"S1,R R,S0", "S2,S0", "-", "S1,P", "-"},
             {"R,S0 S0,R", "S0,P", "-", "P,S0", "-"}}},
           {"cross_entropy",
            {{{8, 6}}, {{8}, Operand::kIndices, 6}},
            [](auto& t) { return Tensors{detail::cross_entropy(t[0], t[1])}; },
            {{"S0 S0", "S0", "-", "S0", "-"},
             {"S0 R", "S0", "-", "S0", "-"},
             {"S1 R", "R", "2 all_reduce 192", "S1", "-"},
             {"R R", "R", "-", "R", "-"},
             {"S0,S1 S0,R", "S0,R", "2 all_reduce 96", "S0,S1", "-"}}},
           {"fp8_linear",
            {{{8, 6}}, {{4, 6}}},
            [](auto& t) { return Tensors{detail::fp8_linear(t[0], t[1])}; },
            {{"S0 R", "S0", "-", "S0 P", "-"},
             {"R S0", "S1", "-", "P S0", "-"},
             {"S1 S1", "P", "-", "S1 S1", "-"},
             {"R R", "R", "-", "R R", "-"}}},
           {"rotary_embedding",
            {{{4, 8, 4, 8}}, {{8, 8}}, {{8, 8}}},
            [](auto& t) {
              return Tensors{detail::rotary_embedding(t[0], t[1].detach(), t[2].detach())};
            },
            {{"S0 R R", "S0", "-", "S0 - -", "-"},
             {"S1 R R", "S1", "-", "S1 - -", "-"},
             {"S2 R R", "S2", "-", "S2 - -", "-"},
             {"S1 S0 S0", "S1", "-", "S1 - -", "-"},
             {"S0,S2 R,R R,R", "S0,S2", "-", "S0,S2 - -", "-"},
             {"S3 R R", "R", "all_gather 2048", "R - -", "-"}}},
           {"rotary_embedding of two",
            {{{4, 8, 8, 8}}, {{4, 8, 4, 8}}, {{8, 8}}, {{8, 8}}},
            [](auto& t) {
              const auto [q, k] =
                  detail::rotary_embedding(t[0], t[1], t[2].detach(), t[3].detach());
              return Tensors{q, k};
            },
            {{"S0 S0 R R", "S0 S0", "-", "S0 S0 - -", "-"},
             {"S2 S2 R R", "S2 S2", "-", "S2 S2 - -", "-"},
             {"R R R R", "R R", "-", "R R - -", "-"}}},
       }},
  };
}

}  // namespace tessera::testing
