#pragma once

#include <vector>

namespace tessera::data {

inline constexpr char32_t kLastCode = 0x10ffff;

/// A set of code points.
class CodeSet {
 public:
  struct Range {
    char32_t first;
    char32_t last;
    friend bool operator==(const Range&, const Range&) = default;
  };

  CodeSet() = default;
  explicit CodeSet(char32_t code) { add(code, code); }

  void add(char32_t first, char32_t last);
  void add(const CodeSet& other);
  /// All code points that are not in it.
  CodeSet complement() const;
  CodeSet intersected(const CodeSet& other) const;

  bool contains(char32_t code) const;
  /// In order; none touches the next.
  const std::vector<Range>& ranges() const { return ranges_; }

 private:
  std::vector<Range> ranges_;
};

}  // namespace tessera::data
