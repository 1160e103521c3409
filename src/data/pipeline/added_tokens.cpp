#include "pipeline/added_tokens.h"

#include <algorithm>

#include "pipeline/json_field.h"
#include "unicode/properties.h"
#include "unicode/utf8.h"

namespace tessera::data {
namespace {

bool is_word(char32_t code) {
  return unicode_codes(CodeKind::kAddedTokenWord).contains(code);
}

/// 0 for an empty text.
char32_t first_of(std::string_view text) {
  return text.empty() ? 0 : code_point(text.substr(0, first_character(text).bytes));
}

bool stands_alone(std::string_view before, std::string_view behind) {
  return (before.empty() || !is_word(code_point(last_character(before)))) &&
         !is_word(first_of(behind));
}

}  // namespace

AddedToken added_token_of(const JsonField& field, bool special) {
  AddedToken token;
  token.content = field.at("content").text();
  token.single_word = field.at("single_word").flag_or(false);
  token.lstrip = field.at("lstrip").flag_or(false);
  token.rstrip = field.at("rstrip").flag_or(false);
  token.special = field.at("special").flag_or(special);
  token.normalized = field.at("normalized").flag_or(!token.special);
  return token;
}

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    std::size_t node = 0;
    for (const char byte : tokens_[i].content) {
      const auto [next, made] = trie_[node].next.try_emplace(byte, trie_.size());
      node = next->second;
      if (made) {
        trie_.emplace_back();
      }
    }
    trie_[node].token = i;
    begins_[static_cast<unsigned char>(tokens_[i].content[0])] = true;
  }
}

const AddedToken* AddedTokens::match_at(std::string_view text) const {
  std::size_t node = 0;
  std::size_t longest = kNone;
  for (const char byte : text) {
    const auto next = trie_[node].next.find(byte);
    if (next == trie_[node].next.end()) {
      break;
    }
    node = next->second;
    if (trie_[node].token != kNone) {
      longest = trie_[node].token;
    }
  }
  return longest == kNone ? nullptr : &tokens_[longest];
}

void AddedTokens::split(std::string_view text, OnText on_text, OnToken on_token) const {
  std::size_t given = 0;
  std::size_t space_end = 0;  // of the white space that a token has taken behind it
  const auto give_to = [&](std::size_t end) {
    if (given < end) {
      on_text(text.substr(given, end - given), given == 0);
    }
  };
  for (std::size_t at = 0; at < text.size();) {
    const AddedToken* token =
        begins_[static_cast<unsigned char>(text[at])] ? match_at(text.substr(at)) : nullptr;
    if (token == nullptr) {
      ++at;
      continue;
    }
    std::size_t begin = at;
    std::size_t end = at + token->content.size();
    at = end;
    if (token->single_word && !stands_alone(text.substr(0, begin), text.substr(end))) {
      continue;
    }
    if (token->lstrip) {
      // Space that the last token has taken is gone.
      begin = given + without_trailing_space(text.substr(given, std::max(begin, given) - given));
    }
    if (token->rstrip) {
      // Tokens may lie in that space: each looks no further for its end.
      space_end =
          std::max(space_end, end + (end < space_end ? 0 : leading_space(text.substr(end))));
      end = space_end;
    }
    // A token of white space that another has taken is gone too.
    if (begin >= end) {
      continue;
    }
    give_to(begin);
    on_token(token->id);
    given = end;
  }
  give_to(text.size());
}

}  // namespace tessera::data
