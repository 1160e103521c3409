// Sampling, stop strings and prompts of llama_generate.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "examples/llama/generate/generate_options.h"
#include "examples/llama/start.h"

namespace llama {

/// Returns the sampling probabilities of `logits`, in fp64; both are (texts, vocabulary). `seen`:
/// bool of the same sizes, true for tokens already in the text; undefined without a repetition
/// penalty. The options are applied in the order of `transformers`: repetition penalty (Keskar et
/// al. 2019: the logit of a seen token is divided by the penalty, or multiplied if the logit is
/// negative); temperature, which must not be 0; top-k; top-p, the smallest set of tokens with total
/// probability >= `top_p` (Holtzman et al. 2020; at least the most likely token); min-p, tokens at
/// least `min_p` times as likely as the most likely token (Nguyen et al. 2024). All other tokens
/// get probability 0.
at::Tensor token_probabilities(const at::Tensor& logits, const at::Tensor& seen,
                               const SamplingOptions& options);

/// Chooses the next tokens of the texts of a batch.
class Sampler {
 public:
  /// `prompts`: the beginnings of the texts, for the repetition penalty.
  Sampler(SamplingOptions options, std::vector<Tokens> prompts);
  /// Returns one token per text from logits (texts, vocabulary): the most likely token at
  /// temperature 0, else a random draw. A text's draw in the n-th call depends only on the seed, n,
  /// and the text's index in the batch.
  Tokens next(const at::Tensor& logits);

 private:
  at::Tensor draw(const at::Tensor& probabilities) const;
  void remember(const at::Tensor& tokens);

  SamplingOptions options_;
  std::vector<Tokens> prompts_;
  at::Tensor seen_;  ///< which tokens each text has, (texts, vocabulary); for the penalty
  std::uint64_t calls_ = 0;
};

/// Passes on a text that arrives in parts, up to the first stop string. An end of the text that may
/// be the beginning of a stop string is withheld.
class StopStrings {
 public:
  /// `stops`: the stop strings, which must not be empty.
  explicit StopStrings(std::vector<std::string> stops);

  /// Adds a part of the text. Returns the text that may now be shown; after a stop string, "".
  std::string push(std::string_view piece);
  /// Whether a stop string was found.
  bool stopped() const { return stopped_; }
  /// Returns the withheld text. To be called at the end of the text.
  std::string finish();

 private:
  std::size_t held_back() const;

  std::vector<std::string> stops_;
  std::string pending_;
  bool stopped_ = false;
};

struct PromptText {
  std::string text;
  bool is_whole = false;  ///< whether the prompt already has begin tokens, as from a chat template
};

/// The value of --prompts that means standard input.
inline constexpr const char* kStandardInput = "-";

/// Returns the prompts of the command line or of the files of --prompts. A text file has one prompt
/// per line. A *.jsonl file has objects with the field "prompt": a text, or a list with one
/// complete text (is_whole). Empty lines are ignored. Throws tessera::Error, with the line, for a
/// file that cannot be read this way, and for a file without prompts. `input`: the contents of
/// standard input, for --prompts -.
std::vector<PromptText> prompt_texts(const GenerateOptions& options, const std::string& input = "");

}  // namespace llama
