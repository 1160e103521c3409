// The files beside a tokenizer's, as transformers' PreTrainedTokenizerBase.from_pretrained() reads
// them.

#include "tokenizer/files_beside.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "bpe/bpe_tokenizer.h"
#include "pipeline/json_field.h"
#include "tessera/core/detail/strict_json.h"
#include "tessera/core/input_file.h"

namespace tessera::data {
namespace {

using nlohmann::json;

/// Chat templates are the most of them.
constexpr std::uint64_t kMaxBytes = 20'000'000;
constexpr std::array kSpecialKeys{"bos_token", "eos_token", "unk_token", "sep_token",
                                  "pad_token", "cls_token", "mask_token"};
constexpr const char* kExtraTokens = "extra_special_tokens";

/// Null where there is no such file; noted where there is.
json read_json(const std::filesystem::path& file, FilesBeside& files) {
  if (!std::filesystem::exists(file)) {
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

/// A text, or an object with the token's flags.
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

/// Older than added_tokens_decoder.
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

/// Those of a key, in the order of the file.
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

/// Each may have been named with an id already.
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

/// The names of extra_special_tokens in the order of the file, which new ids follow.
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

/// An object, as transformers 4 writes it. Chat templates may use the names.
void add_extra_tokens(const JsonField& root, const std::filesystem::path& config,
                      FilesBeside& files) {
  const JsonField field = root.at(kExtraTokens);
  if (!field.json().is_object()) {
    return;
  }
  for (const std::string& name : names_of_extra_tokens(config)) {
    AddedToken token = read_token(field.at(name.c_str()), /*special=*/true);
    files.special.emplace(name, token.content);
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

/// The classes of Llama's tokenizers put the tokens around a text themselves.
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
  for (const char* key : kSpecialKeys) {
    if (const auto text = text_of(root, key)) {
      files.special.emplace(key, *text);
    }
  }
  if (is_llama) {
    files.special.emplace("bos_token", *files.begin);
    files.special.emplace("eos_token", *files.end);
  }
}

/// A text, or a list of named ones.
void read_chat_templates(const JsonField& field, FilesBeside& files) {
  if (field.is_null() || field.json().is_string()) {
    files.chat_template = field.is_null() ? std::nullopt : std::optional(field.text());
    return;
  }
  field.for_each([&](const JsonField& entry) {
    const std::string& name = entry.at("name").text();
    if (name == "default") {
      files.chat_template = entry.at("template").text();
    } else if (name == "tool_use") {
      files.tool_template = entry.at("template").text();
    }
  });
}

/// Nothing where there is no such file; noted where there is.
std::optional<std::string> read_template(const std::filesystem::path& file, FilesBeside& files) {
  if (!std::filesystem::exists(file)) {
    return std::nullopt;
  }
  files.read.push_back(file);
  return files::read_file(file, "a chat template", kMaxBytes);
}

/// They override the configuration's templates.
void read_template_files(const std::filesystem::path& folder, FilesBeside& files) {
  if (auto text = read_template(folder / "chat_template.jinja", files)) {
    files.chat_template = std::move(text);
    files.tool_template.reset();
  }
  if (auto text = read_template(folder / "additional_chat_templates" / "tool_use.jinja", files)) {
    files.tool_template = std::move(text);
  }
}

void sort_by_ids(std::vector<NamedToken>& tokens) {
  std::ranges::stable_sort(tokens, {},
                           [](const NamedToken& named) { return named.id.value_or(kMaxTokenId); });
}

}  // namespace

FilesBeside read_files_beside(const std::filesystem::path& tokenizer) {
  const std::filesystem::path folder = tokenizer.parent_path();
  FilesBeside files;
  json config = read_json(folder / "tokenizer_config.json", files);
  const bool names_tokens = config.contains("added_tokens_decoder");
  if (!names_tokens) {
    // Its special tokens override the configuration's.
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
      read_chat_templates(root.at("chat_template"), files);
    }
    read_template_files(folder, files);
  } catch (const Error& error) {
    fail("the files beside the tokenizer '", tokenizer.string(), "': ", error.what());
  }
  sort_by_ids(files.tokens);
  return files;
}

}  // namespace tessera::data
