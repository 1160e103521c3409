// Texts from a model: prompts, sampling, texts under way, and perplexity.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "examples/llama/generate/generate_options.h"
#include "examples/llama/start.h"
#include "tessera/comm/communicator.h"
#include "tessera/data/tokenizer.h"
#include "tessera/mesh/device_mesh.h"

namespace llama {

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

/// Passes on a text that comes in pieces, up to the first of some strings: no part of one is shown
/// that may still become whole.
class StopStrings {
 public:
  /// None of them empty.
  explicit StopStrings(std::vector<std::string> stops);

  /// What may be shown with this piece; after a stop nothing.
  std::string push(std::string_view piece);
  /// Whether one of the strings has come.
  bool stopped() const { return stopped_; }
  /// The rest of the text, when no piece follows.
  std::string finish();

 private:
  std::size_t held_back() const;

  std::vector<std::string> stops_;
  std::string pending_;
  bool stopped_ = false;
};

/// A prompt, and the text that follows it.
class GrowingText {
 public:
  /// `tokens`: the prompt's own.
  GrowingText(std::string prompt, const Tokens& tokens,
              const tessera::data::TokenizerPtr& tokenizer, const std::vector<std::string>& stops);

  /// What may be shown with this token.
  std::string push(std::int64_t token);
  /// What is left when no token follows.
  std::string finish();
  bool stopped() const { return stops_.stopped(); }

  const std::string& prompt() const { return prompt_; }
  /// All that was shown.
  const std::string& text() const { return text_; }
  const Tokens& tokens() const { return tokens_; }

 private:
  std::string show(std::string piece);

  std::string prompt_, text_;
  Tokens tokens_;
  tessera::data::StreamDecoder decoder_;
  StopStrings stops_;
};

/// Writes texts: a single one as it comes; several, or JSON, when all have ended.
class TextWriter {
 public:
  /// Writes the prompt of a single text. Without texts it writes nothing.
  TextWriter(std::ostream& out, std::vector<GrowingText> texts, bool json, std::int64_t max_tokens);

  /// Whether the text continues: no stop string was found, and the stream accepts more.
  bool push(std::size_t index, std::int64_t token);
  void finish();

 private:
  bool streams() const { return texts_.size() == 1 && !json_; }
  std::string json_of(const GrowingText& text) const;

  std::ostream& out_;
  std::vector<GrowingText> texts_;
  bool json_;
  std::int64_t max_tokens_;
};

struct PromptText {
  std::string text;
  bool is_whole = false;  ///< has the tokens that begin texts, as a chat template writes them
};

/// The prompts of the command line, or of the files of --prompts: one a line, or of a *.jsonl file
/// the "prompt" of each line: a text, or a list of one text that is whole. Empty lines are ignored.
/// Throws tessera::Error, naming the line, for a file that cannot be read so, and for a file
/// without prompts. `input`: the contents of standard input, for --prompts -.
std::vector<PromptText> prompt_texts(const GenerateOptions& options, const std::string& input = "");
/// What standard input of rank 0 holds, on all ranks of `mesh`; "" without --prompts -. Collective.
std::string standard_input(const GenerateOptions& options, const tessera::DeviceMesh& mesh);

/// Throws tessera::Error where a prompt of `longest` tokens, or `max_tokens` more, are not for a
/// model of these positions. Beyond them a model still computes, as it does in transformers: the
/// result is a warning of that, or "".
std::string check_positions(const Config& config, std::int64_t longest, std::int64_t max_tokens);

/// Turns texts into tokens as the files of a model say.
class PromptEncoder {
 public:
  /// `folder`: the model's. `file`: the tokenizer's, or "" for the model's own.
  PromptEncoder(const std::string& folder, const std::string& file, const Config& config);

  const tessera::data::TokenizerPtr& tokenizer() const { return tokenizer_; }
  /// A text ends at any of these.
  const Tokens& end_tokens() const { return special_.end; }
  /// The text's own tokens.
  Tokens encode(const std::string& text) const { return tokenizer_->encode(text); }
  /// `tokens` behind those that begin a text, where the model has any.
  Tokens with_begin_tokens(const Tokens& tokens) const;

 private:
  tessera::data::TokenizerPtr tokenizer_;
  SpecialTokens special_;
  Tokens begin_;
};

/// How long a generation took.
struct GenerationTimes {
  std::int64_t prompt_tokens = 0;  ///< of all prompts
  double prompt_s = 0;             ///< up to the first token of each text
  std::int64_t tokens = 0;         ///< that followed the first ones
  double decoding_s = 0;
};

/// Is given the tokens of text `index` as they come; returns whether the text goes on.
using TokenSink = std::function<bool(std::size_t index, std::int64_t token)>;

/// Continues `prompts` (at least one token each) as one batch with a key-value cache, each up to
/// one of the tokens `end`, which is not given to `sink`, or options.max_tokens. A text does not
/// depend on the others of the batch but for rounding, and for its draws' place. `ranks`: the group
/// of ranks that compute the model together, nullptr for one; then collective: rank 0 chooses the
/// tokens, and calls `sink`, which the others may leave empty. Throws Error for a prompt without
/// tokens, and what the model throws.
GenerationTimes generate(Llama& model, const std::vector<Tokens>& prompts,
                         const SamplingOptions& options, const Tokens& end, const TokenSink& sink,
                         tessera::comm::Communicator* ranks = nullptr);

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
