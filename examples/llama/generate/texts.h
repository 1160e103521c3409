// What llama_generate shows of the texts that it makes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "examples/llama/generate/sampling.h"
#include "examples/llama/generate/stop_strings.h"
#include "tessera/data/tokenizer.h"

namespace llama {

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

  /// Returns whether the text goes on: no stop string has come, and the stream takes more.
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

}  // namespace llama
