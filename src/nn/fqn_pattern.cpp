// Matching of FQNs by shell patterns; "**" matches any number of segments. std::regex is not used:
// it is slow to construct, recurses, and throws for characters that are special only in a regex.

#include "tessera/nn/module.h"

#include <algorithm>
#include <vector>

#include "tessera/core/error.h"

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

/// Matches `pattern` against `items`. Returns for each part of the pattern the index of the first
/// item that the part matches, followed by the number of items; nullopt if there is no match. The
/// part `star` matches any number of items. `matches_one` tells whether another part matches an
/// item. The match is greedy: after a mismatch the last star matches one more item. Earlier stars
/// need no change, because the parts between two stars were matched at the first possible place.
template <class Items, class MatchesOne>
std::optional<std::vector<std::size_t>> match_with_stars(const Texts& pattern, const Items& items,
                                                         std::string_view star,
                                                         const MatchesOne& matches_one) {
  std::vector<std::size_t> begins(pattern.size() + 1, items.size());
  std::size_t part = 0;
  std::size_t after_star = 0;  // index of the part after the last star; 0 if there was no star yet
  std::size_t resume = 0;      // index of the first item after the items that the last star matches
  for (std::size_t item = 0; item < items.size();) {
    if (part < pattern.size() && pattern[part] == star) {
      begins[part] = item;
      after_star = ++part;
      resume = item;
    } else if (part < pattern.size() && matches_one(pattern[part], items[item])) {
      begins[part] = item;
      ++part;
      ++item;
    } else if (after_star > 0) {
      part = after_star;
      item = ++resume;
    } else {
      return std::nullopt;
    }
  }
  // All items are matched, so the rest of the pattern may contain only stars.
  for (std::size_t i = part; i < pattern.size(); ++i) {
    if (pattern[i] != star) {
      return std::nullopt;
    }
    begins[i] = items.size();
  }
  return begins;
}

bool matches_segment(std::string_view pattern, std::string_view name) {
  return match_with_stars(split_into_tokens(pattern), name, "*", &matches_character).has_value();
}

auto match_segments(const Texts& pattern, const Texts& names) {
  return match_with_stars(pattern, names, "**", &matches_segment);
}

bool is_wildcard(std::string_view token) {
  return token == "*" || token == "?" || token.size() > 1;
}

Texts wildcards_of(std::string_view pattern) {
  Texts wildcards;
  for (const std::string_view segment : split_at_dots(pattern)) {
    if (segment == "**") {
      wildcards.push_back(segment);
      continue;
    }
    for (const std::string_view token : split_into_tokens(segment)) {
      if (is_wildcard(token)) {
        wildcards.push_back(token);
      }
    }
  }
  return wildcards;
}

std::string joined(const Texts& names, std::size_t begin, std::size_t end) {
  std::string text;
  for (std::size_t i = begin; i < end; ++i) {
    text += (i == begin ? "" : ".") + std::string(names[i]);
  }
  return text;
}

/// Appends the text that each wildcard of `pattern` matches in the segment `name`. The pattern must
/// match the segment.
void add_captures(std::string_view pattern, std::string_view name,
                  std::vector<std::string>& captures) {
  const Texts tokens = split_into_tokens(pattern);
  const auto begins = *match_with_stars(tokens, name, "*", &matches_character);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (is_wildcard(tokens[i])) {
      captures.emplace_back(name.substr(begins[i], begins[i + 1] - begins[i]));
    }
  }
}

std::optional<std::vector<std::string>> captures_of(std::string_view pattern,
                                                    std::string_view fqn) {
  const Texts segments = split_at_dots(pattern);
  const Texts names = split_at_dots(fqn);
  const auto begins = match_segments(segments, names);
  if (!begins) {
    return std::nullopt;
  }
  std::vector<std::string> captures;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (segments[i] == "**") {
      captures.push_back(joined(names, (*begins)[i], (*begins)[i + 1]));
    } else {
      add_captures(segments[i], names[(*begins)[i]], captures);
    }
  }
  return captures;
}

/// Replaces the wildcards of a pattern by the given texts. A "**" with an empty text is removed
/// together with its dot.
std::string filled_in(std::string_view pattern, const std::vector<std::string>& captures) {
  std::string name;
  auto next = captures.begin();
  for (const std::string_view segment : split_at_dots(pattern)) {
    std::string filled;
    if (segment == "**") {
      filled = *next++;
    } else {
      for (const std::string_view token : split_into_tokens(segment)) {
        filled += is_wildcard(token) ? *next++ : std::string(token);
      }
    }
    if (!filled.empty()) {
      name += (name.empty() ? "" : ".") + filled;
    }
  }
  return name;
}

void check_pair(std::string_view from, std::string_view to) {
  const Texts asked = wildcards_of(from), given = wildcards_of(to);
  TESSERA_CHECK(
      given.size() <= asked.size() && std::equal(given.begin(), given.end(), asked.begin()),
      "the names of '", from, "' were to become '", to,
      "', but its wildcards are not those of the first, in their order: write each as it ",
      "is there");
}

}  // namespace

bool matches_fqn(std::string_view pattern, std::string_view fqn) {
  return match_segments(split_at_dots(pattern), split_at_dots(fqn)).has_value();
}

std::optional<std::string> detail::renamed_fqn(std::string_view from, std::string_view to,
                                               std::string_view fqn) {
  check_pair(from, to);
  const auto captures = captures_of(from, fqn);
  return captures ? std::optional(filled_in(to, *captures)) : std::nullopt;
}

}  // namespace tessera::nn
