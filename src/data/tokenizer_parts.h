// The parts of a tokenizer: the processing steps before and after the model (JSON objects in
// tokenizer.json), the byte-pair model (Sennrich et al., 2016), and the files in the tokenizer's
// folder.

#pragma once

#include <c10/util/FunctionRef.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/data/detail/tokenizers.h"
#include "tessera/data/tokenizer.h"

namespace tessera::data {

using TokenId = std::uint32_t;

struct TextHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const {
    return std::hash<std::string_view>()(text);
  }
};
/// A map with texts as keys. A look-up by string_view does not copy the text.
template <class Value>
using TextMap = std::unordered_map<std::string, Value, TextHash, std::equal_to<>>;
using Vocabulary = TextMap<TokenId>;

/// A value in a tokenizer.json, with its path for messages. The JSON must outlive the JsonField.
class JsonField {
 public:
  JsonField(const nlohmann::json& value, std::string place)
      : value_(value), place_(std::move(place)) {}

  const nlohmann::json& json() const { return value_; }
  bool is_null() const { return value_.is_null(); }
  /// Returns the value of a key in a JSON object; null if the key is missing.
  JsonField at(const char* key) const;
  template <class Body>
  void for_each(Body&& body) const {
    require(value_.is_array(), "an array");
    for (std::size_t i = 0; i < value_.size(); ++i) {
      body(JsonField(value_[i], place_ + "[" + std::to_string(i) + "]"));
    }
  }
  const std::string& text() const;
  /// Returns the text of the field. Throws Error unless the text has exactly one character.
  const std::string& character() const;
  bool flag_or(bool otherwise) const;
  std::uint32_t number_below(std::uint32_t limit) const;
  const std::string& type() const { return at("type").text(); }

  /// Throws Error if the JSON object has keys other than "type" and `keys`.
  void only(std::initializer_list<std::string_view> keys) const;
  /// Throws Error unless `condition` is true. The message says that the field must be `what`.
  void require(bool condition, std::string_view what) const;
  /// Throws an Error that says that the value of the field is not supported.
  [[noreturn]] void refuse() const;

 private:
  std::string shown() const;

  const nlohmann::json& value_;
  std::string place_;
};

/// A token that encode() finds in a text before the text is split into words.
struct AddedToken {
  std::string content;
  TokenId id = 0;
  bool normalized = false;  ///< whether the token is searched for in the normalized text
  bool special = false;     ///< whether the token decodes to an empty text
};
/// Reads an AddedToken, except its id, from a JSON object. `special`: the value of
/// AddedToken::special if the JSON object has no member "special".
AddedToken added_token_of(const JsonField& field, bool special);

/// Finds added tokens in a text, from left to right. If several tokens begin at one position, finds
/// the longest token. Immutable.
class AddedTokens {
 public:
  AddedTokens() = default;
  /// No AddedToken may have an empty `content`.
  explicit AddedTokens(const std::vector<AddedToken>& tokens);

  using OnText = c10::function_ref<void(std::string_view text, bool first)>;
  using OnToken = c10::function_ref<void(TokenId id)>;
  /// Calls `on_token` for each added token in the UTF-8 `text`, and `on_text` for each non-empty
  /// text between tokens (`first`: whether this text is at the beginning of `text`).
  void split(std::string_view text, OnText on_text, OnToken on_token) const;

 private:
  /// Returns the longest added token at the beginning of `text` (not empty), or nullptr.
  const AddedToken* match_at(std::string_view text) const;

  TextMap<AddedToken> tokens_;
  /// For each byte: the sizes of the added tokens that begin with the byte, largest first.
  std::array<std::vector<std::size_t>, 256> sizes_;
};

/// Returns the bytes that a token in GPT-2's alphabet stands for: in this alphabet, a printable
/// character stands for each byte. Returns nullopt if the token has other characters.
std::optional<std::string> bytes_of_token(std::string_view token);
/// Returns the byte of a token "<0xHH>" of a model with byte fallback; nullopt for other tokens.
std::optional<unsigned char> byte_of_fallback_token(std::string_view token);

/// Throws Error if a step has made a text implausibly long. `from`, `to`: bytes before and after.
void check_growth(std::size_t from, std::size_t to);

/// Steps that modify a text (valid UTF-8) in place before the text is split into words. All
/// functions named read_... throw Error for unsupported steps.
using Normalizers = std::vector<std::function<void(std::string& text)>>;
Normalizers read_normalizers(const JsonField& field);

/// Steps that change the texts of tokens. The changed texts, concatenated, are the decoded text.
using Decoders = std::vector<std::function<void(std::vector<std::string>& tokens)>>;
Decoders read_decoders(const JsonField& field);

/// A part of a text that is tokenized separately.
struct Piece {
  std::string_view text;
  bool first = false;  ///< whether the piece is at the beginning of the whole text
};
using OnPiece = c10::function_ref<void(Piece)>;

