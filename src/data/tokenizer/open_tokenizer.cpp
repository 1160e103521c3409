#include <algorithm>
#include <filesystem>
#include <span>

#include "tessera/core/detail/text_faults.h"
#include "tessera/core/error.h"
#include "tessera/core/input_file.h"
#include "tessera/data/tokenizer.h"
#include "tokenizer/files_beside.h"

namespace tessera::data {
namespace {

enum class TokenizerForm { kJson, kTiktoken, kSentencePiece };

/// The beginning of a file; a line of tiktoken's form is in it.
std::string beginning_of(const std::filesystem::path& path) {
  constexpr std::uint64_t kBytes = 16 * 1024;
  const tessera::files::InputFile file(path, "a tokenizer");
  std::string text(std::min(file.size(), kBytes), '\0');
  file.read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

/// "TOKEN RANK", the token in base64.
bool is_tiktoken_line(std::string_view line) {
  if (line.ends_with('\r')) {
    line.remove_suffix(1);  // the reader says what is wrong
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

/// The path itself, or the tokenizer's file in a folder.
std::string file_of(const std::string& path) {
  if (!std::filesystem::is_directory(path)) {
    return path;
  }
  const auto file = find_tokenizer(path);
  TESSERA_CHECK(file, "the folder '", path,
                "' has no tokenizer.json and no tokenizer.model: give the tokenizer's file");
  return *file;
}

/// The only element of begin_tokens() or end_tokens().
std::optional<std::int64_t> the_one(const std::vector<std::int64_t>& tokens, const char* verb) {
  TESSERA_CHECK(tokens.size() <= 1, "the one token that ", verb,
                "s a text was asked for, there are ", tokens.size(), ": call ", verb, "_tokens()");
  return tokens.empty() ? std::nullopt : std::optional(tokens.front());
}

}  // namespace

std::optional<std::int64_t> Tokenizer::begin_token() const {
  return the_one(begin_tokens(), "begin");
}

std::optional<std::int64_t> Tokenizer::end_token() const {
  return the_one(end_tokens(), "end");
}

std::optional<std::string> find_tokenizer(const std::string& folder) {
  for (const char* name : {"tokenizer.json", "tokenizer.model"}) {
    const std::filesystem::path path = std::filesystem::path(folder) / name;
    if (std::filesystem::exists(path)) {
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

}  // namespace tessera::data
