#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "bpe/merge_table.h"

namespace tessera::data {

/// The tokens of words that came lately. One place a word: a later one takes the place of an
/// earlier one. 2 MiB. Not thread safe.
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

  static bool may_hold(std::string_view word) { return word.size() <= Entry::kBytes; }

  /// Where a word that it may hold has its place.
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

}  // namespace tessera::data
