// Byte-pair encoding (Sennrich et al., 2016), and tokenizers made of it.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "steps.h"
#include "tessera/data/tokenizer.h"

namespace tessera::data {

/// Two neighbors become one token; lower ranks first.
struct Merge {
  TokenId left = 0;
  TokenId right = 0;
  TokenId result = 0;
  std::uint32_t rank = 0;
};

/// What a pair of tokens becomes.
struct MergedPair {
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  std::uint32_t rank = kNone;  ///< kNone: no merge
  TokenId result = 0;
};

/// Merges by pair. A flat hash table, since most of the time of encoding is look-ups.
class MergeTable {
 public:
  /// If a pair has several merges, the last one counts.
  explicit MergeTable(const std::vector<Merge>& merges);

  MergedPair find(TokenId left, TokenId right) const {
    const std::uint64_t key = key_of(left, right);
    for (std::size_t at = slot_of(key);; at = (at + 1) & mask_) {
      if (slots_[at].key == key || slots_[at].key == kEmpty) {
        return slots_[at].merged;
      }
    }
  }

 private:
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
  struct Slot {
    std::uint64_t key = kEmpty;
    MergedPair merged;
  };

  static std::uint64_t key_of(TokenId left, TokenId right) {
    return std::uint64_t{left} << 32 | right;
  }
  /// Fibonacci hashing: the upper bits of the product.
  std::size_t slot_of(std::uint64_t key) const {
    return static_cast<std::size_t>((key ^ key >> 29) * 0x9e3779b97f4a7c15U >> shift_);
  }

  std::vector<Slot> slots_;
  std::size_t mask_ = 0;
  int shift_ = 0;
};

/// The tokens of recent words: 2 MiB. Each word has one place; a later word replaces an earlier
/// one. Not thread safe.
class WordCache {
 public:
  /// One cache line.
  struct Entry {
    static constexpr std::size_t kBytes = 30;
    static constexpr std::size_t kTokens = 8;

    std::array<TokenId, kTokens> tokens{};
    std::array<char, kBytes> word{};
    std::uint8_t bytes = 0;  ///< 0: empty
    std::uint8_t count = 0;

    std::span<const TokenId> ids() const { return {tokens.data(), count}; }
  };

  WordCache() : entries_(kEntries) {}

  static bool can_cache(std::string_view word) { return word.size() <= Entry::kBytes; }

  /// The place of a word.
  Entry& place(std::string_view word) {
    return entries_[std::hash<std::string_view>()(word) % kEntries];
  }

  static bool holds(const Entry& entry, std::string_view word) {
    return entry.bytes == word.size() &&
           std::memcmp(entry.word.data(), word.data(), word.size()) == 0;
  }

  static void store(Entry& entry, std::string_view word, std::span<const TokenId> ids) {
    if (ids.size() <= Entry::kTokens) {
      std::memcpy(entry.word.data(), word.data(), word.size());
      entry.bytes = static_cast<std::uint8_t>(word.size());
      entry.count = static_cast<std::uint8_t>(ids.size());
      std::ranges::copy(ids, entry.tokens.begin());
    }
  }

 private:
  static constexpr std::size_t kEntries = std::size_t{1} << 15;
  std::vector<Entry> entries_;
};

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
  bool fuse_unknown = false;   ///< adjacent characters without a token are one unknown token
  std::optional<TokenId> unknown;
};

/// Memory that is reused by encoding. One thread at a time.
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
  std::vector<Symbol> symbols;
  std::vector<Candidate> candidates;
};

/// Merges workspace.ids until no pair has a merge: the lowest rank first, then the leftmost.
void merge_symbols(const MergeTable& merges, BpeWorkspace& workspace);

/// Encodes words. Immutable.
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

/// Ids are below this; eight times the largest vocabularies.
inline constexpr TokenId kMaxTokenId = 2'000'000;

struct BpeTokenizerParts {
  std::vector<AddedToken> added;
  Normalizers normalizers;
  PreTokenizers pre_tokenizers;
  BpeModel model;
  Decoders decoders;
  std::vector<std::string> texts;  ///< by id, before the decoders; "" for an id without a token
  bool joined_by_spaces = false;   ///< how texts are joined if there are no decoders
  std::vector<std::int64_t> begin_tokens;
  std::optional<bool> begins_texts;  ///< with begin_tokens; nullopt: unknown
  std::vector<std::int64_t> end_tokens;
};

/// Added tokens, normalization, splitting, byte-pair encoding; and back.
class BpeTokenizer final : public Tokenizer {
 public:
  explicit BpeTokenizer(BpeTokenizerParts parts);

  std::int64_t vocabulary() const override {
    return static_cast<std::int64_t>(parts_.texts.size());
  }
  std::vector<std::int64_t> encode(std::string_view text) const override;
  std::string decode(const std::vector<std::int64_t>& tokens) const override;
  std::vector<std::int64_t> begin_tokens() const override { return parts_.begin_tokens; }
  std::vector<std::int64_t> end_tokens() const override { return parts_.end_tokens; }
  std::optional<bool> begins_texts() const override { return parts_.begins_texts; }

 private:
  /// Workspaces of the threads that encode. A later call uses the cache of an earlier one.
  class Workspaces {
   public:
    std::unique_ptr<BpeWorkspace> take();
    void give(std::unique_ptr<BpeWorkspace> workspace);

   private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<BpeWorkspace>> free_;
  };

  std::string normalize(std::string_view text) const;

  BpeTokenizerParts parts_;
  AddedTokens raw_;            ///< found in the original text
  AddedTokens normalized_;     ///< found in the normalized text
  std::vector<bool> special_;  ///< by id
  Bpe bpe_;
  mutable Workspaces workspaces_;
};

}  // namespace tessera::data
