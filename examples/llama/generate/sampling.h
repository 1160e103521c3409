// How llama_generate turns logits into tokens.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "examples/llama/generate/generate_options.h"

namespace llama {

/// Token ids of a text.
using Tokens = std::vector<std::int64_t>;

/// The probabilities that tokens are drawn with, fp64, from `logits`, both (texts, vocabulary);
/// `seen`: bool of these sizes, true for the tokens of the text so far, or undefined without
/// repetition penalty. In transformers' order: the penalty (Keskar et al. 2019: a seen token's
/// logit is divided by it, or multiplied if negative), the temperature, then all but the `top_k`
/// likeliest are refused, all behind the smallest set of probability >= `top_p` (Holtzman et al.
/// 2020; the likeliest always stays), and those less than `min_p` times as likely as the likeliest
/// (Nguyen et al. 2024). The temperature must not be 0.
at::Tensor token_probabilities(const at::Tensor& logits, const at::Tensor& seen,
                               const SamplingOptions& options);

/// Chooses the next tokens of the texts of a batch.
class Sampler {
 public:
  /// `prompts`: what the texts begin with, for the repetition penalty.
  Sampler(SamplingOptions options, std::vector<Tokens> prompts);
  /// One token a text from logits (texts, vocabulary): greedy at temperature 0, else drawn. The
  /// draw of the n-th call for a text depends on the seed, n, and its place in the batch only.
  Tokens next(const at::Tensor& logits);

 private:
  at::Tensor draw(const at::Tensor& probabilities) const;
  void remember(const at::Tensor& tokens);

  SamplingOptions options_;
  std::vector<Tokens> prompts_;
  at::Tensor seen_;  ///< (texts, vocabulary), with a penalty only
  std::uint64_t calls_ = 0;
};

}  // namespace llama
