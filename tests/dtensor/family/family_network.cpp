#include <ATen/ATen.h>

#include "family_table.h"
#include "tessera/dtensor/detail/fused_operators.h"

namespace tessera::testing {

// Convolution, pooling, losses, and what works on a batch of matrices.

namespace {

at::Tensor loss(const Tensors& t, std::int64_t reduction, std::int64_t ignored = -100) {
  return at::cross_entropy_loss(t[0], t[1], t.size() > 2 ? t[2].detach() : at::Tensor(), reduction,
                                ignored);
}

Family losses() {
  const Operand logits{{8, 6}}, targets{{8}, Operand::kIndices, 6},
      weights{{6}, Operand::kPositive};
  return {
      "losses",
      {
          {"cross_entropy",
           {logits, targets},
           [](auto& t) { return Tensors{loss(t, at::Reduction::Mean)}; },
           {{"S0 S0", "R", "all_reduce 16", "S0", "-"},
            {"S0,S0 S0,S0", "R,R", "all_reduce 16", "S0,S0", "-"}}},
          {"cross_entropy, ignore_index",
           {logits, targets},
           [](auto& t) { return Tensors{loss(t, at::Reduction::Mean, 3)}; },
           {{"S0 S0", "R", "all_reduce 16", "S0", "-"}}},
          {"cross_entropy, weights",
           {logits, targets, weights},
           [](auto& t) { return Tensors{loss(t, at::Reduction::Mean)}; },
           {{"S0 S0 R", "R", "all_reduce 16", "S0 -", "-"}}},
          {"cross_entropy, sum",
           {logits, targets},
           [](auto& t) { return Tensors{loss(t, at::Reduction::Sum)}; },
           {{"S0 S0", "P", "-", "S0", "-"}}},
          {"cross_entropy, none",
           {logits, targets},
           [](auto& t) { return Tensors{loss(t, at::Reduction::None)}; },
           {{"S0 S0", "S0", "-", "S0", "-"}}},
          {"nll_loss",
           {logits, targets},
           [](auto& t) { return Tensors{at::nll_loss(t[0], t[1])}; },
           {{"S0 S0", "R", "all_reduce 16", "S0", "-"}}},
          {"mse_loss",
           {{{7, 6}}, {{7, 6}}},
           [](auto& t) { return Tensors{at::mse_loss(t[0], t[1])}; },
           {{"S0 S0", "P", "-", "S0 S0", "-"},
            {"S1 S1", "P", "-", "S1 S1", "-"},
            {"S0,S1 S0,S1", "P,P", "-", "S0,S1 S0,S1", "-"}}},
          {"binary_cross_entropy_with_logits",
           {{{7, 6}}, {{7, 6}, Operand::kPositive}},
           [](auto& t) {
             return Tensors{at::binary_cross_entropy_with_logits(t[0], t[1].detach().clamp_max(1))};
           },
           {{"S0 S0", "P", "-", "S0 -", "-"}}},
      }};
}

Family convolution() {
  return {"convolution, pooling",
          {
              {"conv2d",
               {{{8, 4, 5, 5}}, {{8, 4, 3, 3}}, {{8}}},
               [](auto& t) { return Tensors{at::conv2d(t[0], t[1], t[2])}; },
               {{"S0 R R", "S0", "-", "S0 P P", "-"},
                {"R S0 S0", "S1", "-", "P S0 S0", "-"},
                {"S1 S1 R", "P", "-", "S1 S1 R", "-"},
                {"S0,R R,S0 R,S0", "S0,S1", "-", "S0,P P,S0 P,S0", "-"}}},
              {"conv1d",
               {{{8, 4, 5}}, {{8, 4, 3}}},
               [](auto& t) { return Tensors{at::conv1d(t[0], t[1])}; },
               {{"S0 R", "S0", "-", "S0 P", "-"}, {"R S0", "S1", "-", "P S0", "-"}}},
              {"max_pool2d",
               {{{8, 4, 6, 6}}},
               [](auto& t) { return Tensors{at::max_pool2d(t[0], {2, 2})}; },
               {{"S0", "S0", "-", "S0", "-"},
                {"S1", "S1", "-", "S1", "-"},
                {"S0,S1", "S0,S1", "-", "S0,S1", "-"}}},
              {"avg_pool2d",
               {{{8, 4, 6, 6}}},
               [](auto& t) { return Tensors{at::avg_pool2d(t[0], {2, 2})}; },
               {{"S0", "S0", "-", "S0", "-"}, {"S1", "S1", "-", "S1", "-"}}},
              {"adaptive_avg_pool2d",
               {{{8, 4, 6, 6}}},
               [](auto& t) { return Tensors{at::adaptive_avg_pool2d(t[0], {2, 2})}; },
               {{"S0", "S0", "-", "S0", "-"}}},
              {"upsample_nearest2d",
               {{{8, 4, 3, 3}}},
               [](auto& t) { return Tensors{at::upsample_nearest2d(t[0], {6, 6})}; },
               {{"S0", "S0", "-", "S0", "-"}}},
          }};
}

Family convolution_in_space() {
  return {"convolution of what is split in space",
          {
              {"conv2d",
               {{{8, 4, 6, 6}}, {{8, 4, 3, 3}}, {{8}}},
               [](auto& t) { return Tensors{at::conv2d(t[0], t[1], t[2], {1, 1}, {1, 1})}; },
               {{"S0,S2 R,R R,R", "S0,R", "all_gather 2304", "S0,R P,R P,R", "all_gather 2304"}}},
          }};
}

Family batches() {
  return {"fft and linear algebra on a batch",
          {
              {"fft_fft, fft_ifft",
               {{{8, 6}}},
               [](auto& t) { return Tensors{at::real(at::fft_ifft(at::fft_fft(t[0])))}; },
               {{"S0", "S0", "-", "S0", "-"}}},
              {"fft_rfft",
               {{{8, 6}}},
               [](auto& t) { return Tensors{at::view_as_real(at::fft_rfft(t[0]))}; },
               {{"S0", "S0", "-", "S0", "-"}}},
              {"linalg_inv",
               {{{8, 3, 3}}},
               [](auto& t) { return Tensors{at::linalg_inv(t[0])}; },
               {{"S0", "S0", "all_gather 8", "S0", "-"}}},
              {"linalg_det",
               {{{8, 3, 3}}},
               [](auto& t) { return Tensors{at::linalg_det(t[0])}; },
               {{"S0", "S0", "-", "S0", "-"}}},
              {"linalg_solve",
               {{{8, 3, 3}}, {{8, 3, 2}}},
               [](auto& t) { return Tensors{at::linalg_solve(t[0], t[1])}; },
               {{"S0 S0", "S0", "all_gather 8", "S0 S0", "-"}}},
              {"cholesky",
               {{{8, 3, 3}}},
               [](auto& t) {
                 const auto rows = t[0].mul(0.1).diagonal(0, 1, 2).exp();
                 return Tensors{at::linalg_cholesky(rows.diag_embed())};
               },
               {{"S0", "S0", "all_gather 8"}},
               false},
              {"linalg_eigvalsh",
               {{{8, 3, 3}}},
               [](auto& t) { return Tensors{at::linalg_eigvalsh(t[0])}; },
               {{"S0", "S0", "all_reduce 4"}},
               false},
          }};
}

}  // namespace

std::vector<Family> network_families() {
  return {losses(), convolution(), convolution_in_space(), batches()};
}

// The operators of this library (src/dtensor/fused/).

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

// Softmax and normalisations.

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

// Products of matrices and what is built of them.

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
            [](auto& t) { return Tensors{at::einsum("bsi,io->bso", {t[0], t[1]})}; },
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
