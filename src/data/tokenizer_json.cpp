// Hugging Face's tokenizer.json, as the `tokenizers` package reads it, and the files next to a
// tokenizer, as PreTrainedTokenizerBase.from_pretrained() in `transformers` reads them.

#include "tokenizer_parts.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "tessera/core/detail/files.h"
#include "tessera/core/detail/strict_json.h"
#include "tessera/data/detail/tokenizers.h"
#include "unicode.h"

namespace tessera::data {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMaxBytesBeside = 20'000'000;
constexpr const char* kExtraTokens = "extra_special_tokens";
constexpr std::array kSpecialKeys{
    "bos_token", "eos_token", "unk_token",  "sep_token",
    "pad_token", "cls_token", "mask_token", "additional_special_tokens",
    kExtraTokens};

json read_json(const std::filesystem::path& file, TokenizerSettings& files) {
  if (!has_file(file)) {
    return {};
  }
  files.read.push_back(file);
  const std::string text = files::read_file(file, "a file of a tokenizer", kMaxBytesBeside);
  try {
    return detail::parse_strict_json(text, {.depth = 64});
  } catch (const Error& error) {
    fail("cannot read '", file.string(), "' next to the tokenizer: ", error.what());
  }
}

/// Reads a special token from a JSON field: a string, or an object with the token's flags.
AddedToken read_token(const JsonField& field, bool special) {
  if (field.json().is_string()) {
    return {.content = field.text(), .normalized = !special, .special = special};
  }
  return added_token_of(field, special);
}

void read_decoder(const JsonField& field, TokenizerSettings& files) {
  field.require(field.json().is_object(), "an object that maps ids to tokens");
  for (const auto& [key, unused] : field.json().items()) {
    const JsonField entry = field.at(key.c_str());
    TokenId id = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    entry.require(error == std::errc() && end == key.data() + key.size() && id < kMaxTokenId,
                  "under a key that is the id of a token");
    files.tokens.push_back({id, read_token(entry, /*special=*/false)});
  }
}

/// Reads added_tokens.json, an older form of added_tokens_decoder in tokenizer_config.json.
void read_added_tokens(const JsonField& field, TokenizerSettings& files) {
  field.require(field.json().is_object(), "an object that maps tokens to ids");
  for (const auto& [content, unused] : field.json().items()) {
    const TokenId id = field.at(content.c_str()).number_below(kMaxTokenId);
    files.tokens.push_back({id, {.content = content, .normalized = true}});
  }
}

/// Adds a special token to `files`. If `files` has the token already, only marks it as special.
void add_special_token(AddedToken token, TokenizerSettings& files) {
  token.special = true;
  const auto known = std::ranges::find(files.tokens, token.content,
                                       [](const NamedToken& named) { return named.token.content; });
  if (known == files.tokens.end()) {
    files.tokens.push_back({std::nullopt, std::move(token)});
  } else {
    known->token.special = true;
    known->token.normalized = known->token.normalized && token.normalized;
  }
}

std::optional<AddedToken> special_token_of(const JsonField& field) {
  const json& value = field.json();
  if (value.is_null() || (value.is_string() && value.get_ref<const std::string&>().empty())) {
    return std::nullopt;
  }
  return read_token(field, /*special=*/true);
}

void add_special_tokens(const JsonField& root, TokenizerSettings& files) {
  for (const char* key : kSpecialKeys) {
    const JsonField field = root.at(key);
    if (field.json().is_array()) {
      field.for_each(
          [&](const JsonField& entry) { add_special_token(read_token(entry, true), files); });
    } else if (key == kExtraTokens && field.json().is_object()) {
      field.only({});  // refused unless empty: token ids need an order, which a JSON object lacks
    } else if (auto token = special_token_of(field)) {
      add_special_token(std::move(*token), files);
    }
  }
}

std::optional<bool> flag(const JsonField& root, const char* key) {
  const JsonField field = root.at(key);
  return field.is_null() ? std::nullopt : std::optional(field.flag_or(false));
}

/// Reads the begin token and the end token. For Llama's tokenizer classes, missing fields have
/// defaults: the token's text, and whether the token is added to texts.
void read_ends(const JsonField& root, TokenizerSettings& files) {
  const JsonField name = root.at("tokenizer_class");
  const bool is_llama = !name.is_null() && name.text().find("LlamaTokenizer") != std::string::npos;
  const auto end_of = [&](const char* token, const char* adds, TextEnd class_end) {
    TextEnd end{.text = {}, .adds = flag(root, adds)};
    if (const auto named = special_token_of(root.at(token))) {
      end.text = named->content;
    }
    if (is_llama) {
      end = {.text = end.text.value_or(*class_end.text),
             .adds = end.adds.value_or(*class_end.adds)};
    }
    return end;
  };
  files.begin = end_of("bos_token", "add_bos_token", {.text = "<s>", .adds = true});
  files.end = end_of("eos_token", "add_eos_token", {.text = "</s>", .adds = false});
  files.decides_ends = is_llama || name.is_null();
  files.legacy = root.at("legacy").flag_or(true);
  files.prefix = flag(root, "add_prefix_space");
}

}  // namespace

