// Sampling and prompts of llama_generate.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "examples/llama/generate/generate_options.h"
#include "examples/llama/start.h"

namespace llama {

/// Returns the sampling probabilities (fp64) of `logits`; both are (texts, vocabulary). Applies
/// temperature (not 0), top-k and top-p in this order, like `transformers`. Top-p (Holtzman et al.
/// 2020) always keeps the most likely token.
at::Tensor token_probabilities(const at::Tensor& logits, const SamplingOptions& options);

/// Chooses the next token of each text in a batch.
class Sampler {
 public:
  explicit Sampler(SamplingOptions options) : options_(options) {}
  /// Returns one token per text from logits (texts, vocabulary): the most likely token at
  /// temperature 0, otherwise a random token. The random choice depends on the seed, the number of
  /// the call, and the text's index.
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
/// prompt per line, a *.jsonl file one object with a field "prompt" per line. Throws tessera::Error
/// for a file without prompts, and for a wrong line.
std::vector<PromptText> prompt_texts(const GenerateOptions& options);

}  // namespace llama
