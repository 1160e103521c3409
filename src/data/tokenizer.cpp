#include <algorithm>
#include <cctype>
#include <iterator>
#include <span>
#include <utility>

#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"
#include "tokenizer_parts.h"
#include "unicode.h"

namespace tessera::data {
namespace {

enum class TokenizerForm { kJson, kTiktoken, kSentencePiece };

std::string beginning_of(const std::filesystem::path& path) {
  constexpr std::uint64_t kBytes = 1024;
  const tessera::files::InputFile file(path, "a tokenizer");
  std::string text(std::min(file.size(), kBytes), '\0');
  file.read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

/// Distinguishes tokenizer files by the first character: "{" in tokenizer.json, base64 in tiktoken,
/// a line feed (a protobuf tag) in SentencePiece.
TokenizerForm form_of(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && text[first] == '{') {
    return TokenizerForm::kJson;
  }
  const auto is_base64 = [](unsigned char c) { return std::isalnum(c) || c == '+' || c == '/'; };
  return !text.empty() && is_base64(static_cast<unsigned char>(text[0]))
             ? TokenizerForm::kTiktoken
             : TokenizerForm::kSentencePiece;
}

/// Returns `path` itself or, if `path` is a folder, the tokenizer's file in the folder.
std::string file_of(const std::string& path) {
  std::error_code error;  // an error is ignored here, because opening the file reports the error
  if (!std::filesystem::is_directory(path, error)) {
    return path;
  }
  const auto file = find_tokenizer(path);
  TESSERA_CHECK(file, "the folder '", path,
                "' has no tokenizer.json and no tokenizer.model; pass the tokenizer's file");
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
    for (const std::filesystem::path& file : read_tokenizer_settings(own).read) {
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
                "': the file begins with a byte order mark; save the file without the mark");
  switch (form_of(beginning)) {
    case TokenizerForm::kJson:
      return json_tokenizer(file, read_tokenizer_settings(file));
    case TokenizerForm::kTiktoken:
      return tiktoken_tokenizer(file);
    default:
      return sentencepiece_tokenizer(file, read_tokenizer_settings(file));
  }
}

namespace {

/// A tokenizer whose tokens are bytes. ByteTokenizer needs no file and is used for tests.
class ByteTokenizer final : public Tokenizer {
 public:
  std::int64_t vocabulary() const override { return 256; }

  std::vector<std::int64_t> encode(std::string_view text) const override {
    const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
    return {bytes, bytes + text.size()};
  }

  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    std::string text;
    text.reserve(tokens.size());
    for (const auto token : tokens) {
      TESSERA_CHECK(token >= 0 && token < vocabulary(), "token ", token,
                    " is not a byte, 0 to 255; decode with the tokenizer that encoded the text");
      text.push_back(static_cast<char>(token));
    }
    return text;
  }
};

}  // namespace

TokenizerPtr byte_tokenizer() {
  return std::make_shared<ByteTokenizer>();
}

StreamDecoder::StreamDecoder(TokenizerPtr tokenizer, const std::vector<std::int64_t>& before)
    : tokenizer_(std::move(tokenizer)) {
  std::ranges::copy_if(before, std::back_inserter(window_),
                       [&](std::int64_t token) { return token < tokenizer_->vocabulary(); });
  given_ = tokenizer_->decode(window_).size();
  context_ = window_.size();
}

std::string StreamDecoder::push(std::int64_t token) {
  if (token >= tokenizer_->vocabulary()) {
    return "";
  }
  window_.push_back(token);
  const std::string text = tokenizer_->decode(window_);
  // The decoded text is incomplete if the text ends inside a character. Some tokenizers decode each
  // byte of an incomplete character to U+FFFD.
  if (incomplete_suffix(text) > 0 || text.ends_with(kReplacementCharacter)) {
    return "";
  }
  if (text.size() <= given_) {
    given_ = text.size();
    return "";
  }
  return take_new(text);
}

std::string StreamDecoder::finish() {
  return take_new(tokenizer_->decode(window_));
}

std::string StreamDecoder::take_new(const std::string& text) {
  std::string piece = text.substr(std::min(given_, text.size()));
  given_ = text.size();
  // `own`: the tokens of `piece`. The next tokens are decoded together with `own`, because a
  // decoder can remove spaces at the beginning of a text.
  const std::vector<std::int64_t> own(window_.begin() + static_cast<std::ptrdiff_t>(context_),
                                      window_.end());
  if (const std::size_t size = tokenizer_->decode(own).size(); size > 0) {
    window_ = own;
    given_ = size;
  }
  context_ = window_.size();
  return piece;
}

}  // namespace tessera::data
