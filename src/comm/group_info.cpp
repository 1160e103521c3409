// Texts for messages about a collective. Messages name world ranks, as a launcher does, and never
// ranks within the group.

#include "group_info.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sstream>

namespace tessera::comm {

std::string join(const std::vector<int>& ranks) {
  return fmt::format("{}", fmt::join(ranks, ", "));
}

std::string describe(const GroupInfo& group, const char* collective) {
  return fmt::format("{} in group '{}' (ranks {}), rank {}", collective, group.name,
                     join(group.ranks), group.ranks[static_cast<std::size_t>(group.rank)]);
}

std::string with_purpose(const char* collective, const std::string& purpose) {
  return purpose.empty() ? collective : fmt::format("{} for {}", collective, purpose);
}

std::uint64_t hash_of(std::string_view text, std::uint64_t before) {
  for (const char c : text) {
    before = (before ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return before;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(line);
  }
  return lines;
}

/// Returns the first line of a c10d exception, which is often followed by a stack trace.
std::string first_line(const std::string& message) {
  std::string line = message.substr(0, message.find('\n'));
  if (line.starts_with('[')) {
    const auto end = line.find("] ");
    if (end != std::string::npos) {
      line.erase(0, end + 2);
    }
  }
  return line;
}

}  // namespace tessera::comm
