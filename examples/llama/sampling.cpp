#include "examples/llama/sampling.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace llama {

using tessera::RandomKey;

namespace {

/// Probabilities with everything but the allowed tokens at zero, likeliest first, and their ids.
std::pair<at::Tensor, at::Tensor> allowed(const at::Tensor& logits,
                                          const SamplingOptions& options) {
  const at::Tensor probabilities = (logits.to(c10::kDouble) / options.temperature).softmax(-1);
  auto [sorted, ids] = probabilities.sort(-1, /*descending=*/true);
  if (options.top_k > 0 && options.top_k < sorted.size(0)) {
    sorted = sorted.slice(0, 0, options.top_k);
  }
  // A token stays if the ones before it don't yet hold top_p.
  const at::Tensor before = sorted.cumsum(0) - sorted;
  return {sorted.masked_fill(before >= options.top_p, 0.0), ids};
}

double uniform(std::uint64_t seed, std::int64_t n) {
  const at::Tensor value = at::empty({1}, c10::kDouble);
  tessera::uniform_(value, 0.0, 1.0, RandomKey{seed, static_cast<std::uint64_t>(n)});
  return value.item<double>();
}

}  // namespace

std::int64_t sample_token(const at::Tensor& logits, const SamplingOptions& options,
                          std::int64_t n) {
  if (options.temperature == 0) return logits.argmax().item<std::int64_t>();
  const auto [probabilities, ids] = allowed(logits, options);
  const at::Tensor cumulative = probabilities.cumsum(0);
  const double target = uniform(options.seed, n) * cumulative[-1].item<double>();
  const auto index = (cumulative <= target).sum().item<std::int64_t>();
  return ids[std::min(index, probabilities.size(0) - 1)].item<std::int64_t>();
}

void generate(Llama& model, const std::vector<std::int64_t>& prompt, const SamplingOptions& options,
              const std::function<void(std::int64_t)>& emit) {
  TESSERA_CHECK(!prompt.empty(), "the prompt is empty; pass at least one character");
  const c10::NoGradGuard no_grad;
  KvCache cache;
  at::Tensor input = at::tensor(prompt, c10::kLong).unsqueeze(0);
  for (std::int64_t n = 0; n < options.max_tokens; ++n) {
    const std::int64_t token = sample_token(model(input, &cache)[-1], options, n);
    emit(token);
    input = at::tensor({token}, c10::kLong).unsqueeze(0);
  }
}

}  // namespace llama
