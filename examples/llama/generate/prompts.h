// The prompts of llama_generate, from its flags or a file, to tokens.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "examples/llama/generate/generate_options.h"
#include "examples/llama/generate/sampling.h"
#include "examples/llama/models.h"
#include "tessera/data/tokenizer.h"
#include "tessera/mesh/device_mesh.h"

namespace llama {

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

}  // namespace llama
