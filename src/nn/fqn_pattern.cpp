// Matches FQNs with shell patterns; "**" matches any number of segments.

#include <fnmatch.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::nn {
namespace {

/// Splits an FQN or a pattern at the dots: "layers.*.w" -> "layers", "*", "w"; "" -> no segments.
std::vector<std::string> split_at_dots(std::string_view text) {
  std::vector<std::string> segments;
  while (!text.empty()) {
    const std::size_t dot = std::min(text.find('.'), text.size());
    segments.emplace_back(text.substr(0, dot));
    if (dot + 1 == text.size()) {
      segments.emplace_back();  // a dot at the end: an empty segment, which matches nothing
    }
    text.remove_prefix(std::min(dot + 1, text.size()));
  }
  return segments;
}

bool matches_segment(const std::string& pattern, const std::string& segment) {
  return fnmatch(pattern.c_str(), segment.c_str(), FNM_NOESCAPE) == 0;
}

}  // namespace

/// Greedy matching: after a mismatch the last "**" matches one more segment. An earlier "**" need
/// not, because everything before the last "**" is matched as early as possible.
bool matches_fqn(std::string_view pattern, std::string_view fqn) {
  const std::vector<std::string> parts = split_at_dots(pattern), segments = split_at_dots(fqn);
  std::size_t part = 0;
  std::size_t after_stars = 0;  // index in `parts` after the last "**"; 0: none yet
  std::size_t resume = 0;       // index of the first segment that the last "**" does not match
  for (std::size_t i = 0; i < segments.size();) {
    if (part < parts.size() && parts[part] == "**") {
      after_stars = ++part;
      resume = i;
    } else if (part < parts.size() && matches_segment(parts[part], segments[i])) {
      ++part;
      ++i;
    } else if (after_stars > 0) {
      part = after_stars;
      i = ++resume;
    } else {
      return false;
    }
  }
  // All segments of the FQN are matched, so the remaining pattern segments must all be "**".
  return std::all_of(parts.begin() + static_cast<std::ptrdiff_t>(part), parts.end(),
                     [](const std::string& rest) { return rest == "**"; });
}

}  // namespace tessera::nn
