#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace llama {

/// Passes on a text that comes in pieces, up to the first of some strings: no part of one is shown
/// that may still become whole.
class StopStrings {
 public:
  /// None of them empty.
  explicit StopStrings(std::vector<std::string> stops);

  /// What may be shown with this piece; after a stop nothing.
  std::string push(std::string_view piece);
  /// Whether one of the strings has come.
  bool stopped() const { return stopped_; }
  /// What was held back, when no piece follows.
  std::string finish();

 private:
  std::size_t held_back() const;

  std::vector<std::string> stops_;
  std::string pending_;
  bool stopped_ = false;
};

}  // namespace llama
