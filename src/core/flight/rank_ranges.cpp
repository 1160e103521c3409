#include <charconv>

#include "tessera/core/detail/flight_report.h"

namespace tessera::flight {
namespace {

/// How many ranks from `first` on are evenly spaced.
std::size_t run_length(const std::vector<int>& ranks, std::size_t first) {
  std::size_t end = first + 1;
  if (end < ranks.size()) {
    const int stride = ranks[end] - ranks[first];
    while (stride > 0 && end < ranks.size() && ranks[end] - ranks[end - 1] == stride) {
      ++end;
    }
  }
  return end - first;
}

std::string run_text(int first, int last, int stride) {
  std::string text = std::to_string(first) + "-" + std::to_string(last);
  return stride == 1 ? text : text + "/" + std::to_string(stride);
}

/// The number that `text` begins with, which is taken off; -1: none.
int take_number(std::string_view& text) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return error == std::errc() ? value : -1;
}

bool take(std::string_view& text, char c) {
  const bool there = text.starts_with(c);
  text.remove_prefix(there ? 1 : 0);
  return there;
}

}  // namespace

std::string ranks_text(const std::vector<int>& ranks) {
  constexpr std::size_t kShortestRun = 3;
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    const std::size_t length = run_length(ranks, i);
    text += text.empty() ? "" : ", ";
    if (length < kShortestRun) {
      text += std::to_string(ranks[i]);
      ++i;
    } else {
      text += run_text(ranks[i], ranks[i + length - 1], ranks[i + 1] - ranks[i]);
      i += length;
    }
  }
  return text;
}

std::vector<int> parse_ranks(std::string_view text) {
  std::vector<int> ranks;
  while (!text.empty()) {
    const int first = take_number(text);
    const int last = take(text, '-') ? take_number(text) : first;
    const int stride = take(text, '/') ? take_number(text) : 1;
    if (first < 0 || last < first || stride < 1) {
      break;
    }
    for (int rank = first; rank <= last; rank += stride) {
      ranks.push_back(rank);
    }
    take(text, ',');
    take(text, ' ');
  }
  return ranks;
}

std::string name_ranks(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + ranks_text(ranks);
}

}  // namespace tessera::flight
