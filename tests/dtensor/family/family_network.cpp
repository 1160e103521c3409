#include <ATen/ATen.h>

#include "family_table.h"
#include "tessera/dtensor/detail/fused_operators.h"

namespace tessera::testing {

namespace {

at::Tensor loss(const Tensors& t, std::int64_t reduction, std::int64_t ignored = -100) {
  return at::cross_entropy_loss(t[0], t[1], t.size() > 2 ? t[2].detach() : at::Tensor(), reduction,
                                ignored);
}

Family losses() {
  const Operand logits{{8, 6}}, targets{{8}, Operand::kIndices, 6},
      weights{{6}, Operand::kPositive};
  Family f{"losses", {}};
  f.add("cross_entropy", {logits, targets}, [](auto& t) { return loss(t, at::Reduction::Mean); },
        {"S0 S0 | R | all_reduce 16 | S0 | -", "S0,S0 S0,S0 | R,R | all_reduce 16 | S0,S0 | -"});
  f.add("cross_entropy, weights", {logits, targets, weights},
        [](auto& t) { return loss(t, at::Reduction::Mean); },
        {"S0 S0 R | R | all_reduce 16 | S0 - | -"});
  f.add("cross_entropy, sum", {logits, targets},
        [](auto& t) { return loss(t, at::Reduction::Sum); }, {"S0 S0 | P | - | S0 | -"});
  f.add("cross_entropy, none", {logits, targets},
        [](auto& t) { return loss(t, at::Reduction::None); }, {"S0 S0 | S0 | - | S0 | -"});
  f.add("nll_loss", {logits, targets}, [](auto& t) { return at::nll_loss(t[0], t[1]); },
        {"S0 S0 | R | all_reduce 16 | S0 | -"});
  f.add("mse_loss", {{{7, 6}}, {{7, 6}}}, [](auto& t) { return at::mse_loss(t[0], t[1]); },
        {"S0 S0 | P | - | S0 S0 | -", "S1 S1 | P | - | S1 S1 | -",
         "S0,S1 S0,S1 | P,P | - | S0,S1 S0,S1 | -"});
  f.add("binary_cross_entropy_with_logits", {{{7, 6}}, {{7, 6}, Operand::kPositive}},
        [](auto& t) {
          return at::binary_cross_entropy_with_logits(t[0], t[1].detach().clamp_max(1));
        },
        {"S0 S0 | P | - | S0 - | -"});
  return f;
}

Family convolution() {
  Family f{"convolution", {}};
  f.add("conv2d", {{{8, 4, 5, 5}}, {{8, 4, 3, 3}}, {{8}}},
        [](auto& t) { return at::conv2d(t[0], t[1], t[2]); },
        {"S0 R R | S0 | - | S0 P P | -", "R S0 S0 | S1 | - | P S0 S0 | -",
         "S0,R R,S0 R,S0 | S0,S1 | - | S0,P P,S0 P,S0 | -"});
  return f;
}

Family convolution_in_space() {
  Family f{"convolution of what is split in space", {}};
  f.add("conv2d", {{{8, 4, 6, 6}}, {{8, 4, 3, 3}}, {{8}}},
        [](auto& t) { return at::conv2d(t[0], t[1], t[2], {1, 1}, {1, 1}); },
        {"S0,S2 R,R R,R | S0,R | all_gather 2304 | S0,R P,R P,R | all_gather 2304"});
  return f;
}

}  // namespace

std::vector<Family> network_families() {
  return {losses(), convolution(), convolution_in_space()};
}

std::vector<Family> fused_families() {
  Family f{"operators of this library", {}};
  f.add("silu_mul", {{{8, 8}}, {{8, 8}}}, [](auto& t) { return detail::silu_mul(t[0], t[1]); },
        {"S0 S0 | S0 | - | S0 S0 | -", "S1 S1 | S1 | - | S1 S1 | -", "S0 R | S0 | - | S0 S0 | -",
         "R R | R | - | R R | -", "S0 S1 | S0 | all_to_all 128 | S0 S0 | all_to_all 128",
         "P R | R | all_reduce 512 | R R | all_reduce 512",
         "S0,S1 S0,S1 | S0,S1 | - | S0,S1 S0,S1 | -"});
  f.add("rms_norm", {{{4, 8, 6}}, {{6}}},
        [](auto& t) { return detail::rms_norm(t[0], t[1], 1e-5); },
        {"S0 R | S0 | - | S0 P | -", "S1 R | S1 | - | S1 P | -", "R R | R | - | R R | -",
         "R S0 | R | all_gather 16 | R R | all_gather 16", "S0,S1 R,R | S0,S1 | - | S0,S1 P,P | -",
         "S2 R | R | all_gather 512 | R R | all_gather 512"});
  f.add("add_rms_norm", {{{4, 8, 6}}, {{4, 8, 6}}, {{6}}},
        [](auto& t) {
          const auto [out, sum] = detail::add_rms_norm(t[0], t[1], t[2], 1e-5);
          return Tensors{out, sum};
        },
        {"S0 S0 R | S0 S0 | - | S0 S0 P | -", "S1 S1 R | S1 S1 | - | S1 S1 P | -",
         "R R R | R R | - | R R R | -", "P S1 R | S1 S1 | reduce_scatter 1536 | S1 S1 P | -",
         "P R R | R R | all_reduce 1536 | R R R | -", "S0 R R | S0 S0 | - | S0 S0 P | -",
         "S0,S1 S0,S1 R,R | S0,S1 S0,S1 | - | S0,S1 S0,S1 P,P | -",
         "S2 S2 R | R R | 2 all_gather 1024 | R R R | -"});
  f.add("dropout", {{{8, 6}}}, [](auto& t) { return detail::dropout(t[0], 0.4, {1, 2}); },
        {"S0 | S0 | - | S0 | -", "S1 | S1 | - | S1 | -", "P | R | all_reduce 384 | R | -",
         "S0,S1 | S0,S1 | - | S0,S1 | -"});
  f.add("embedding", {{{8, 6}}, {{4, 5}, Operand::kIndices, 8}},
        [](auto& t) { return detail::embedding(t[0], t[1]); },
        {"R S0 | S0 | - | P | -", "S1 R | S2 | - | S1 | -", "S0 R | P | - | S0 | -",
         "S1,R R,S0 | S2,S0 | - | S1,P | -", "R,S0 S0,R | S0,P | - | P,S0 | -"});
  f.add(
      "cross_entropy", {{{8, 6}}, {{8}, Operand::kIndices, 6}},
      [](auto& t) { return detail::cross_entropy(t[0], t[1]); },
      {"S0 S0 | S0 | - | S0 | -", "S0 R | S0 | - | S0 | -", "S1 R | R | 2 all_reduce 192 | S1 | -",
       "R R | R | - | R | -", "S0,S1 S0,R | S0,R | 2 all_reduce 96 | S0,S1 | -"});
  f.add("fp8_linear", {{{8, 6}}, {{4, 6}}}, [](auto& t) { return detail::fp8_linear(t[0], t[1]); },
        {"S0 R | S0 | - | S0 P | -", "R S0 | S1 | - | P S0 | -", "S1 S1 | P | - | S1 S1 | -",
         "R R | R | - | R R | -"});
  f.add("rotary_embedding", {{{4, 8, 4, 8}}, {{8, 8}}, {{8, 8}}},
        [](auto& t) { return detail::rotary_embedding(t[0], t[1].detach(), t[2].detach()); },
        {"S0 R R | S0 | - | S0 - - | -", "S1 R R | S1 | - | S1 - - | -",
         "S2 R R | S2 | - | S2 - - | -", "S1 S0 S0 | S1 | - | S1 - - | -",
         "S0,S2 R,R R,R | S0,S2 | - | S0,S2 - - | -", "S3 R R | R | all_gather 2048 | R - - | -"});
  f.add("rotary_embedding of two", {{{4, 8, 8, 8}}, {{4, 8, 4, 8}}, {{8, 8}}, {{8, 8}}},
        [](auto& t) {
          const auto [q, k] = detail::rotary_embedding(t[0], t[1], t[2].detach(), t[3].detach());
          return Tensors{q, k};
        },
        {"S0 S0 R R | S0 S0 | - | S0 S0 - - | -", "S2 S2 R R | S2 S2 | - | S2 S2 - - | -",
         "R R R R | R R | - | R R - - | -"});
  return {f};
}

std::vector<Family> normalisation_families() {
  Family softmax{"softmax", {}};
  softmax.add(
      "softmax(-1)", {{{8, 12}}}, [](auto& t) { return at::softmax(t[0], -1); },
      {"S0 | S0 | - | S0 | -", "S0,S0 | S0,S0 | - | S0,S0 | -", "S1 | R | all_gather 192 | R | -"});
  softmax.add(
      "log_softmax(-1)", {{{8, 12}}}, [](auto& t) { return at::log_softmax(t[0], -1); },
      {"S0 | S0 | - | S0 | -", "S0,S0 | S0,S0 | - | S0,S0 | -", "S1 | R | all_gather 192 | R | -"});
  Family normalisation{"normalisation", {}};
  normalisation.add("layer_norm", {{{4, 8, 6}}, {{6}}, {{6}}},
                    [](auto& t) { return at::layer_norm(t[0], {6}, t[1], t[2]); },
                    {"S0 R R | S0 | - | S0 P P | -", "S1 R R | S1 | - | S1 P P | -",
                     "S0,S1 R,R R,R | S0,S1 | - | S0,S1 P,P P,P | -",
                     "S2 R R | R | all_gather 512 | R R R | all_gather 512"});
  normalisation.add("rms_norm", {{{4, 8, 6}}, {{6}}},
                    [](auto& t) { return at::rms_norm(t[0], {6}, t[1], 1e-5); },
                    {"S0 R | S0 | - | S0 P | -", "S1 R | S1 | - | S1 P | -",
                     "S0,S1 R,R | S0,S1 | - | S0,S1 P,P | -",
                     "S2 R | S2 | 2 all_reduce 512 | S2 S0 | reduce_scatter 2048"});
  return {softmax, normalisation};
}

std::vector<Family> matmul_families() {
  Family matmul{"matmul", {}};
  matmul.add("mm", {{{8, 4}}, {{4, 12}}}, [](auto& t) { return at::mm(t[0], t[1]); },
             {"S0 R | S0 | - | S0 P | -", "R S1 | S1 | - | P S1 | -", "S1 S0 | P | - | S1 S0 | -",
              "P R | P | - | R P | -", "R R | R | - | R R | -",
              "S0,R R,S1 | S0,S1 | - | S0,P P,S1 | -", "S0,S1 R,S0 | S0,P | - | S0,S1 P,S0 | -",
              "S0,S0 R,R | S0,S0 | - | S0,S0 P,P | -", "R,S1 R,S0 | R,P | - | R,S1 R,S0 | -"});
  matmul.add("bmm", {{{8, 3, 6}}, {{8, 6, 2}}}, [](auto& t) { return at::bmm(t[0], t[1]); },
             {"S0 S0 | S0 | - | S0 S0 | -", "S1 R | S1 | - | S1 P | -", "R S2 | S2 | - | P S2 | -",
              "S2 S1 | P | - | S2 S1 | -", "S0,S1 S0,R | S0,S1 | - | S0,S1 S0,P | -"});
  matmul.add("addmm", {{{12}}, {{8, 4}}, {{4, 12}}},
             [](auto& t) { return at::addmm(t[0], t[1], t[2]); },
             {"R S0 R | S0 | - | P S0 P | -", "S0 R S1 | S1 | - | S0 P S1 | -",
              "R S1 S0 | P | - | R S1 S0 | -", "R,S0 S0,R R,S1 | S0,S1 | - | P,S0 S0,P P,S1 | -"});
  matmul.add("linear, 3-D input", {{{4, 8, 6}}, {{12, 6}}, {{12}}},
             [](auto& t) { return at::linear(t[0], t[1], t[2]); },
             {"S0 R R | S0 | - | S0 P P | -", "S1 R R | S1 | - | S1 P P | -",
              "R S0 S0 | S2 | - | P S0 S0 | -", "S2 S1 R | P | - | S2 S1 R | -",
              "S0,R R,S0 R,S0 | S0,S2 | - | S0,P P,S0 P,S0 | -",
              "S0,S1 R,R R,R | S0,S1 | - | S0,S1 P,P P,P | -"});
  matmul.add("matmul, 4-D", {{{4, 2, 8, 6}}, {{4, 2, 6, 8}}},
             [](auto& t) { return at::matmul(t[0], t[1]); },
             {"S0 S0 | S0 | - | S0 S0 | -", "S0,S1 S0,S1 | S0,S1 | - | S0,S1 S0,S1 | -",
              "S0,S2 S0,R | S0,S2 | - | S0,S2 S0,P | -"});
  matmul.add("mv", {{{8, 4}}, {{4}}}, [](auto& t) { return at::mv(t[0], t[1]); },
             {"S0 R | S0 | - | S0 P | -", "S1 S0 | P | - | S1 S0 | -"});
  matmul.add("dot", {{{8}}, {{8}}}, [](auto& t) { return at::dot(t[0], t[1]); },
             {"S0 S0 | P | - | S0 S0 | -"});
  matmul.add("outer", {{{8}}, {{6}}}, [](auto& t) { return at::outer(t[0], t[1]); },
             {"S0 R | S0 | - | S0 P | -", "R S0 | S1 | - | P S0 | -",
              "S0,R R,S0 | S0,S1 | - | S0,P P,S0 | -"});
  Family attention{"attention", {}};
  attention.add(
      "scaled_dot_product_attention", {{{4, 8, 5, 4}}, {{4, 8, 5, 4}}, {{4, 8, 5, 4}}},
      [](auto& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0.0, true); },
      {"S0 S0 S0 | S0 | - | S0 S0 S0 | -", "S1 S1 S1 | S1 | - | S1 S1 S1 | -",
       "S0,S1 S0,S1 S0,S1 | S0,S1 | - | S0,S1 S0,S1 S0,S1 | -"});
  attention.add(
      "scaled_dot_product_attention with a mask",
      {{{4, 8, 5, 4}}, {{4, 8, 5, 4}}, {{4, 8, 5, 4}}, {{5, 5}}},
      [](auto& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2], t[3].detach()); },
      {"S0 S0 S0 R | S0 | - | S0 S0 S0 - | -", "S1 S1 S1 R | S1 | - | S1 S1 S1 - | -"});
  attention.add("scaled_dot_product_attention, grouped queries",
                {{{4, 8, 5, 4}}, {{4, 4, 5, 4}}, {{4, 4, 5, 4}}},
                [](auto& t) {
                  return at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0.0, true, {},
                                                          true);
                },
                {"S0 S0 S0 | S0 | - | S0 S0 S0 | -", "S1 S1 S1 | S1 | - | S1 S1 S1 | -"});
  return {matmul, attention};
}

}  // namespace tessera::testing
