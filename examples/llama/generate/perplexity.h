#pragma once

#include <cstdint>

#include "examples/llama/generate/sampling.h"
#include "examples/llama/models.h"

namespace llama {

/// How a text is read for its perplexity.
struct TextWindows {
  std::int64_t size = 0, stride = 0;  ///< tokens
};

/// Those of --seq and --stride, or what they are by default for this model. Throws tessera::Error
/// where the model or the text has no use for them.
TextWindows perplexity_windows(const GenerateOptions& options, const Config& config);

/// How well a model predicts a text.
struct TextLoss {
  std::int64_t tokens = 0;  ///< that were predicted
  double mean = 0;          ///< of their negative log likelihoods, in nats; perplexity is its exp
};

/// The loss of every token of a text but the first. The text is read in windows of `window` tokens,
/// each `stride` tokens after the one before, the last as long as the rest: a token is predicted
/// once, in the first window that predicts it, from what that holds before it. With stride ==
/// window a window's first token is predicted from one token alone; a smaller stride costs more,
/// and leaves each token at least window - stride of them. Logits may be split over the vocabulary;
/// then collective. Throws Error for fewer than two tokens.
TextLoss text_loss(Llama& model, const Tokens& text, std::int64_t window, std::int64_t stride);

/// Prints it as a line, or as a JSON object.
void print_perplexity(const TextLoss& loss, bool json);

}  // namespace llama
