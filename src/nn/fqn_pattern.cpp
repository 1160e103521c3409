// Matching of FQNs: shell patterns by segment, and "**" for any number of segments. By hand and
// without std::regex, which is slow to build, recurses, and throws for what only a regex would
// refuse.

#include "tessera/nn/fqn_pattern.h"

#include <algorithm>
#include <vector>

namespace tessera::nn {
namespace {

using Parts = std::vector<std::string_view>;

/// "layers.*.w" -> "layers", "*", "w"; "" has no segment.
Parts split_at_dots(std::string_view text) {
  Parts segments;
  while (!text.empty()) {
    // npos becomes the end, so that the last segment needs no case.
    const std::size_t dot = std::min(text.find('.'), text.size());
    segments.push_back(text.substr(0, dot));
    if (dot + 1 == text.size()) {
      segments.emplace_back();  // a dot at the end: an empty segment, which no name has
    }
    text.remove_prefix(std::min(dot + 1, text.size()));
  }
  return segments;
}

/// The length of the bracket expression that `pattern` begins with; 1 if its '[' is never closed.
std::size_t length_of_set(std::string_view pattern) {
  std::size_t first = 1;
  if (pattern.substr(first).starts_with('!') || pattern.substr(first).starts_with('^')) {
    ++first;
  }
  const std::size_t end = pattern.find(']', first + 1);  // a ']' that comes first is one of the set
  return end == std::string_view::npos ? 1 : end + 1;
}

/// What stands for one character each, and stars: "[qk]_*" -> "[qk]", "_", "*".
Parts split_into_tokens(std::string_view segment) {
  Parts tokens;
  while (!segment.empty()) {
    const std::size_t length = segment.front() == '[' ? length_of_set(segment) : 1;
    tokens.push_back(segment.substr(0, length));
    segment.remove_prefix(length);
  }
  return tokens;
}

/// `set`: "[a-cx]" or "[!a-cx]".
bool is_in_set(std::string_view set, char character) {
  const bool negated = set[1] == '!' || set[1] == '^';
  const std::string_view members = set.substr(negated ? 2 : 1, set.size() - (negated ? 3 : 2));
  // A '-' at either end of the set stands for itself.
  bool found = false;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const bool is_range = i + 2 < members.size() && members[i + 1] == '-';
    const char last = members[is_range ? i + 2 : i];
    found |= members[i] <= character && character <= last;
    i += is_range ? 2 : 0;
  }
  return found != negated;
}

/// A token of one character is itself; '?' is any; longer ones are sets.
bool matches_character(std::string_view token, char character) {
  if (token.size() > 1) {
    return is_in_set(token, character);
  }
  return token == "?" || token.front() == character;
}

/// Whether `pattern` matches `items`: its part `star` any number of them, each other part one, as
/// `matches_one` says. Greedy: after a mismatch the last star takes one item more. Returning to an
/// earlier star could not help, since what stands between two stars was found at its first place;
/// so no pair of a part and an item is compared twice.
template <class Items, class MatchesOne>
bool matches_with_stars(const Parts& pattern, const Items& items, std::string_view star,
                        const MatchesOne& matches_one) {
  std::size_t part = 0;
  std::size_t after_star = 0;  // the part after the last star; 0: none yet
  std::size_t resume = 0;      // the first item that is not the last star's
  for (std::size_t item = 0; item < items.size();) {
    if (part < pattern.size() && pattern[part] == star) {
      after_star = ++part;
      resume = item;
    } else if (part < pattern.size() && matches_one(pattern[part], items[item])) {
      ++part;
      ++item;
    } else if (after_star > 0) {
      part = after_star;
      item = ++resume;
    } else {
      return false;
    }
  }
  // All items are matched; what is left of the pattern must match nothing.
  return std::all_of(pattern.begin() + static_cast<std::ptrdiff_t>(part), pattern.end(),
                     [&](std::string_view rest) { return rest == star; });
}

/// The same algorithm on two levels: characters within a segment, segments within an FQN.
bool matches_segment(std::string_view pattern, std::string_view name) {
  return matches_with_stars(split_into_tokens(pattern), name, "*", &matches_character);
}

}  // namespace

bool matches_fqn(std::string_view pattern, std::string_view fqn) {
  return matches_with_stars(split_at_dots(pattern), split_at_dots(fqn), "**", &matches_segment);
}

}  // namespace tessera::nn
