// Reads the files next to a tokenizer as PreTrainedTokenizerBase.from_pretrained() in
// `transformers` does.

#include "files_beside.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <string>
#include <unordered_map>

#include "tessera/core/detail/strict_json.h"
#include "tessera/core/error.h"
#include "tessera/core/input_file.h"
#include "unicode.h"

namespace tessera::data {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMaxBytes = 20'000'000;
constexpr std::array kSpecialKeys{"bos_token", "eos_token", "unk_token", "sep_token",
                                  "pad_token", "cls_token", "mask_token"};
constexpr const char* kExtraTokens = "extra_special_tokens";

/// Reads a JSON file and adds its path to `files.read`; null if it does not exist.
json read_json(const std::filesystem::path& file, FilesBeside& files) {
  if (!has_file(file)) {
    return {};
  }
  files.read.push_back(file);
  const std::string text = files::read_file(file, "a file of a tokenizer", kMaxBytes);
  try {
    return detail::parse_strict_json(text, {.depth = 64});
  } catch (const Error& error) {
    fail("cannot read '", file.string(), "' beside the tokenizer: ", error.what());
  }
}

/// Reads a token that is a string or an object with flags.
AddedToken read_token(const JsonField& field, bool special) {
  if (field.json().is_string()) {
    return {.content = field.text(), .normalized = !special, .special = special};
  }
  return added_token_of(field, special);
}

void read_decoder(const JsonField& field, FilesBeside& files) {
  field.require(field.json().is_object(), "an object of tokens by their ids");
  for (const auto& [key, unused] : field.json().items()) {
    const JsonField entry = field.at(key.c_str());
    TokenId id = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    entry.require(error == std::errc() && end == key.data() + key.size() && id < kMaxTokenId,
                  "under the id of a token");
    files.tokens.push_back({id, read_token(entry, /*special=*/false)});
  }
}

/// Reads added_tokens.json, the older form of added_tokens_decoder.
void read_added_tokens(const JsonField& field, FilesBeside& files) {
  field.require(field.json().is_object(), "an object of ids by their tokens");
  for (const auto& [content, unused] : field.json().items()) {
    const TokenId id = field.at(content.c_str()).number_below(kMaxTokenId);
    files.tokens.push_back({id, {.content = content, .normalized = true}});
  }
}

bool is_empty_text(const nlohmann::json& value) {
  return value.is_string() && value.get_ref<const std::string&>().empty();
}

/// The special tokens of a key, in the order of the file.
std::vector<AddedToken> special_tokens_of(const JsonField& root, const char* key) {
  std::vector<AddedToken> tokens;
  const JsonField field = root.at(key);
  if (field.json().is_array()) {
    field.for_each([&](const JsonField& entry) { tokens.push_back(read_token(entry, true)); });
  } else if (!field.is_null() && !is_empty_text(field.json())) {
    tokens.push_back(read_token(field, true));
  }
  return tokens;
}

/// Adds a special token, which may already be known with an id.
void add_special_token(AddedToken token, FilesBeside& files) {
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

void add_special_tokens(const JsonField& root, FilesBeside& files) {
  std::vector<const char*> keys(kSpecialKeys.begin(), kSpecialKeys.end());
  for (const char* key : {"additional_special_tokens", kExtraTokens}) {
    if (root.at(key).json().is_array()) {
      keys.push_back(key);
    }
  }
  for (const char* key : keys) {
    for (AddedToken& token : special_tokens_of(root, key)) {
      add_special_token(std::move(token), files);
    }
  }
}

/// The names in extra_special_tokens in the order of the file, because new ids are assigned in this
/// order.
std::vector<std::string> names_of_extra_tokens(const std::filesystem::path& config) {
  std::vector<std::string> names;
  const auto all = nlohmann::ordered_json::parse(
      files::read_file(config, "a file of a tokenizer", kMaxBytes), nullptr,
      /*allow_exceptions=*/false);
  for (const auto& [name, unused] : all.at(kExtraTokens).items()) {
    names.push_back(name);
  }
  return names;
}

/// Reads extra_special_tokens if it is an object, as `transformers` 4 writes it.
void add_extra_tokens(const JsonField& root, const std::filesystem::path& config,
                      FilesBeside& files) {
  const JsonField field = root.at(kExtraTokens);
  if (!field.json().is_object()) {
    return;
  }
  for (const std::string& name : names_of_extra_tokens(config)) {
    AddedToken token = read_token(field.at(name.c_str()), /*special=*/true);
    add_special_token(std::move(token), files);
  }
}

std::optional<std::string> text_of(const JsonField& root, const char* key) {
  const std::vector<AddedToken> tokens = special_tokens_of(root, key);
  return tokens.empty() ? std::nullopt : std::optional(tokens.front().content);
}

std::optional<bool> flag(const JsonField& root, const char* key) {
  const JsonField field = root.at(key);
  return field.is_null() ? std::nullopt : std::optional(field.flag_or(false));
}

/// Reads the begin and end tokens. Llama's tokenizer classes add the tokens around a text
/// themselves.
void read_ends(const JsonField& root, FilesBeside& files) {
  const JsonField name = root.at("tokenizer_class");
  const bool is_llama = !name.is_null() && name.text().find("LlamaTokenizer") != std::string::npos;
  files.begin = text_of(root, "bos_token");
  files.end = text_of(root, "eos_token");
  files.adds_begin = flag(root, "add_bos_token");
  files.adds_end = flag(root, "add_eos_token");
  files.decides_ends = is_llama || name.is_null();
  if (is_llama) {
    files.adds_begin = files.adds_begin.value_or(true);
    files.adds_end = files.adds_end.value_or(false);
    files.begin = files.begin.value_or("<s>");
    files.end = files.end.value_or("</s>");
  }
  files.legacy = root.at("legacy").flag_or(true);
  files.prefix = flag(root, "add_prefix_space");
}

void sort_by_ids(std::vector<NamedToken>& tokens) {
  std::ranges::stable_sort(tokens, {},
                           [](const NamedToken& named) { return named.id.value_or(kMaxTokenId); });
}

}  // namespace

bool has_file(const std::filesystem::path& file) {
  const bool is_there = std::filesystem::exists(file);
  TESSERA_CHECK(is_there || !std::filesystem::is_symlink(file), "'", file.string(),
                "' is a link to a file that is gone; download the model again");
  return is_there;
}

FilesBeside read_files_beside(const std::filesystem::path& tokenizer) {
  const std::filesystem::path folder = tokenizer.parent_path();
  FilesBeside files;
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
    if (names_tokens) {
      const JsonField root(config, "");
      read_decoder(root.at("added_tokens_decoder"), files);
    } else if (!added.is_null()) {
      read_added_tokens(JsonField(added, "added_tokens.json"), files);
    }
    if (!config.is_null()) {
      const JsonField root(config, "");
      add_special_tokens(root, files);
      add_extra_tokens(root, folder / "tokenizer_config.json", files);
      read_ends(root, files);
    }
  } catch (const Error& error) {
    fail("the files beside the tokenizer '", tokenizer.string(), "': ", error.what());
  }
  sort_by_ids(files.tokens);
  return files;
}

