// Hugging Face's tokenizer.json, as the `tokenizers` package reads it.

#include <algorithm>

#include "files_beside.h"
#include "tessera/core/detail/strict_json.h"
#include "tessera/core/input_file.h"

namespace tessera::data {
namespace {

/// Maximum size of a tokenizer.json: three times the largest known file.
constexpr std::uint64_t kMaxTokenizerBytes = 100'000'000;
constexpr tessera::JsonLimits kTokenizerLimits{
    .depth = 16, .keys = 5'000'000, .values = 20'000'000};

void set_text(std::vector<std::string>& texts, TokenId id, const std::string& text) {
  if (texts.size() <= id) {
    texts.resize(id + std::size_t{1});
  }
  texts[id] = text;
}

/// Maps the token texts of the file to ids.
Vocabulary read_vocabulary(const JsonField& field, std::vector<std::string>& texts) {
  field.require(field.json().is_object(), "an object of tokens");
  Vocabulary vocabulary;
  vocabulary.reserve(field.json().size());
  for (const auto& [text, id] : field.json().items()) {
    const TokenId number = id.is_number_unsigned() && id.get<std::uint64_t>() < kMaxTokenId
                               ? id.get<TokenId>()
                               : field.at(text.c_str()).number_below(kMaxTokenId);
    vocabulary.emplace(text, number);
    set_text(texts, number, text);
  }
  return vocabulary;
}

/// Reads the two tokens of a merge: "left right" or ["left", "right"].
std::pair<std::string_view, std::string_view> read_merge(const JsonField& field) {
  const nlohmann::json& merge = field.json();
  if (merge.is_array()) {
    field.require(merge.size() == 2 && merge[0].is_string() && merge[1].is_string(),
                  "a pair of tokens");
    return {merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>()};
  }
  const std::string_view both = field.text();
  const std::size_t space = both.find(' ');
  field.require(space != std::string::npos && both.find(' ', space + 1) == std::string::npos,
                "two tokens");
  return {both.substr(0, space), both.substr(space + 1)};
}

std::vector<Merge> read_merges(const JsonField& field, const Vocabulary& vocabulary) {
  std::vector<Merge> merges;
  std::string joined;
  field.for_each([&](const JsonField& entry) {
    const auto [left, right] = read_merge(entry);
    joined.assign(left).append(right);
    const auto id = [&](std::string_view token) {
      const auto found = vocabulary.find(token);
      entry.require(found != vocabulary.end(), "of tokens of the vocabulary");
      return found->second;
    };
    merges.push_back({id(left), id(right), id(joined), static_cast<std::uint32_t>(merges.size())});
  });
  return merges;
}

/// The vocabulary with each token converted from GPT-2's alphabet to bytes. Tokens with characters
/// outside this alphabet are dropped, because no text gives these tokens.
Vocabulary as_bytes(const Vocabulary& vocabulary) {
  Vocabulary bytes;
  bytes.reserve(vocabulary.size());
  for (const auto& [text, id] : vocabulary) {
    if (auto token = bytes_of_token(text)) {
      bytes.emplace(std::move(*token), id);
    }
  }
  return bytes;
}

void refuse_affixes(const JsonField& field) {
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const JsonField affix = field.at(key);
    if (!affix.is_null() && !affix.text().empty()) {
      affix.refuse();
    }
  }
  const JsonField dropout = field.at("dropout");
  if (!dropout.is_null() && dropout.json() != 0) {
    dropout.refuse();
  }
}

BpeModel read_model(const JsonField& field, bool byte_level, const Vocabulary& vocabulary) {
  field.only({"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
              "byte_fallback", "ignore_merges", "vocab", "merges"});
  refuse_affixes(field);
  BpeModel model;
  model.merges = read_merges(field.at("merges"), vocabulary);
  model.byte_level = byte_level;
  model.byte_fallback = field.at("byte_fallback").flag_or(false);
  model.ignore_merges = field.at("ignore_merges").flag_or(false);
  model.fuse_unknown = field.at("fuse_unk").flag_or(false);
  if (const JsonField unknown = field.at("unk_token"); !unknown.is_null()) {
    const auto found = vocabulary.find(unknown.text());
    unknown.require(found != vocabulary.end(), "a token of the vocabulary");
    model.unknown = found->second;
  }
  if (byte_level && model.byte_fallback) {
    field.at("byte_fallback").refuse();
  }
  model.vocabulary = byte_level ? as_bytes(vocabulary) : vocabulary;
  return model;
}

AddedToken read_added_token(const JsonField& field) {
  field.only({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
  const TokenId id = field.at("id").number_below(kMaxTokenId);
  AddedToken token = added_token_of(field, /*special=*/false);
  token.id = id;
  return token;
}

void read_added_tokens(const JsonField& field, const Vocabulary& vocabulary,
                       BpeTokenizerParts& parts) {
  if (field.is_null()) {
    return;
  }
  field.for_each([&](const JsonField& entry) {
    AddedToken token = read_added_token(entry);
    const bool taken = token.id < parts.texts.size() && !parts.texts[token.id].empty() &&
                       parts.texts[token.id] != token.content;
    const auto known = vocabulary.find(token.content);
    entry.require(!taken && (known == vocabulary.end() || known->second == token.id),
                  "the token that the vocabulary has for its id");
    set_text(parts.texts, token.id, token.content);
    parts.added.push_back(std::move(token));
  });
}

BpeTokenizerParts read_parts(const JsonField& root) {
  // "truncation" and "padding" apply to batches and are ignored here.
  root.only({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
             "post_processor", "decoder", "model"});
  // The type of the model is checked first, because the vocabularies of other models have other
  // formats. Old files do not name the type.
  if (const JsonField type = root.at("model").at("type"); !type.is_null() && type.text() != "BPE") {
    type.refuse();
  }
  BpeTokenizerParts parts;
  parts.normalizers = read_normalizers(root.at("normalizer"));
  parts.pre_tokenizers = read_pre_tokenizers(root.at("pre_tokenizer"));
  const Vocabulary vocabulary = read_vocabulary(root.at("model").at("vocab"), parts.texts);
  parts.model = read_model(root.at("model"), parts.pre_tokenizers.byte_level, vocabulary);
  read_added_tokens(root.at("added_tokens"), vocabulary, parts);
  parts.decoders = read_decoders(root.at("decoder"));
  parts.joined_by_spaces = parts.decoders.empty();
  const TemplateTokens ends =
      read_post_processor(root.at("post_processor"), static_cast<TokenId>(parts.texts.size()));
  parts.begin_tokens = ends.begin;
  parts.begins_texts = !ends.begin.empty();
  parts.end_tokens = ends.end;
  return parts;
}

/// Checks add_prefix_space. If a ByteLevel is the whole pre_tokenizer, `transformers` sets its flag
/// from tokenizer_config.json; if that file has no flag, `transformers` uses false for tokenizer
/// classes other than Llama's.
void check_prefix(const JsonField& step, const FilesBeside& beside) {
  if (step.is_null() || step.type() != "ByteLevel") {
    return;
  }
  const bool own = step.at("add_prefix_space").flag_or(true);
  const bool other = beside.prefix.value_or(own && beside.decides_ends);
  TESSERA_CHECK(own == other, "\"add_prefix_space\" of the pre_tokenizer is ",
                own ? "true" : "false", ", but tokenizer_config.json beside it ",
                beside.prefix ? "has " : "has none, which transformers takes for ",
                other ? "true" : "false", ": make them agree");
}

}  // namespace

TokenizerPtr hugging_face_tokenizer(const std::string& path) {
  return json_tokenizer(path, {});
}

TokenizerPtr json_tokenizer(const std::string& path, const FilesBeside& beside) {
  const std::string text =
      tessera::files::read_file(path, "a Hugging Face tokenizer.json", kMaxTokenizerBytes);
  try {
    const std::size_t begin = std::min(text.find_first_not_of(" \t\r\n"), text.size());
    const nlohmann::json root =
        tessera::detail::parse_strict_json(std::string_view(text).substr(begin), kTokenizerLimits);
    BpeTokenizerParts parts = read_parts(JsonField(root, ""));
    check_prefix(JsonField(root, "").at("pre_tokenizer"), beside);
    join_files_beside(parts, beside);
    return bpe_tokenizer(std::move(parts));
  } catch (const Error& error) {
    fail("cannot read the tokenizer '", path, "': ", error.what());
  }
}

}  // namespace tessera::data