bool has_file(const std::filesystem::path& file) {
  const bool is_there = std::filesystem::exists(file);
  TESSERA_CHECK(is_there || !std::filesystem::is_symlink(file), "'", file.string(),
                "' is a link to a file that does not exist; download the model again");
  return is_there;
}

TokenizerSettings read_tokenizer_settings(const std::filesystem::path& tokenizer) {
  const std::filesystem::path folder = tokenizer.parent_path();
  TokenizerSettings files;
  json config = read_json(folder / "tokenizer_config.json", files);
  const bool names_tokens = config.contains("added_tokens_decoder");
  if (!names_tokens) {
    // special_tokens_map.json overrides the special tokens of tokenizer_config.json.
    const json map = read_json(folder / "special_tokens_map.json", files);
    if (map.is_object()) {
      config.update(map);
    }
  }
  const json added = names_tokens ? json() : read_json(folder / "added_tokens.json", files);
  try {
    if (!added.is_null()) {
      read_added_tokens(JsonField(added, "added_tokens.json"), files);
    }
    if (!config.is_null()) {
      const JsonField root(config, "");
      if (names_tokens) {
        read_decoder(root.at("added_tokens_decoder"), files);
      }
      add_special_tokens(root, files);
      read_ends(root, files);
    }
  } catch (const Error& error) {
    fail("the files next to the tokenizer '", tokenizer.string(), "': ", error.what());
  }
  std::ranges::stable_sort(files.tokens, {},
                           [](const NamedToken& named) { return named.id.value_or(kMaxTokenId); });
  return files;
}

void check_id(const NamedToken& named, std::int64_t id, bool is_new) {
  TESSERA_CHECK(!named.id || *named.id == id, "the other files in the tokenizer's folder give '",
                printable(named.token.content), "' the id ", named.id.value_or(0),
                is_new ? ", but the next new token has the id " : ", but the tokenizer has the id ",
                id, "; correct these files");
  TESSERA_CHECK(id < kMaxTokenId, "the tokenizer has more than ", kMaxTokenId, " tokens");
}

namespace {

/// Returns the tokens for the beginning or end of texts. `key`: the key of the flag
/// (add_bos_token), for messages. `of_template`: the tokens in the template of tokenizer.json.
std::vector<std::int64_t> tokens_of(const TextEnd& end, const char* key,
                                    const std::vector<std::int64_t>& of_template, bool decides,
                                    const Vocabulary& ids) {
  TESSERA_CHECK(decides || !end.adds || *end.adds != of_template.empty(), "\"", key,
                "\" in the tokenizer's folder is ", *end.adds ? "true" : "false",
                ", but the post_processor of tokenizer.json adds ", *end.adds ? "no" : "a",
                " token there; versions of transformers use either setting, so set both equally");
  if (!end.adds || (!decides && *end.adds)) {
    return of_template;
  }
  if (!*end.adds) {
    return {};
  }
  TESSERA_CHECK(end.text, "\"", key,
                "\" in the tokenizer's folder is true, but its files define no such token");
  return {ids.at(*end.text)};
}

/// Adds tokens and settings to the tokenizer, from the other files in the tokenizer's folder.
/// Throws Error if these files contradict the tokenizer.
void apply_settings(BpeTokenizerParts& parts, const TokenizerSettings& settings) {
  Vocabulary ids;
  for (std::size_t id = 0; id < parts.texts.size(); ++id) {
    ids.try_emplace(parts.texts[id], static_cast<TokenId>(id));
  }
  for (const NamedToken& named : settings.tokens) {
    const std::string& content = named.token.content;
    // A token outside the vocabulary gets the next free id, as in `transformers`.
    const auto [known, is_new] = ids.try_emplace(content, static_cast<TokenId>(parts.texts.size()));
    const TokenId id = known->second;
    check_id(named, id, is_new);
    if (is_new) {
      parts.texts.push_back(content);
    }
    const auto added = std::ranges::find(parts.added, id, &AddedToken::id);
    if (added != parts.added.end()) {
      added->special = added->special || named.token.special;
    } else {
      parts.added.push_back(named.token);
      parts.added.back().id = id;
    }
  }
  for (const TextEnd* end : {&settings.begin, &settings.end}) {
    TESSERA_CHECK(!end->text || ids.contains(*end->text),
                  "a file in the tokenizer's folder sets bos_token or eos_token to '",
                  printable(end->text.value_or("")),
                  "', but the tokenizer has no such token; correct the file");
  }
  parts.begin_tokens =
      tokens_of(settings.begin, "add_bos_token", parts.begin_tokens, settings.decides_ends, ids);
  parts.end_tokens =
      tokens_of(settings.end, "add_eos_token", parts.end_tokens, settings.decides_ends, ids);
  parts.begins_texts = !parts.begin_tokens.empty();
  if (parts.begin_tokens.empty() && settings.begin.text) {
    parts.begin_tokens = {ids.at(*settings.begin.text)};
  }
}

/// Maximum size of a tokenizer.json: three times the largest known tokenizer.json.
constexpr std::uint64_t kMaxTokenizerBytes = 100'000'000;
constexpr tessera::JsonLimits kTokenizerLimits{
    .depth = 16, .keys = 5'000'000, .values = 20'000'000};

void set_text(std::vector<std::string>& texts, TokenId id, const std::string& text) {
  if (texts.size() <= id) {
    texts.resize(id + std::size_t{1});
  }
  texts[id] = text;
}

Vocabulary read_vocabulary(const JsonField& field, std::vector<std::string>& texts) {
  field.require(field.json().is_object(), "an object that maps tokens to ids");
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

/// Reads the two tokens of a merge, which is "left right" or ["left", "right"].
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
                "two tokens separated by one space");
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
      entry.require(found != vocabulary.end(), "a merge of tokens that are all in the vocabulary");
      return found->second;
    };
    merges.push_back({id(left), id(right), id(joined), static_cast<std::uint32_t>(merges.size())});
  });
  return merges;
}

