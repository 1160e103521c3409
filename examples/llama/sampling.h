#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "examples/llama/model.h"

namespace llama {

struct SamplingOptions {
  std::int64_t max_tokens = 200;
  double temperature = 0.8;  ///< 0: greedy
  std::int64_t top_k = 0;    ///< 0: all
  double top_p = 1.0;
  std::uint64_t seed = 0;
};

/// One token id from logits (vocabulary). Greedy, or from the softmax at `temperature` cut to the
/// `top_k` likeliest and to the smallest set of probability >= `top_p`. The n-th draw of a seed is
/// always the same.
std::int64_t sample_token(const at::Tensor& logits, const SamplingOptions& options, std::int64_t n);

/// Continues `prompt` (at least one token) with a key-value cache; calls `emit` with each new
/// token.
void generate(Llama& model, const std::vector<std::int64_t>& prompt, const SamplingOptions& options,
              const std::function<void(std::int64_t)>& emit);

}  // namespace llama
