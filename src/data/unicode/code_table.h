#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "unicode/code_set.h"

namespace tessera::data {

/// A value for each code point. Pages that are alike are kept once.
template <class T>
class CodeTable {
 public:
  /// One for each code point.
  explicit CodeTable(const std::vector<T>& values) {
    std::map<std::array<T, kCodes>, std::uint32_t> known;
    for (std::size_t i = 0; i < page_of_.size(); ++i) {
      std::array<T, kCodes> page;
      std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(i * kCodes), kCodes, page.begin());
      const auto [entry, is_new] = known.try_emplace(page, known.size());
      page_of_[i] = entry->second;
      if (is_new) {
        values_.insert(values_.end(), page.begin(), page.end());
      }
    }
  }

  T operator[](char32_t code) const {
    return values_[page_of_[code / kCodes] * kCodes + code % kCodes];
  }

 private:
  static constexpr std::size_t kCodes = 128;
  std::array<std::uint32_t, (kLastCode + 1) / kCodes> page_of_{};
  std::vector<T> values_;
};

}  // namespace tessera::data
