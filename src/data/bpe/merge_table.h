#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pipeline/token_id.h"

namespace tessera::data {

/// Two neighbours become one token; the lowest rank first.
struct Merge {
  TokenId left = 0;
  TokenId right = 0;
  TokenId result = 0;
  std::uint32_t rank = 0;
};

/// What a pair of tokens becomes.
struct MergedPair {
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  std::uint32_t rank = kNone;  ///< kNone: they are not merged
  TokenId result = 0;
};

/// Pairs to merges: a flat hash table, as looking up is most of the time of encoding.
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

}  // namespace tessera::data
