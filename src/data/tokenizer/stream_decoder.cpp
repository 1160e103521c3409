#include "tessera/data/stream_decoder.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

#include "unicode/utf8.h"

namespace tessera::data {
namespace {

/// A character has at most four bytes.
constexpr std::size_t kMaxUnfinished = 3;
/// Tokens before the new ones that decide how those are decoded: the space before a word. More than
/// those that are not finished.
constexpr std::size_t kContext = kMaxUnfinished + 1;

/// How many bytes at the end of `text` further tokens may change. Some tokenizers decode each byte
/// of what is not complete to a replacement character.
std::size_t unfinished_suffix(std::string_view text) {
  std::size_t bytes = incomplete_suffix(text);
  if (bytes > 0) {
    return bytes;
  }
  for (std::size_t i = 0; i < kMaxUnfinished && text.ends_with(kReplacementCharacter); ++i) {
    text.remove_suffix(kReplacementCharacter.size());
    bytes += kReplacementCharacter.size();
  }
  return bytes;
}

}  // namespace

StreamDecoder::StreamDecoder(TokenizerPtr tokenizer, const std::vector<std::int64_t>& before)
    : tokenizer_(std::move(tokenizer)) {
  std::size_t first = before.size();
  for (std::size_t found = 0; first > 0 && found < kContext;) {
    found += has_own_text(before[--first]) ? 1 : 0;
  }
  for (; first < before.size(); ++first) {
    push(before[first]);
  }
  // Bytes of a character that is not complete have been shown too.
  given_ = tokenizer_->decode(window_).size();
}

std::string StreamDecoder::push(std::int64_t token) {
  if (!has_text(token)) {
    return "";
  }
  window_.push_back(token);
  const std::string text = tokenizer_->decode(window_);
  return give_all_but(unfinished_suffix(text), text);
}

std::string StreamDecoder::finish() {
  return give_all_but(0, tokenizer_->decode(window_));
}

/// A model's vocabulary may be padded beyond the tokenizer's: transformers decodes these to
/// nothing.
bool StreamDecoder::has_own_text(std::int64_t token) const {
  // Twice, as some decoders take the space at the beginning.
  return token < tokenizer_->vocabulary() && !tokenizer_->decode({token, token}).empty();
}

/// A space alone has its text only behind others, where a decoder takes all space at the beginning.
bool StreamDecoder::has_text(std::int64_t token) const {
  if (token >= tokenizer_->vocabulary()) {
    return false;
  }
  if (has_own_text(token)) {
    return true;
  }
  std::vector<std::int64_t> with = window_;
  with.push_back(token);
  return tokenizer_->decode(with) != tokenizer_->decode(window_);
}

std::string StreamDecoder::give_all_but(std::size_t held, std::string_view text) {
  text.remove_suffix(held);
  std::string piece(text.substr(std::min(given_, text.size())));
  given_ = std::max(given_, text.size());
  if (window_.size() > 2 * kContext) {
    shorten_window();
    given_ = tokenizer_->decode(window_).size() - held;
  }
  return piece;
}

void StreamDecoder::shorten_window() {
  const auto end_of_old = window_.end() - kContext;
  std::vector<std::int64_t> window(end_of_old, window_.end());
  // Spaces alone need a text before them.
  if (tokenizer_->decode(window).empty()) {
    const auto text = std::find_if(std::reverse_iterator(end_of_old), window_.rend(),
                                   [&](std::int64_t token) { return has_own_text(token); });
    window.insert(window.begin(), text, text == window_.rend() ? text : text + 1);
  }
  window_ = std::move(window);
}

}  // namespace tessera::data
