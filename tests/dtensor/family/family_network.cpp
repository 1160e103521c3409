// Convolution, pooling, losses, and what works on a batch of matrices.
#include <ATen/ATen.h>

#include "family_table.h"

namespace tessera::testing {
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
  return {
      "convolution of what is split in space",
      {
          {"conv2d",
           {{{8, 4, 6, 6}}, {{8, 4, 3, 3}}, {{8}}},
           [](auto& t) { return Tensors{at::conv2d(t[0], t[1], t[2], {1, 1}, {1, 1})}; },
           {{"S0,S2 R,R R,R", "S0,S2", "all_to_all 768", "S0,S2 P,P P,P", "2 all_to_all 1536"},
            {"S2,S3 R,R R,R", "S2,S3", "2 all_to_all 2048", "S2,S3 P,P P,P", "4 all_to_all 4096"}}},
          {"conv2d, stride as the kernel",
           {{{2, 4, 8, 8}}, {{8, 4, 2, 2}}},
           [](auto& t) { return Tensors{at::conv2d(t[0], t[1], {}, {2, 2})}; },
           {{"S2 R", "S2", "-", "S2 P", "-"}, {"S3 R", "S3", "-", "S3 P", "-"}}},
          {"conv1d",
           {{{8, 4, 8}}, {{8, 4, 3}}},
           [](auto& t) { return Tensors{at::conv1d(t[0], t[1], {}, 1, 1)}; },
           {{"S0,S2 R,R", "S0,S2", "all_to_all 128", "S0,S2 P,P", "2 all_to_all 256"}}},
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
               {{"S0", "S0", "all_reduce 4", "S0", "-"}}},
              {"linalg_det",
               {{{8, 3, 3}}},
               [](auto& t) { return Tensors{at::linalg_det(t[0])}; },
               {{"S0", "S0", "-", "S0", "-"}}},
              {"linalg_solve",
               {{{8, 3, 3}}, {{8, 3, 2}}},
               [](auto& t) { return Tensors{at::linalg_solve(t[0], t[1])}; },
               {{"S0 S0", "S0", "all_reduce 4", "S0 S0", "-"}}},
              {"cholesky",
               {{{8, 3, 3}}},
               [](auto& t) {
                 const auto rows = t[0].mul(0.1).diagonal(0, 1, 2).exp();
                 return Tensors{at::linalg_cholesky(rows.diag_embed())};
               },
               {{"S0", "S0", "all_reduce 4"}},
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

}  // namespace tessera::testing
