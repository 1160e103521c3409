// Draws are a function of the seed and their number (the random numbers of the library by element),
// so that a text can be made again on any machine with equal logits.

#include "examples/llama/generate/sampling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/nextafter.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/dtensor/random.h"

namespace llama {
namespace {

constexpr double kRefused = -std::numeric_limits<double>::infinity();

at::Tensor penalized(const at::Tensor& scores, const at::Tensor& seen, double penalty) {
  if (!seen.defined()) {
    return scores;
  }
  return at::where(seen, at::where(scores.lt(0), scores * penalty, scores / penalty), scores);
}

/// Tokens as likely as the k-th stay, too.
at::Tensor keep_top_k(const at::Tensor& scores, std::int64_t k) {
  if (k == 0 || k >= scores.size(-1)) {
    return scores;
  }
  const at::Tensor least = std::get<0>(scores.topk(k)).slice(-1, k - 1);
  return scores.masked_fill(scores.lt(least), kRefused);
}

at::Tensor keep_top_p(const at::Tensor& scores, double p) {
  if (p >= 1) {
    return scores;
  }
  const auto [sorted, ids] = scores.softmax(-1).sort(-1, /*descending=*/true);
  // A token stays if those before it don't yet hold p; the likeliest always does.
  const at::Tensor before = sorted.cumsum(-1) - sorted;
  const at::Tensor refused = before.ge(p);
  return scores.masked_fill(refused.scatter(-1, ids, refused), kRefused);
}

at::Tensor keep_min_p(const at::Tensor& scores, double p) {
  if (p == 0) {
    return scores;
  }
  const at::Tensor probabilities = scores.softmax(-1);
  return scores.masked_fill(probabilities.lt(probabilities.amax(-1, /*keepdim=*/true) * p),
                            kRefused);
}

}  // namespace

at::Tensor token_probabilities(const at::Tensor& logits, const at::Tensor& seen,
                               const SamplingOptions& options) {
  // In double, so that the cumulative sum over a large vocabulary is exact enough.
  const at::Tensor scores =
      penalized(logits.to(c10::kDouble), seen, options.repetition_penalty) / options.temperature;
  return keep_min_p(keep_top_p(keep_top_k(scores, options.top_k), options.top_p), options.min_p)
      .softmax(-1);
}

Sampler::Sampler(SamplingOptions options, std::vector<Tokens> prompts)
    : options_(options), prompts_(std::move(prompts)) {
  TESSERA_CHECK(options.top_p > 0 && options.top_p <= 1, "top_p is ", options.top_p,
                "; it must be above 0 and at most 1");
}

Tokens Sampler::next(const at::Tensor& logits) {
  TESSERA_CHECK(
      !logits.isnan().any().item<bool>(),
      "the logits of the next token are not numbers; the weights are not either, or their "
      "products are beyond fp16: take --dtype bf16 or fp32");
  if (options_.repetition_penalty != 1 && !seen_.defined()) {
    seen_ = at::zeros_like(logits, at::dtype(c10::kBool));
    for (std::size_t i = 0; i < prompts_.size(); ++i) {
      seen_[static_cast<std::int64_t>(i)].index_fill_(
          0, at::tensor(prompts_[i], at::dtype(c10::kLong)).to(logits.device()), true);
    }
  }
  // Temperature 0 is the limit of ever sharper distributions: the likeliest token.
  const at::Tensor tokens =
      options_.temperature == 0
          ? penalized(logits.to(c10::kDouble), seen_, options_.repetition_penalty).argmax(-1)
          : draw(token_probabilities(logits, seen_, options_));
  ++calls_;
  remember(tokens);
  const at::Tensor on_host = tokens.to(c10::kCPU).contiguous();
  const auto* first = on_host.const_data_ptr<std::int64_t>();
  return {first, first + on_host.numel()};
}

/// By inversion: the first token at which the cumulative probability exceeds a uniform number.
at::Tensor Sampler::draw(const at::Tensor& probabilities) const {
  const at::Tensor uniform = at::empty({probabilities.size(0)}, c10::kDouble);
  tessera::uniform_(uniform, 0.0, 1.0, {options_.seed, calls_});
  const at::Tensor cumulative = probabilities.cumsum(-1);
  const at::Tensor sum = cumulative.slice(-1, -1);
  // Scaled by the sum, which rounding keeps from being 1. Never the sum itself: a token that is
  // refused could stand there.
  const at::Tensor target = at::minimum(uniform.to(probabilities.device()).unsqueeze(1) * sum,
                                        at::nextafter(sum, at::zeros({}, sum.options())));
  return cumulative.le(target).sum(-1);
}

void Sampler::remember(const at::Tensor& tokens) {
  if (seen_.defined()) {
    seen_.scatter_(1, tokens.unsqueeze(1), true);
  }
}

}  // namespace llama
