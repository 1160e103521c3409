#include "tessera/data/tokenizer.h"
#include "tessera/data/detail/tokenizers.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <span>
#include <utility>

#include "files_beside.h"
#include "tessera/core/detail/read_error.h"
#include "tessera/core/error.h"
#include "tessera/core/input_file.h"
#include "unicode.h"

namespace tessera::data {
namespace {

enum class TokenizerForm { kJson, kTiktoken, kSentencePiece };

/// The beginning of a file, long enough for one line of the tiktoken format.
std::string beginning_of(const std::filesystem::path& path) {
  constexpr std::uint64_t kBytes = 16 * 1024;
  const tessera::files::InputFile file(path, "a tokenizer");
  std::string text(std::min(file.size(), kBytes), '\0');
  file.read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

/// Whether a line has the form "TOKEN RANK" with the token in base64.
bool is_tiktoken_line(std::string_view line) {
  if (line.ends_with('\r')) {
    line.remove_suffix(1);  // the reader rejects the carriage return later
  }
  const std::size_t space = line.find(' ');
  const auto is_base64 = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '+' ||
           c == '/' || c == '=';
  };
  return space != std::string::npos && space > 0 && space + 1 < line.size() &&
         std::ranges::all_of(line.substr(0, space), is_base64) &&
         line.substr(space + 1).find_first_not_of("0123456789") == std::string::npos;
}

TokenizerForm form_of(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && text[first] == '{') {
    return TokenizerForm::kJson;
  }
  return is_tiktoken_line(text.substr(0, text.find('\n'))) ? TokenizerForm::kTiktoken
                                                           : TokenizerForm::kSentencePiece;
}

/// Returns the path itself, or the tokenizer's file in a folder.
std::string file_of(const std::string& path) {
  if (!std::filesystem::is_directory(path)) {
    return path;
  }
  const auto file = find_tokenizer(path);
  TESSERA_CHECK(file, "the folder '", path,
                "' has no tokenizer.json and no tokenizer.model: give the tokenizer's file");
  return *file;
}

}  // namespace

std::optional<std::string> find_tokenizer(const std::string& folder) {
  for (const char* name : {"tokenizer.json", "tokenizer.model"}) {
    const std::filesystem::path path = std::filesystem::path(folder) / name;
    if (has_file(path)) {
      return path.string();
    }
  }
  return std::nullopt;
}

std::vector<std::string> tokenizer_files(const std::string& path) {
  const std::string own = file_of(path);
  std::vector<std::string> files{own};
  if (form_of(beginning_of(own)) != TokenizerForm::kTiktoken) {
    for (const std::filesystem::path& file : read_files_beside(own).read) {
      files.push_back(file.string());
    }
  }
  return files;
}

bool is_tokenizer_json(const std::string& path) {
  return form_of(beginning_of(path)) == TokenizerForm::kJson;
}

TokenizerPtr open_tokenizer(const std::string& path) {
  const std::string file = file_of(path);
  const std::string beginning = beginning_of(file);
  TESSERA_CHECK(!beginning.starts_with(tessera::detail::kByteOrderMark),
                "cannot read the tokenizer '", file,
                "': it begins with a byte order mark: save it without one");
  switch (form_of(beginning)) {
    case TokenizerForm::kJson:
      return json_tokenizer(file, read_files_beside(file));
    case TokenizerForm::kTiktoken:
      return tiktoken_tokenizer(file);
    default:
      return sentencepiece_tokenizer(file, read_files_beside(file));
  }
}

namespace {

/// A tokenizer for tests and small examples, which needs no file.
class ByteTokenizer final : public Tokenizer {
 public:
  std::int64_t vocabulary() const override { return 256; }

  std::vector<std::int64_t> encode(std::string_view text) const override {
    // Bytes are read as unsigned, because token ids begin at 0.
    const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
    return {bytes, bytes + text.size()};
  }

  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    std::string text;
    text.reserve(tokens.size());
    for (const auto token : tokens) {
      TESSERA_CHECK(token >= 0 && token < vocabulary(), "token ", token,
                    " is not a byte: decode with the tokenizer that made it");
      text.push_back(static_cast<char>(token));
    }
    return text;
  }
};

}  // namespace

TokenizerPtr byte_tokenizer() {
  return std::make_shared<ByteTokenizer>();
}

namespace {

/// The maximum bytes of an incomplete character, because a character has at most four bytes.
constexpr std::size_t kMaxUnfinished = 3;
/// The number of earlier tokens that can change how the next tokens are decoded (for example, the
/// space before a word): one more than the tokens of an incomplete character.
constexpr std::size_t kContext = kMaxUnfinished + 1;

/// The number of bytes at the end of `text` that further tokens may change. Some tokenizers decode
/// each byte of an incomplete character to U+FFFD.
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
  // Bytes of an incomplete character count as returned.
  given_ = tokenizer_->decode(window_).size();
}

std::string StreamDecoder::push(std::int64_t token) {
  if (!has_text(token)) {
    return "";
  }
  window_.push_back(token);
  const std::string text = tokenizer_->decode(window_);
  return take_new(unfinished_suffix(text), text);
}

std::string StreamDecoder::finish() {
  return take_new(0, tokenizer_->decode(window_));
}

/// Whether a token alone decodes to text. The padding of a model's vocabulary does not, as in
/// `transformers`.
bool StreamDecoder::has_own_text(std::int64_t token) const {
  // Decodes the token twice, because some decoders remove a leading space.
  return token < tokenizer_->vocabulary() && !tokenizer_->decode({token, token}).empty();
}

/// Whether a token has text after other tokens. If a decoder removes all leading space, a space
/// token has text only after other tokens.
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

std::string StreamDecoder::take_new(std::size_t unfinished, std::string_view text) {
  text.remove_suffix(unfinished);
  std::string piece(text.substr(std::min(given_, text.size())));
  given_ = std::max(given_, text.size());
  if (window_.size() > 2 * kContext) {
    shorten_window();
    given_ = tokenizer_->decode(window_).size() - unfinished;
  }
  return piece;
}

void StreamDecoder::shorten_window() {
  const auto end_of_old = window_.end() - kContext;
  std::vector<std::int64_t> window(end_of_old, window_.end());
  // Space tokens need a preceding token with text.
  if (tokenizer_->decode(window).empty()) {
    const auto text = std::find_if(std::reverse_iterator(end_of_old), window_.rend(),
                                   [&](std::int64_t token) { return has_own_text(token); });
    window.insert(window.begin(), text, text == window_.rend() ? text : text + 1);
  }
  window_ = std::move(window);
}

}  // namespace tessera::data
