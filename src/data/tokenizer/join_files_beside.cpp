#include "tokenizer/join_files_beside.h"

#include <algorithm>
#include <string>
#include <unordered_map>

#include "tessera/core/error.h"
#include "unicode/utf8.h"

namespace tessera::data {
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

/// What is not in the vocabulary gets the next id, as transformers gives it.
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

/// An end of a text, whether the files beside a tokenizer and its own template agree or not.
struct End {
  const char* key;
  std::optional<bool> adds;
  std::optional<std::string> text;
};

/// The tokens there. `of_template`: the template's.
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
