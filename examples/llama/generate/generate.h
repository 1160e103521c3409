// Generation with a model: prompts, sampling, growing texts, and perplexity.
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

/// The sampling probabilities, fp64, of `logits`; both tensors are (texts, vocabulary). `seen`:
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
  at::Tensor seen_;  ///< which tokens each text has, (texts, vocabulary); only with a penalty
  std::uint64_t calls_ = 0;
};

/// Passes on a text that arrives in pieces, up to the first stop string. Text at the end that may
/// be the beginning of a stop string is withheld until further text arrives.
class StopStrings {
 public:
  /// `stops`: the stop strings, which must not be empty.
  explicit StopStrings(std::vector<std::string> stops);

  /// Adds a piece of text. Returns the text that may now be shown; after a stop string, "".
  std::string push(std::string_view piece);
  /// Whether a stop string was found.
  bool stopped() const { return stopped_; }
  /// Returns the withheld text, if no further piece follows.
  std::string finish();

 private:
  std::size_t held_back() const;

  std::vector<std::string> stops_;
  std::string pending_;
  bool stopped_ = false;
};

/// A prompt and the text that is generated after it.
class GrowingText {
 public:
  /// `tokens`: the prompt's tokens.
  GrowingText(std::string prompt, const Tokens& tokens,
              const tessera::data::TokenizerPtr& tokenizer, const std::vector<std::string>& stops);

  /// Adds a token. Returns the text that may now be shown.
  std::string push(std::int64_t token);
  /// Returns the withheld text, if no further token follows.
  std::string finish();
  bool stopped() const { return stops_.stopped(); }

  const std::string& prompt() const { return prompt_; }
  /// All text returned so far.
  const std::string& text() const { return text_; }
  const Tokens& tokens() const { return tokens_; }

 private:
  std::string show(std::string piece);

  std::string prompt_, text_;
  Tokens tokens_;
  tessera::data::StreamDecoder decoder_;
  StopStrings stops_;
};

/// Writes generated texts: a single text while it is generated; several texts, or JSON, after all
/// texts have ended.
class TextWriter {
 public:
  /// Writes the prompt of a single text. Does nothing without texts.
  TextWriter(std::ostream& out, std::vector<GrowingText> texts, bool json, std::int64_t max_tokens);

  /// Returns whether the text continues: no stop string was found, and the stream has not failed.
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
  bool is_whole = false;  ///< whether the prompt already has begin tokens, as from a chat template
};

/// The prompts of the command line or of the files of --prompts. A text file has one prompt per
/// line. A *.jsonl file has objects with the field "prompt": a text, or a list with one complete
/// text (is_whole). Empty lines are ignored. Throws tessera::Error, with the line, for a file that
/// cannot be read this way, and for a file without prompts. `input`: the contents of standard
/// input, for --prompts -.
std::vector<PromptText> prompt_texts(const GenerateOptions& options, const std::string& input = "");
/// Returns rank 0's standard input on all ranks of `mesh`; "" without --prompts -. Collective.
std::string standard_input(const GenerateOptions& options, const tessera::DeviceMesh& mesh);

/// Throws tessera::Error if the model cannot compute a prompt of `longest` tokens followed by
/// `max_tokens` tokens. Beyond its positions a model still computes, as in `transformers`; the
/// function then returns a warning, otherwise "".
std::string check_positions(const Config& config, std::int64_t longest, std::int64_t max_tokens);

/// Converts texts to tokens according to a model's files.
class PromptEncoder {
 public:
  /// `folder`: the model's folder. `file`: the tokenizer's file, or "" for the tokenizer in the
  /// model's folder.
  PromptEncoder(const std::string& folder, const std::string& file, const Config& config);

  const tessera::data::TokenizerPtr& tokenizer() const { return tokenizer_; }
  /// The tokens at each of which a generated text ends.
  const Tokens& end_tokens() const { return special_.end; }
  /// The tokens of a text, without begin tokens.
  Tokens encode(const std::string& text) const { return tokenizer_->encode(text); }
  /// Returns `tokens` preceded by the tokens that begin a text, if the model has begin tokens.
  Tokens with_begin_tokens(const Tokens& tokens) const;

 private:
  tessera::data::TokenizerPtr tokenizer_;
  SpecialTokens special_;
  Tokens begin_;
};

/// The time that a generation took.
struct GenerationTimes {
  std::int64_t prompt_tokens = 0;  ///< tokens of all prompts
  double prompt_s = 0;             ///< seconds until the first token of each text
  std::int64_t tokens = 0;         ///< number of tokens after the first token of each text
  double decoding_s = 0;
};

/// A function that receives each generated token of text `index`, and returns whether the text
/// continues.
using TokenSink = std::function<bool(std::size_t index, std::int64_t token)>;

/// Continues `prompts` (at least one token each) as one batch with a key-value cache. Each text
/// ends at one of the tokens `end`, which is not passed to `sink`, or after options.max_tokens. A
/// text depends on the other texts of the batch only by rounding and by its index in the batch,
/// which determines its random numbers. `ranks`: the process group of the ranks that compute the
/// model together; nullptr for one rank. With a group, the call is collective: rank 0 chooses the
/// tokens and calls `sink`, which may be empty on the other ranks. Throws Error for a prompt
/// without tokens, and the model's errors.
GenerationTimes generate(Llama& model, const std::vector<Tokens>& prompts,
                         const SamplingOptions& options, const Tokens& end, const TokenSink& sink,
                         tessera::comm::Communicator* ranks = nullptr);

/// The windows in which a text is read for its perplexity.
struct TextWindows {
  std::int64_t size = 0, stride = 0;  ///< size and stride of a window, in tokens
};

/// The windows that --seq and --stride request, or the defaults for the model. Throws
/// tessera::Error for values that the model or the text cannot use.
TextWindows perplexity_windows(const GenerateOptions& options, const Config& config);

/// How well a model predicts a text.
struct TextLoss {
  std::int64_t tokens = 0;  ///< number of predicted tokens
  double mean = 0;          ///< mean negative log likelihood, in nats; its exp is the perplexity
};

/// The loss of every token of a text except the first. The text is read in windows of `window`
/// tokens that start `stride` tokens apart; the last window may be shorter. Each token is predicted
/// once, in the first window that contains it as a target, from the preceding tokens of this
/// window. With stride == window, a window's first prediction uses only one token of context; a
/// smaller stride costs more, and gives each prediction at least window - stride tokens of context.
/// Collective if logits are split over the vocabulary. Throws Error for fewer than two tokens.
TextLoss text_loss(Llama& model, const Tokens& text, std::int64_t window, std::int64_t stride);

/// Prints the perplexity as a line, or as a JSON object.
void print_perplexity(const TextLoss& loss, bool json);

}  // namespace llama
