#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bpe/merge_table.h"
#include "bpe/word_cache.h"

namespace tessera::data {

/// Finds by string_view.
struct TextHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const {
    return std::hash<std::string_view>()(text);
  }
};
using Vocabulary = std::unordered_map<std::string, TokenId, TextHash, std::equal_to<>>;

/// A byte-pair model. The defaults are tiktoken's form.
struct BpeModel {
  Vocabulary vocabulary;  ///< raw bytes if byte_level, else UTF-8
  std::vector<Merge> merges;
  bool byte_level = true;      ///< words begin as bytes; else as characters
  bool byte_fallback = false;  ///< characters without a token are tokens <0xHH>
  bool ignore_merges = true;   ///< a word that is a token is that token
  bool fuse_unknown = false;   ///< neighbours without a token are one unknown token
  std::optional<TokenId> unknown;
};

/// Memory that encoding takes again and again. One thread at a time.
struct BpeWorkspace {
  struct Symbol {
    TokenId id = 0;
    std::uint32_t previous = 0;
    std::uint32_t next = 0;
    bool merged_away = false;
  };
  /// Ordered by rank, then by position.
  struct Candidate {
    std::uint64_t rank_and_position = 0;
    TokenId result = 0;
  };

  WordCache cache;
  std::vector<TokenId> ids;
  std::vector<MergedPair> pairs;
  std::vector<Symbol> symbols;
  std::vector<Candidate> candidates;
};

/// Merges workspace.ids until no pair of neighbours has a merge: the lowest rank first, of equal
/// ones the leftmost.
void merge_symbols(const MergeTable& merges, BpeWorkspace& workspace);

/// Byte-pair encoding (Sennrich et al., 2016) of words. Immutable.
class Bpe {
 public:
  explicit Bpe(BpeModel model);

  /// Appends the tokens of a word, which is not empty and, unless tokens are bytes, valid UTF-8.
  void encode(std::string_view word, std::vector<std::int64_t>& ids, BpeWorkspace& workspace) const;

 private:
  /// Encodes a part without inner borders between words.
  void encode_part(std::string_view word, std::vector<std::int64_t>& ids,
                   BpeWorkspace& workspace) const;
  /// Fills workspace.ids.
  void merge_word(std::string_view word, BpeWorkspace& workspace) const;
  void first_symbols(std::string_view word, std::vector<TokenId>& ids) const;
  std::optional<TokenId> token_of(std::string_view character) const;
  bool append_fallback(std::string_view character, std::vector<TokenId>& ids) const;

  void find_inner_borders();
  std::size_t next_border(std::string_view text, std::size_t from) const;

  BpeModel model_;
  MergeTable merges_;
  std::array<std::optional<TokenId>, 256> bytes_;     ///< tokens of bytes, or of ASCII characters
  std::array<std::optional<TokenId>, 256> fallback_;  ///< tokens <0xHH>
  bool divisible_ = false;                            ///< words may be cut at their marks
  std::unordered_set<std::string> before_mark_;       ///< characters that a token has before a mark
};

}  // namespace tessera::data
