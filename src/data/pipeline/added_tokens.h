#pragma once

#include <c10/util/FunctionRef.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/token_id.h"

namespace tessera::data {

class JsonField;

/// A token is looked for from each place; real ones have less than 100.
inline constexpr std::size_t kMaxAddedTokenBytes = 1000;

/// A token that is looked for in the text itself, before it is split.
struct AddedToken {
  std::string content;
  TokenId id = 0;
  bool single_word = false;  ///< not within a word
  bool lstrip = false;       ///< takes the white space before it
  bool rstrip = false;       ///< takes the white space behind it
  bool normalized = false;   ///< looked for in the normalized text
  bool special = false;      ///< has no text
};
/// One from its object, without its id. `special`: whether it is where the object does not say.
AddedToken added_token_of(const JsonField& field, bool special);

/// Finds added tokens: the leftmost, of those the longest. Immutable.
class AddedTokens {
 public:
  AddedTokens() = default;
  /// `content` of each is what is looked for; not empty.
  explicit AddedTokens(std::vector<AddedToken> tokens);

  using OnText = c10::function_ref<void(std::string_view text, bool first)>;
  using OnToken = c10::function_ref<void(TokenId id)>;
  /// Gives valid UTF-8 as tokens and what is between them, which is not empty. `first`: it begins
  /// where `text` does.
  void split(std::string_view text, OnText on_text, OnToken on_token) const;

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};
  /// A node of a trie of bytes.
  struct Node {
    std::map<char, std::size_t> next;
    std::size_t token = kNone;
  };

  /// The longest token at the beginning of `text`.
  const AddedToken* match_at(std::string_view text) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> trie_{1};
  std::array<bool, 256> begins_{};  ///< whether a token begins with a byte
};

}  // namespace tessera::data
