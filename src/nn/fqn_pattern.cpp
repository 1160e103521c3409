// Matching of FQNs by shell patterns; "**" matches any number of segments. std::regex is not used:
// it is slow to construct, recurses, and throws for characters that are special only in a regex.

#include "tessera/nn/module.h"

#include <algorithm>
#include <vector>

namespace tessera::nn {
namespace {

using Texts = std::vector<std::string_view>;

/// Splits an FQN or a pattern at the dots: "layers.*.w" -> "layers", "*", "w". "" has no segments.
Texts split_at_dots(std::string_view text) {
  Texts segments;
  while (!text.empty()) {
    const std::size_t dot = std::min(text.find('.'), text.size());
    segments.push_back(text.substr(0, dot));
    if (dot + 1 == text.size()) {
      segments.emplace_back();  // a dot at the end gives an empty segment, which matches no name
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
  // A leading ']' is an element of the set and does not close it.
  const std::size_t end = pattern.find(']', first + 1);
  return end == std::string_view::npos ? 1 : end + 1;
}

/// Splits a segment into tokens, one per character, set or star: "[qk]_*" -> "[qk]", "_", "*".
Texts split_into_tokens(std::string_view segment) {
  Texts tokens;
  while (!segment.empty()) {
    const std::size_t length = segment.front() == '[' ? length_of_set(segment) : 1;
    tokens.push_back(segment.substr(0, length));
    segment.remove_prefix(length);
  }
  return tokens;
}

/// Whether a character set, such as "[a-cx]" or "[!a-cx]", contains the character.
bool is_in_set(std::string_view set, char character) {
  const bool negated = set[1] == '!' || set[1] == '^';
  const std::string_view members = set.substr(negated ? 2 : 1, set.size() - (negated ? 3 : 2));
  // A '-' at either end of the set is an ordinary character.
  bool found = false;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const bool is_range = i + 2 < members.size() && members[i + 1] == '-';
    const char last = members[is_range ? i + 2 : i];
    found |= members[i] <= character && character <= last;
    i += is_range ? 2 : 0;
  }
  return found != negated;
}

/// Whether a token matches a character. A token of one character matches that character, '?'
/// matches any character, and longer tokens are sets.
bool matches_character(std::string_view token, char character) {
  if (token.size() > 1) {
    return is_in_set(token, character);
  }
  return token == "?" || token.front() == character;
}

/// Whether `pattern` matches all `items`. The part `star` matches any number of items.
/// `matches_one` tells whether another part matches an item. The match is greedy: after a mismatch
/// the last star matches one more item. Earlier stars need no change, because the parts between two
/// stars were matched at the first possible place.
template <class Items, class MatchesOne>
bool match_with_stars(const Texts& pattern, const Items& items, std::string_view star,
                      const MatchesOne& matches_one) {
  std::size_t part = 0;
  std::size_t after_star = 0;  // index of the part after the last star; 0 if there was no star yet
  std::size_t resume = 0;      // index of the first item after the items that the last star matches
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
  // All items are matched, so the rest of the pattern may contain only stars.
  return std::all_of(pattern.begin() + static_cast<std::ptrdiff_t>(part), pattern.end(),
                     [star](std::string_view rest) { return rest == star; });
}

bool matches_segment(std::string_view pattern, std::string_view name) {
  return match_with_stars(split_into_tokens(pattern), name, "*", &matches_character);
}

}  // namespace

bool matches_fqn(std::string_view pattern, std::string_view fqn) {
  return match_with_stars(split_at_dots(pattern), split_at_dots(fqn), "**", &matches_segment);
}

}  // namespace tessera::nn