namespace {

using Ids = std::unordered_map<std::string, TokenId>;

Ids ids_of(const std::vector<std::string>& texts) {
  Ids ids;
  ids.reserve(texts.size());
  for (std::size_t id = 0; id < texts.size(); ++id) {
    ids.try_emplace(texts[id], static_cast<TokenId>(id));
  }
  return ids;
}

/// The token's id. A token outside the vocabulary gets the next id, as in `transformers`.
TokenId id_of(const NamedToken& named, Ids& ids, std::vector<std::string>& texts) {
  const std::string& content = named.token.content;
  const auto [known, is_new] = ids.try_emplace(content, static_cast<TokenId>(texts.size()));
  const TokenId id = known->second;
  TESSERA_CHECK(!named.id || *named.id == id, "the files beside the tokenizer give '",
                printable(content), "' the id ", *named.id, ", but it is ",
                is_new ? "a new token, and the next id is " : "the token of id ", id,
                ": make them agree");
  if (is_new) {
    TESSERA_CHECK(id < kMaxTokenId, "the tokenizer has more than ", kMaxTokenId, " tokens");
    texts.push_back(content);
  }
  return id;
}

/// The begin or end of a text, as described by the files next to the tokenizer.
struct End {
  const char* key;
  std::optional<bool> adds;
  std::optional<std::string> text;
};

/// The tokens of this end. `of_template`: the tokens in the template of tokenizer.json.
std::vector<std::int64_t> end_of(const End& end, const std::vector<std::int64_t>& of_template,
                                 bool decides, const Ids& ids) {
  TESSERA_CHECK(decides || !end.adds || *end.adds != of_template.empty(), "\"", end.key,
                "\" beside the tokenizer is ", *end.adds ? "true" : "false",
                ", but the post_processor of tokenizer.json adds ", *end.adds ? "no" : "a",
                " token there, and versions of transformers differ in which they take: make them "
                "agree");
  if (!end.adds || (!decides && *end.adds)) {
    return of_template;
  }
  if (!*end.adds) {
    return {};
  }
  TESSERA_CHECK(end.text, "\"", end.key, "\" beside the tokenizer is true, but no token is named");
  return {ids.at(*end.text)};
}

}  // namespace

void join_files_beside(BpeTokenizerParts& parts, const FilesBeside& beside) {
  Ids ids = ids_of(parts.texts);
  for (const NamedToken& named : beside.tokens) {
    const TokenId id = id_of(named, ids, parts.texts);
    const auto known = std::ranges::find(parts.added, id, &AddedToken::id);
    if (known != parts.added.end()) {
      known->special = known->special || named.token.special;
    } else {
      parts.added.push_back(named.token);
      parts.added.back().id = id;
    }
  }
  for (const auto& text : {beside.begin, beside.end}) {
    TESSERA_CHECK(!text || ids.contains(*text), "'", printable(text.value_or("")),
                  "', which the files beside the tokenizer name as an end of texts, is not a token "
                  "of it");
  }
  parts.begin_tokens = end_of({"add_bos_token", beside.adds_begin, beside.begin},
                              parts.begin_tokens, beside.decides_ends, ids);
  parts.end_tokens = end_of({"add_eos_token", beside.adds_end, beside.end}, parts.end_tokens,
                            beside.decides_ends, ids);
  parts.begins_texts = !parts.begin_tokens.empty();
  if (parts.begin_tokens.empty() && beside.begin) {
    parts.begin_tokens = {ids.at(*beside.begin)};
  }
}

}  // namespace tessera::data
