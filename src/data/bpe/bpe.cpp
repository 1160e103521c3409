#include "bpe/bpe.h"

#include <algorithm>

#include "pipeline/byte_alphabet.h"
#include "tessera/core/error.h"
#include "unicode/utf8.h"

namespace tessera::data {
namespace {

/// SentencePiece's mark of a space.
constexpr std::string_view kMark = "\xe2\x96\x81";

}  // namespace

Bpe::Bpe(BpeModel model) : model_(std::move(model)), merges_(model_.merges) {
  for (const auto& [text, id] : model_.vocabulary) {
    if (text.size() == 1) {
      bytes_[static_cast<unsigned char>(text[0])] = id;
    }
    if (const auto byte = byte_of_fallback_token(text); byte && model_.byte_fallback) {
      fallback_[*byte] = id;
    }
  }
  find_inner_borders();
}

/// Without a pre-tokenizer the whole text is one word. It may still be cut where two characters
/// meet that are neighbours in no token: no merge crosses such a place. The places before marks are
/// enough, and give words that the cache has.
void Bpe::find_inner_borders() {
  std::unordered_set<TokenId> fallen_back;
  for (const auto& id : fallback_) {
    if (id) {
      fallen_back.insert(*id);
    }
  }
  divisible_ = !model_.byte_level && !model_.ignore_merges &&
               fallen_back.size() == fallback_.size() &&
               std::ranges::none_of(model_.merges, [&](const Merge& merge) {
                 return fallen_back.contains(merge.left) || fallen_back.contains(merge.right);
               });
  if (!divisible_) {
    return;
  }
  for (const auto& [text, id] : model_.vocabulary) {
    for (std::size_t at = text.find(kMark, 1); at != std::string::npos;
         at = text.find(kMark, at + 1)) {
      before_mark_.emplace(last_character(std::string_view(text).substr(0, at)));
    }
  }
}

std::size_t Bpe::next_border(std::string_view text, std::size_t from) const {
  for (std::size_t at = text.find(kMark, from + 1); at != std::string::npos;
       at = text.find(kMark, at + 1)) {
    if (!before_mark_.contains(std::string(last_character(text.substr(0, at))))) {
      return at;
    }
  }
  return text.size();
}

void Bpe::encode(std::string_view word, std::vector<std::int64_t>& ids,
                 BpeWorkspace& workspace) const {
  if (!divisible_) {
    encode_part(word, ids, workspace);
    return;
  }
  for (std::size_t begin = 0; begin < word.size();) {
    const std::size_t end = next_border(word, begin);
    encode_part(word.substr(begin, end - begin), ids, workspace);
    begin = end;
  }
}

void Bpe::encode_part(std::string_view word, std::vector<std::int64_t>& ids,
                      BpeWorkspace& workspace) const {
  if (!WordCache::may_hold(word)) {
    merge_word(word, workspace);
    ids.insert(ids.end(), workspace.ids.begin(), workspace.ids.end());
    return;
  }
  WordCache::Entry& entry = workspace.cache.place(word);
  if (WordCache::holds(entry, word)) {
    ids.insert(ids.end(), entry.ids().begin(), entry.ids().end());
    return;
  }
  merge_word(word, workspace);
  WordCache::store(entry, word, workspace.ids);
  ids.insert(ids.end(), workspace.ids.begin(), workspace.ids.end());
}

void Bpe::merge_word(std::string_view word, BpeWorkspace& workspace) const {
  if (model_.ignore_merges) {
    if (const auto whole = model_.vocabulary.find(word); whole != model_.vocabulary.end()) {
      workspace.ids.assign(1, whole->second);
      return;
    }
  }
  workspace.ids.clear();
  first_symbols(word, workspace.ids);
  merge_symbols(merges_, workspace);
}

/// As the `tokenizers` package, including the order of unknown tokens and byte-fallback tokens.
void Bpe::first_symbols(std::string_view word, std::vector<TokenId>& ids) const {
  bool unknown = false;  // one is still to be appended
  while (!word.empty()) {
    const std::string_view character =
        word.substr(0, model_.byte_level ? 1 : first_character(word).bytes);
    word.remove_prefix(character.size());
    if (const auto token = token_of(character)) {
      if (std::exchange(unknown, false)) {
        ids.push_back(*model_.unknown);
      }
      ids.push_back(*token);
    } else if (!append_fallback(character, ids)) {
      TESSERA_CHECK(model_.unknown, "the tokenizer has no token for '", printable(character),
                    "' and none for what is unknown: use one that covers the text");
      if (unknown && !model_.fuse_unknown) {
        ids.push_back(*model_.unknown);
      }
      unknown = true;
    }
  }
  if (unknown) {
    ids.push_back(*model_.unknown);
  }
}

std::optional<TokenId> Bpe::token_of(std::string_view character) const {
  if (character.size() == 1) {
    return bytes_[static_cast<unsigned char>(character[0])];
  }
  const auto found = model_.vocabulary.find(character);
  return found == model_.vocabulary.end() ? std::nullopt : std::optional(found->second);
}

bool Bpe::append_fallback(std::string_view character, std::vector<TokenId>& ids) const {
  const auto token = [&](char byte) { return fallback_[static_cast<unsigned char>(byte)]; };
  if (!std::ranges::all_of(character, [&](char byte) { return token(byte).has_value(); })) {
    return false;
  }
  for (const char byte : character) {
    ids.push_back(*token(byte));
  }
  return true;
}

}  // namespace tessera::data
