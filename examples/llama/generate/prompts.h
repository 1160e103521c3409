// The prompts of llama_generate, from its flags or a file, to tokens.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "examples/llama/generate/generate_options.h"
#include "examples/llama/generate/sampling.h"
#include "examples/llama/models.h"
#include "tessera/data/chat_template.h"
#include "tessera/data/tokenizer.h"
#include "tessera/mesh/device_mesh.h"

namespace llama {

struct PromptText {
  std::string text;
  bool is_chat = false;  ///< a chat template wrote it, with what begins texts
};

/// The prompts of the command line, or of the files of --prompts: a line each, or of a *.jsonl file
/// the "prompt" of each line's object, or its "messages" by `chat`; empty lines are passed over.
/// Throws tessera::Error, naming the line, for a file that can't be read so, and for one without
/// prompts. `input`: what standard input holds, for --prompts -.
std::vector<PromptText> prompt_texts(const GenerateOptions& options, const std::string& input = "",
                                     const tessera::data::ChatTemplatePtr& chat = nullptr);
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
  /// nullptr where the model has none.
  const tessera::data::ChatTemplatePtr& chat() const { return chat_; }
  /// The text's own tokens.
  Tokens encode(const std::string& text) const { return tokenizer_->encode(text); }
  /// `tokens` behind those that begin a text, where the model has any.
  Tokens with_begin_tokens(const Tokens& tokens) const;

 private:
  tessera::data::TokenizerPtr tokenizer_;
  tessera::data::ChatTemplatePtr chat_;
  SpecialTokens special_;
  Tokens begin_;
};

}  // namespace llama
