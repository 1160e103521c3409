#include "unicode/code_set.h"

#include <algorithm>

namespace tessera::data {

void CodeSet::add(char32_t first, char32_t last) {
  // Those that lie behind each other come in order.
  auto begin = std::ranges::lower_bound(ranges_, first, {}, [](Range r) { return r.last + 1; });
  auto end = begin;
  while (end != ranges_.end() && end->first <= last + 1) {
    first = std::min(first, end->first);
    last = std::max(last, end->last);
    ++end;
  }
  begin = ranges_.erase(begin, end);
  ranges_.insert(begin, {first, last});
}

void CodeSet::add(const CodeSet& other) {
  for (const Range range : other.ranges_) {
    add(range.first, range.last);
  }
}

CodeSet CodeSet::complement() const {
  CodeSet result;
  char32_t next = 0;
  for (const Range range : ranges_) {
    if (next < range.first) {
      result.ranges_.push_back({next, range.first - 1});
    }
    next = range.last + 1;
  }
  if (next <= kLastCode) {
    result.ranges_.push_back({next, kLastCode});
  }
  return result;
}

CodeSet CodeSet::intersected(const CodeSet& other) const {
  CodeSet outside = complement();
  outside.add(other.complement());
  return outside.complement();
}

bool CodeSet::contains(char32_t code) const {
  const auto range = std::ranges::lower_bound(ranges_, code, {}, &Range::last);
  return range != ranges_.end() && range->first <= code;
}

}  // namespace tessera::data