/// Returns the vocabulary with each token converted from GPT-2's alphabet to bytes. Drops tokens
/// with characters outside this alphabet, because no text is encoded to such tokens.
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
  // The `tokenizers` package ignores the id of a new token, and gives the token the next id.
  auto next = static_cast<TokenId>(vocabulary.size());
  field.for_each([&](const JsonField& entry) {
    AddedToken token = read_added_token(entry);
    const std::string known = token.id < parts.texts.size() ? parts.texts[token.id] : "";
    const bool is_new = known.empty() && !vocabulary.contains(token.content) && token.id == next;
    entry.require(known == token.content || is_new,
                  "the token of the vocabulary with this id, or a new token with the next id, " +
                      std::to_string(next));
    next = std::max(next, token.id + 1);
    set_text(parts.texts, token.id, token.content);
    parts.added.push_back(std::move(token));
  });
}

BpeTokenizerParts read_parts(const JsonField& root) {
  // "truncation" and "padding" apply to batches and are ignored here.
  root.only({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
             "post_processor", "decoder", "model"});
  // The type of the model is checked first, because the vocabularies of other models have other
  // formats. Old tokenizer.json files do not contain the type.
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

/// Checks add_prefix_space of a single ByteLevel. Throws Error unless `transformers` uses an equal
/// flag: from tokenizer_config.json, or else the ByteLevel's flag for a Llama class or without a
/// tokenizer class, or else false.
void check_prefix(const JsonField& step, const TokenizerSettings& settings) {
  if (step.is_null() || step.type() != "ByteLevel") {
    return;
  }
  const bool own = step.at("add_prefix_space").flag_or(true);
  const bool other = settings.prefix.value_or(own && settings.decides_ends);
  TESSERA_CHECK(own == other, "\"add_prefix_space\" of the pre_tokenizer is ",
                own ? "true" : "false", ", but tokenizer_config.json next to it ",
                settings.prefix ? "has " : "has no such flag, so transformers uses ",
                other ? "true" : "false", "; make both files agree");
}

}  // namespace

TokenizerPtr json_tokenizer(const std::string& path, const TokenizerSettings& settings) {
  const std::string text =
      tessera::files::read_file(path, "a Hugging Face tokenizer.json", kMaxTokenizerBytes);
  try {
    const std::size_t begin = std::min(text.find_first_not_of(" \t\r\n"), text.size());
    const nlohmann::json root =
        tessera::detail::parse_strict_json(std::string_view(text).substr(begin), kTokenizerLimits);
    BpeTokenizerParts parts = read_parts(JsonField(root, ""));
    check_prefix(JsonField(root, "").at("pre_tokenizer"), settings);
    apply_settings(parts, settings);
    return bpe_tokenizer(std::move(parts));
  } catch (const Error& error) {
    fail("cannot read the tokenizer '", path, "': ", error.what());
  }
}

}  // namespace tessera::data
