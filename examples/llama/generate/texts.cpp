#include "examples/llama/generate/texts.h"

#include <nlohmann/json.hpp>
#include <utility>

namespace llama {

GrowingText::GrowingText(std::string prompt, const Tokens& tokens,
                         const tessera::data::TokenizerPtr& tokenizer,
                         const std::vector<std::string>& stops)
    : prompt_(std::move(prompt)), decoder_(tokenizer, tokens), stops_(stops) {}

std::string GrowingText::push(std::int64_t token) {
  tokens_.push_back(token);
  return show(stops_.push(decoder_.push(token)));
}

std::string GrowingText::finish() {
  const std::string before = stops_.push(decoder_.finish());
  return show(before + stops_.finish());
}

std::string GrowingText::show(std::string piece) {
  text_ += piece;
  return piece;
}

TextWriter::TextWriter(std::ostream& out, std::vector<GrowingText> texts, bool json,
                       std::int64_t max_tokens)
    : out_(out), texts_(std::move(texts)), json_(json), max_tokens_(max_tokens) {
  if (streams()) {
    out_ << texts_.front().prompt() << std::flush;
  }
}

bool TextWriter::push(std::size_t index, std::int64_t token) {
  GrowingText& text = texts_[index];
  const std::string piece = text.push(token);
  if (streams()) {
    out_ << piece << std::flush;
  }
  // Nobody would read the rest.
  return !text.stopped() && out_.good();
}

void TextWriter::finish() {
  for (std::size_t i = 0; i < texts_.size(); ++i) {
    GrowingText& text = texts_[i];
    const std::string rest = text.finish();
    if (json_) {
      out_ << json_of(text) << '\n';
    } else if (streams()) {
      out_ << rest << '\n';
    } else {
      out_ << "--- " << i + 1 << " of " << texts_.size() << " ---\n"
           << text.prompt() << text.text() << '\n';
    }
  }
  out_ << std::flush;
}

std::string TextWriter::json_of(const GrowingText& text) const {
  const bool full = std::ssize(text.tokens()) == max_tokens_;
  const char* ended = full ? "length" : "end";
  const nlohmann::ordered_json json = {{"prompt", text.prompt()},
                                       {"text", text.text()},
                                       {"tokens", text.tokens()},
                                       {"finish", text.stopped() ? "stop" : ended}};
  // Tokens may be bytes. Some bytes are no character.
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace llama
