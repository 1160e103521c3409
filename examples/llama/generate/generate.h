// Sampling and prompts of llama_generate.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "examples/llama/generate/generate_options.h"
#include "examples/llama/start.h"

namespace llama {

/// Returns the sampling probabilities of `logits`, in fp64; both are (texts, vocabulary). Applies
/// the options in the order of `transformers`: temperature (not 0), top-k, top-p. Top-p keeps the
/// smallest set of tokens with total probability >= `top_p`, but at least the most likely token
/// (Holtzman et al. 2020). All tokens that are not kept get probability 0.
at::Tensor token_probabilities(const at::Tensor& logits, const SamplingOptions& options);

/// Chooses the next token of each text in a batch.
class Sampler {
 public:
  explicit Sampler(SamplingOptions options) : options_(options) {}
  /// Returns one token per text from logits (texts, vocabulary): the most likely token at
  /// temperature 0, otherwise a random token. The random choice for a text in the n-th call depends
  /// on the seed, on n, and on the text's index in the batch.
  Tokens next(const at::Tensor& logits);

 private:
  at::Tensor draw(const at::Tensor& probabilities) const;

  SamplingOptions options_;
  std::uint64_t calls_ = 0;
};

struct PromptText {
  std::string text;
  bool is_whole = false;  ///< whether a chat template has added beginning-of-text tokens
};

/// Returns the prompts of the command line and of the files of --prompts. A text file has one
/// prompt per line. A *.jsonl file has one object per line; the field "prompt" is a string, or a
/// list of one string, which sets is_whole. Empty lines are ignored. Throws tessera::Error for a
/// file without prompts, and for a line of another format; the message has the line's number.
std::vector<PromptText> prompt_texts(const GenerateOptions& options);

}  // namespace llama
