// Meta's tokenizer.model of Llama 3 in tiktoken's format: one line per token, with the bytes
// of the token in base64 and the rank of the token.

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"
#include "tessera/data/detail/tokenizers.h"
#include "tokenizer_parts.h"

namespace tessera::data {
namespace {

// The regular expression and the special tokens are from Meta's package llama-models.

constexpr std::size_t kRanks = 128'000;  ///< number of tokens in Llama 3's tokenizer file
constexpr const char* kPattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

/// Returns the special tokens of Llama 3.1 to 3.3 in the order of their ids, which follow the ids
/// in the file.
std::vector<std::string> special_tokens() {
  std::vector<std::string> names;
  for (const char* name :
       {"begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1",
        "finetune_right_pad_id", "step_id", "start_header_id", "end_header_id", "eom_id", "eot_id",
        "python_tag", "image"}) {
    names.push_back("<|" + std::string(name) + "|>");
  }
  for (int i = 2; names.size() < 256; ++i) {
    names.push_back("<|reserved_special_token_" + std::to_string(i) + "|>");
  }
  return names;
}

/// Maximum size of a tokenizer file: far above the size of Llama 3's file.
constexpr std::uint64_t kMaxModelFileBytes = 100'000'000;
/// Maximum size of a token; the longest token of Llama 3 has 128 bytes.
constexpr std::size_t kMaxTokenBytes = 1000;

constexpr std::string_view kBase64Alphabet =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Decodes base64 (RFC 4648, with padding); nullopt for invalid text.
std::optional<std::string> decode_base64(std::string_view text) {
  if (text.size() % 4 != 0) {
    return std::nullopt;
  }
  const std::size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  text.remove_suffix(padding);
  std::string bytes;
  std::uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const std::size_t digit = kBase64Alphabet.find(c);
    if (digit == std::string_view::npos) {
      return std::nullopt;
    }
    bits = bits << 6 | static_cast<std::uint32_t>(digit);
    count += 6;
    if (count >= 8) {
      count -= 8;
      bytes.push_back(static_cast<char>(bits >> count & 0xffU));
    }
  }
  return bytes;
}

/// Returns the tokens of a tiktoken file, indexed by rank. The rank of a token is also its id.
std::vector<std::string> read_ranks(std::string_view text) {
  std::vector<std::string> tokens;
  for (std::size_t line = 1; !text.empty(); ++line) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view entry = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    TESSERA_CHECK(!entry.ends_with('\r'), "line ", line,
                  " ends with CRLF, not with LF; copy the file without changing its line ends");
    const std::size_t space = std::min(entry.find(' '), entry.size());
    const auto token = decode_base64(entry.substr(0, space));
    TESSERA_CHECK(
        token && !token->empty() && token->size() <= kMaxTokenBytes &&
            entry.substr(std::min(space + 1, entry.size())) == std::to_string(tokens.size()),
        "line ", line, " must be a token in base64, a space and the rank ", tokens.size());
    tokens.push_back(*token);
    TESSERA_CHECK(tokens.size() < kMaxTokenId, "the file has more than ", kMaxTokenId, " tokens");
  }
  return tokens;
}

/// Derives the merges of a BPE model: two tokens are merged if their concatenated bytes are a
/// token. The rank of this token is the rank of the merge.
std::vector<Merge> merges_of_ranks(const Vocabulary& vocabulary) {
  std::vector<Merge> merges;
  for (const auto& [bytes, id] : vocabulary) {
    for (std::size_t at = 1; at < bytes.size(); ++at) {
      const auto left = vocabulary.find(std::string_view(bytes).substr(0, at));
      const auto right = vocabulary.find(std::string_view(bytes).substr(at));
      if (left != vocabulary.end() && right != vocabulary.end()) {
        merges.push_back({left->second, right->second, id, id});
      }
    }
  }
  return merges;
}

BpeTokenizerParts parts_of_ranks(std::vector<std::string> tokens) {
  BpeTokenizerParts parts;
  for (std::size_t id = 0; id < tokens.size(); ++id) {
    const bool added = parts.model.vocabulary.emplace(tokens[id], static_cast<TokenId>(id)).second;
    TESSERA_CHECK(added, "the token of rank ", id, " occurs twice in the file");
  }
  parts.model.merges = merges_of_ranks(parts.model.vocabulary);
  parts.pre_tokenizers.steps.push_back(split_by_pattern(kPattern));
  const auto begin = static_cast<std::int64_t>(tokens.size());
  parts.begin_tokens = {begin};
  parts.end_tokens = {begin + 1};
  for (std::string& name : special_tokens()) {
    parts.added.push_back(
        {.content = name, .id = static_cast<TokenId>(tokens.size()), .special = true});
    tokens.push_back(std::move(name));
  }
  parts.texts = std::move(tokens);
  return parts;
}

}  // namespace

TokenizerPtr tiktoken_tokenizer(const std::string& path, bool any_size) {
  const std::string text =
      tessera::files::read_file(path, "a tokenizer.model of Llama 3", kMaxModelFileBytes);
  try {
    std::vector<std::string> tokens = read_ranks(text);
    TESSERA_CHECK(any_size || tokens.size() == kRanks, "the file has ", tokens.size(),
                  " tokens, but Llama 3's tokenizer has ", kRanks,
                  "; for another model, pass the model's tokenizer.json");
    return bpe_tokenizer(parts_of_ranks(std::move(tokens)));
  } catch (const Error& error) {
    fail("cannot read the tokenizer '", path, "': ", error.what());
  }
}

}  // namespace tessera::data
