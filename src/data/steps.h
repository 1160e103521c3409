// The steps around a tokenizer's model: JSON objects of tokenizer.json and what they do to a text.

#pragma once

#include <c10/util/FunctionRef.h>

#include <array>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/error.h"

namespace tessera::data {

using TokenId = std::uint32_t;

/// A value of a tokenizer.json, with its place for messages. The JSON must outlive it.
class JsonField {
 public:
  JsonField(const nlohmann::json& value, std::string place)
      : value_(value), place_(std::move(place)) {}

  const nlohmann::json& json() const { return value_; }
  bool is_null() const { return value_.is_null(); }
  /// A missing key is null.
  JsonField at(const char* key) const;
  /// Calls `body` for each element of an array.
  template <class Body>
  void for_each(Body&& body) const {
    require(value_.is_array(), "an array");
    for (std::size_t i = 0; i < value_.size(); ++i) {
      body(JsonField(value_[i], place_ + "[" + std::to_string(i) + "]"));
    }
  }
  const std::string& text() const;
  /// A text of one character.
  const std::string& character() const;
  /// Null is `otherwise`.
  bool flag_or(bool otherwise) const;
  std::uint32_t number_below(std::uint32_t limit) const;
  /// The "type" of an object.
  const std::string& type() const { return at("type").text(); }

  /// Throws unless the object has no other keys than "type" and these.
  void only(std::initializer_list<std::string_view> keys) const;
  /// Throws unless `condition`: the value must be `what`.
  void require(bool condition, std::string_view what) const;
  /// Throws: this value is not implemented.
  [[noreturn]] void refuse() const;

 private:
  /// The value as in the file, if it is short.
  std::string shown() const;

  const nlohmann::json& value_;
  std::string place_;
};

/// Added tokens may not be longer; those of published tokenizers have less than 100 bytes.
inline constexpr std::size_t kMaxAddedTokenBytes = 1000;

/// A token that is found in the text itself, before the text is split.
struct AddedToken {
  std::string content;
  TokenId id = 0;
  bool single_word = false;  ///< not within a word
  bool lstrip = false;       ///< takes the white space before it
  bool rstrip = false;       ///< takes the white space behind it
  bool normalized = false;   ///< found in the normalized text
  bool special = false;      ///< has no text
};
/// Reads all but the id. `special`: the value if the object has none.
AddedToken added_token_of(const JsonField& field, bool special);

/// Finds added tokens: the leftmost, and of these the longest. Immutable.
class AddedTokens {
 public:
  AddedTokens() = default;
  /// No `content` is empty.
  explicit AddedTokens(std::vector<AddedToken> tokens);

  using OnText = c10::function_ref<void(std::string_view text, bool first)>;
  using OnToken = c10::function_ref<void(TokenId id)>;
  /// Reports the tokens of valid UTF-8 and the texts between them, which are not empty. `first`:
  /// the part begins where `text` begins.
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

/// The bytes of a token in GPT-2's alphabet, which writes each byte as one printable character;
/// nullopt for other characters.
std::optional<std::string> bytes_of_token(std::string_view token);
/// Bytes in that alphabet, in UTF-8.
std::string token_of_bytes(std::string_view bytes);
/// The byte of a token "<0xHH>" of a model with byte fallback.
std::optional<unsigned char> byte_of_fallback_token(std::string_view token);

/// Throws Error if a text of `from` bytes grows to more than any tokenizer makes of it.
void check_growth(std::size_t from, std::size_t to);

/// Steps that change valid UTF-8 in place before it is split. All readers throw Error for what is
/// not implemented.
using Normalizers = std::vector<std::function<void(std::string& text)>>;
Normalizers read_normalizers(const JsonField& field);

/// Steps that turn the texts of tokens into the decoded text.
using Decoders = std::vector<std::function<void(std::vector<std::string>& tokens)>>;
Decoders read_decoders(const JsonField& field);

/// A part of a text that is tokenized alone.
struct Piece {
  std::string_view text;
  bool first = false;  ///< at the beginning of the whole text
};
using OnPiece = c10::function_ref<void(Piece)>;

/// Steps that split pieces, in order.
struct PreTokenizers {
  /// Reports the pieces from left to right, without empty ones; a piece is valid during the call.
  /// Pieces are valid UTF-8, except behind ByteLevel.
  using Step = std::function<void(Piece piece, OnPiece on_piece)>;
  std::vector<Step> steps;
  bool byte_level = false;  ///< the model's tokens are bytes: ByteLevel is one of the steps

  void split(Piece piece, OnPiece on_piece) const { split_from(0, piece, on_piece); }

 private:
  void split_from(std::size_t step, Piece piece, OnPiece on_piece) const;
};
PreTokenizers read_pre_tokenizers(const JsonField& field);
/// Splits at the matches of an expression, which are pieces too.
PreTokenizers::Step split_by_pattern(std::string_view expression);

/// The tokens that a template puts around a text.
struct TemplateTokens {
  std::vector<std::int64_t> begin;
  std::vector<std::int64_t> end;
};
/// Also throws Error for tokens outside the vocabulary.
TemplateTokens read_post_processor(const JsonField& field, TokenId vocabulary);

}  // namespace tessera::data
