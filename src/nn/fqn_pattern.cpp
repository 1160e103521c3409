#include "tessera/nn/fqn_pattern.h"

namespace tessera::nn {

// Greedy with one point of return: the last '*' of the present component.
bool matches_fqn(std::string_view pattern, std::string_view fqn) {
  std::size_t p = 0;
  std::size_t n = 0;
  std::size_t star = std::string_view::npos;
  std::size_t resume = 0;
  while (n < fqn.size()) {
    const bool dot = fqn[n] == '.';
    if (p < pattern.size() && (pattern[p] == fqn[n] || (pattern[p] == '?' && !dot))) {
      if (dot) star = std::string_view::npos;
      ++p;
      ++n;
    } else if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = n;
    } else if (star != std::string_view::npos && fqn[resume] != '.') {
      p = star + 1;
      n = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace tessera::nn
