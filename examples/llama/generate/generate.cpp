// Sampling and prompts of llama_generate.

#include "examples/llama/generate/generate.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/nextafter.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <sstream>

#include "tessera/core/error.h"
#include "tessera/data/text.h"
#include "tessera/dtensor/random.h"

namespace llama {

// ---- Sampling.

namespace {

constexpr double kRefused = -std::numeric_limits<double>::infinity();

/// If a token is less likely than the k-th most likely token, sets the token's score to -inf.
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
  // A token is rejected if the more likely tokens already have probability p in total. The most
  // likely token is never rejected.
  const at::Tensor before = sorted.cumsum(-1) - sorted;
  const at::Tensor refused = before.ge(p);
  return scores.masked_fill(refused.scatter(-1, ids, refused), kRefused);
}

}  // namespace

at::Tensor token_probabilities(const at::Tensor& logits, const SamplingOptions& options) {
  // The scores are fp64 numbers, so that the cumulative sum over a large vocabulary is accurate.
  const at::Tensor scores = logits.to(c10::kDouble) / options.temperature;
  return keep_top_p(keep_top_k(scores, options.top_k), options.top_p).softmax(-1);
}

Tokens Sampler::next(const at::Tensor& logits) {
  TESSERA_CHECK(!logits.isnan().any().item<bool>(),
                "the logits of the next token contain NaN: the weights contain NaN, or matrix "
                "products overflow in fp16; check the weights, or pass --dtype bf16 or fp32");
  // Temperature 0 selects the most likely token.
  const at::Tensor tokens = options_.temperature == 0 ? logits.to(c10::kDouble).argmax(-1)
                                                      : draw(token_probabilities(logits, options_));
  ++calls_;
  const at::Tensor on_host = tokens.to(c10::kCPU).contiguous();
  const auto* first = on_host.const_data_ptr<std::int64_t>();
  return {first, first + on_host.numel()};
}

/// Samples by inverse transform: selects the first token whose cumulative probability exceeds a
/// uniform random number.
at::Tensor Sampler::draw(const at::Tensor& probabilities) const {
  const at::Tensor uniform = at::empty({probabilities.size(0)}, c10::kDouble);
  tessera::uniform_(uniform, 0.0, 1.0, {options_.seed, calls_});
  const at::Tensor cumulative = probabilities.cumsum(-1);
  const at::Tensor sum = cumulative.slice(-1, -1);
  // Rounding can make the last cumulative sum differ from 1, so the random number is scaled by this
  // sum. A `target` equal to this sum could select a rejected token.
  const at::Tensor target = at::minimum(uniform.to(probabilities.device()).unsqueeze(1) * sum,
                                        at::nextafter(sum, at::zeros({}, sum.options())));
  return cumulative.le(target).sum(-1);
}

// ---- Prompts.

namespace {

PromptText prompt_of_json(const std::string& line, const std::string& place) {
  const tessera::data::JsonTexts prompt =
      tessera::data::json_text_lists(line, {"prompt"}, place).front();
  TESSERA_CHECK(prompt.texts.size() == 1 && !prompt.texts.front().empty(), place,
                ": \"prompt\" must be one string that is not empty; write {\"prompt\": \"...\"} in "
                "each line");
  return {prompt.texts.front(), prompt.is_list};
}

std::vector<PromptText> prompts_of(const std::string& file, const std::string& content) {
  const bool is_json = file.ends_with(".jsonl");
  std::istringstream lines(content);
  std::vector<PromptText> prompts;
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    if (line.ends_with('\r')) {
      line.pop_back();
    }
    if (!line.empty()) {
      const std::string place = file + ":" + std::to_string(number);
      prompts.push_back(is_json ? prompt_of_json(line, place) : PromptText{line});
    }
  }
  TESSERA_CHECK(!prompts.empty(), file, " contains no prompt; write one prompt per line");
  return prompts;
}

}  // namespace

std::vector<PromptText> prompt_texts(const GenerateOptions& options) {
  std::vector<PromptText> prompts;
  for (const std::string& text : options.prompt) {
    prompts.push_back({text});
  }
  for (const std::string& file : options.prompts) {
    const std::vector<PromptText> some = prompts_of(file, tessera::data::read_text(file));
    prompts.insert(prompts.end(), some.begin(), some.end());
  }
  return prompts;
}

}  // namespace llama
