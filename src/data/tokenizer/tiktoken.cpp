// Meta's tokenizer.model of Llama 3 and 4, in tiktoken's form: one line for each token, with its
// bytes in base64 and its rank.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bpe/bpe_tokenizer.h"
#include "tessera/core/error.h"
#include "tessera/core/input_file.h"
#include "tokenizer/tiktoken_models.h"

namespace tessera::data {
namespace {

/// Ten times that of Llama 4.
constexpr std::uint64_t kMaxModelFileBytes = 100'000'000;
/// The longest of Llama 3 has 128.
constexpr std::size_t kMaxTokenBytes = 1000;
/// A token is looked up in two parts at each of its places: the square of its bytes, summed over
/// all tokens. Llama 3's come to 10 million.
constexpr std::size_t kMaxMergeWork = 1'000'000'000;

constexpr std::string_view kBase64Alphabet =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// The bytes of a text in base64 (RFC 4648, with padding); nothing if it is not.
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

/// The tokens of the file by rank, which is their id.
std::vector<std::string> read_ranks(std::string_view text) {
  std::vector<std::string> tokens;
  std::size_t merge_work = 0;
  for (std::size_t line = 1; !text.empty(); ++line) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view entry = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    TESSERA_CHECK(!entry.ends_with('\r'), "line ", line,
                  " ends with CRLF, not with LF: copy the file without changing its line ends");
    const std::size_t space = std::min(entry.find(' '), entry.size());
    const auto token = decode_base64(entry.substr(0, space));
    TESSERA_CHECK(
        token && !token->empty() && token->size() <= kMaxTokenBytes &&
            entry.substr(std::min(space + 1, entry.size())) == std::to_string(tokens.size()),
        "line ", line, " is not a token in base64 and the rank ", tokens.size());
    merge_work += token->size() * token->size();
    TESSERA_CHECK(merge_work <= kMaxMergeWork, "its tokens up to line ", line,
                  " are longer than any tokenizer's");
    tokens.push_back(*token);
    TESSERA_CHECK(tokens.size() < kMaxTokenId, "it has more than ", kMaxTokenId, " tokens");
  }
  return tokens;
}

/// Two tokens are merged if their bytes are a token, whose rank counts.
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

BpeTokenizerParts parts_of_ranks(std::vector<std::string> tokens, const TiktokenModelParts& model) {
  BpeTokenizerParts parts;
  for (std::size_t id = 0; id < tokens.size(); ++id) {
    const bool added = parts.model.vocabulary.emplace(tokens[id], static_cast<TokenId>(id)).second;
    TESSERA_CHECK(added, "the token of rank ", id, " is there twice");
  }
  parts.model.merges = merges_of_ranks(parts.model.vocabulary);
  parts.pre_tokenizers.steps.push_back(split_by_pattern(model.pattern));
  const auto begin = static_cast<std::int64_t>(tokens.size());
  parts.begin_tokens = {begin};
  parts.end_tokens = {begin + 1};
  for (std::string& name : model.special_tokens()) {
    parts.added.push_back(
        {.content = name, .id = static_cast<TokenId>(tokens.size()), .special = true});
    tokens.push_back(std::move(name));
  }
  parts.texts = std::move(tokens);
  return parts;
}

}  // namespace

TokenizerPtr tiktoken_tokenizer(const std::string& path, std::optional<TiktokenModel> model) {
  const std::string text =
      tessera::files::read_file(path, "a tokenizer.model of Llama 3 or 4", kMaxModelFileBytes);
  try {
    std::vector<std::string> tokens = read_ranks(text);
    const TiktokenModelParts& parts = parts_of(model ? *model : tiktoken_model_of(tokens.size()));
    return std::make_shared<BpeTokenizer>(parts_of_ranks(std::move(tokens), parts));
  } catch (const Error& error) {
    fail("cannot read the tokenizer '", path, "': ", error.what());
  }
}

}  // namespace tessera::data