/// The steps that split a text into pieces, in the order of their execution.
struct PreTokenizers {
  /// Calls `on_piece` for the non-empty parts of `piece`, from left to right. Each part exists only
  /// during the call. The parts are valid UTF-8, except after ByteLevel.
  using Step = std::function<void(Piece piece, OnPiece on_piece)>;
  std::vector<Step> steps;
  bool byte_level = false;  ///< whether a step is ByteLevel, so that the model's tokens are bytes

  void split(Piece piece, OnPiece on_piece) const { split_from(0, piece, on_piece); }

 private:
  void split_from(std::size_t step, Piece piece, OnPiece on_piece) const;
};
PreTokenizers read_pre_tokenizers(const JsonField& field);
/// Returns a step that splits texts at matches of a regular expression. Each match is a piece.
PreTokenizers::Step split_by_pattern(std::string_view expression);

/// The tokens that the template of a tokenizer.json puts before and after a text.
struct TemplateTokens {
  std::vector<std::int64_t> begin;
  std::vector<std::int64_t> end;
};
/// Reads the "post_processor" of tokenizer.json. Throws Error for unknown steps and tokens.
TemplateTokens read_post_processor(const JsonField& field, TokenId vocabulary);

/// A merge of two adjacent tokens into one token. Merges with lower ranks are applied first.
struct Merge {
  TokenId left = 0;
  TokenId right = 0;
  TokenId result = 0;
  std::uint32_t rank = 0;
};

/// A byte-pair encoding (BPE) model. The default values fit the tiktoken format.
struct BpeModel {
  Vocabulary vocabulary;  ///< token texts: raw bytes if byte_level, else UTF-8
  std::vector<Merge> merges;
  bool byte_level = true;      ///< whether words are split into bytes, not characters
  bool byte_fallback = false;  ///< whether unknown characters become tokens <0xHH>
  bool ignore_merges = true;   ///< whether a word that is itself a token is not split
  bool fuse_unknown = false;   ///< whether adjacent unknown characters become one token
  std::optional<TokenId> unknown;
};

/// The largest allowed token id, eight times the size of the largest known vocabulary.
inline constexpr TokenId kMaxTokenId = 2'000'000;

struct BpeTokenizerParts {
  std::vector<AddedToken> added;
  Normalizers normalizers;
  PreTokenizers pre_tokenizers;
  BpeModel model;
  Decoders decoders;
  std::vector<std::string> texts;  ///< token texts by id, before the decoders; "" for unused ids
  bool joined_by_spaces = false;   ///< without decoders: whether spaces join the token texts
  std::vector<std::int64_t> begin_tokens;
  std::optional<bool> begins_texts;  ///< whether texts begin with begin_tokens; nullopt: unknown
  std::vector<std::int64_t> end_tokens;
};

TokenizerPtr bpe_tokenizer(BpeTokenizerParts parts);

/// A token from tokenizer_config.json or from another file in the tokenizer's folder.
struct NamedToken {
  std::optional<TokenId> id;  ///< the token's id; nullopt if the file gives no id
  AddedToken token;           ///< the token; AddedToken::id is not set
};

/// The token that a tokenizer puts at the beginning or at the end of a text.
struct TextEnd {
  std::optional<std::string> text;  ///< the token's text, from bos_token or eos_token
  std::optional<bool>
      adds;  ///< whether the token is added: add_bos_token, add_eos_token or default
};

/// The settings in tokenizer_config.json. If tokenizer_config.json has no "added_tokens_decoder",
/// the settings include those of special_tokens_map.json and added_tokens.json.
struct TokenizerSettings {
  std::vector<NamedToken> tokens;  ///< tokens of all files; tokens with an id come first, by id
  TextEnd begin, end;
  bool decides_ends = true;    ///< whether TextEnd::adds overrides the template of tokenizer.json
  bool legacy = true;          ///< whether text after a special token gets a leading space
  std::optional<bool> prefix;  ///< whether texts get a leading space (add_prefix_space)
  std::vector<std::filesystem::path> read;
};

/// Reads the files in a tokenizer's folder. Throws Error for files of an unexpected format.
TokenizerSettings read_tokenizer_settings(const std::filesystem::path& tokenizer);

/// Whether `file` exists. Throws Error for a symbolic link whose target is missing.
bool has_file(const std::filesystem::path& file);

/// Throws Error if a token's `id` in this tokenizer is too large or differs from the folder's files
/// (`named`). `is_new`: whether the vocabulary lacks the token.
void check_id(const NamedToken& named, std::int64_t id, bool is_new);

/// Opens a tokenizer.json with a BPE model, or a SentencePiece model. Throws Error if the file
/// cannot be read, contradicts `settings`, or needs steps that are not implemented (docs/data.md).
TokenizerPtr json_tokenizer(const std::string& path, const TokenizerSettings& settings);
TokenizerPtr sentencepiece_tokenizer(const std::string& path, const TokenizerSettings& settings);

}  // namespace tessera::data
