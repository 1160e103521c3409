// The examples of docs/sharding.md hold.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"
#include "tessera/core/redistribute_plan.h"
#include "testing/errors.h"

namespace tessera {
namespace {

using Numbers = std::vector<std::int64_t>;
using Lines = std::vector<std::string>;

/// The lines of all fenced blocks of one kind.
Lines examples(const std::string& kind) {
  std::ifstream file(TESSERA_SHARDING_DOC);
  Lines out;
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("```")) {
      inside = line == "```" + kind;
    } else if (inside) {
      out.push_back(line);
    }
  }
  return out;
}

Lines split(const std::string& text, const std::string& separator) {
  Lines out;
  std::size_t begin = 0;
  for (auto end = text.find(separator); end != std::string::npos;
       end = text.find(separator, begin)) {
    out.push_back(text.substr(begin, end - begin));
    begin = end + separator.size();
  }
  out.push_back(text.substr(begin));
  return out;
}

Numbers numbers(const std::string& text) {
  std::istringstream in(text);
  Numbers out;
  for (std::int64_t n = 0; in >> n;) {
    out.push_back(n);
  }
  return out;
}

/// "[A, B]" as a list; a comma inside parentheses separates nothing.
Placements placements(const std::string& text) {
  Placements out;
  std::string item;
  int depth = 0;
  for (const char c : text.substr(1)) {
    depth += c == '(' ? 1 : c == ')' ? -1 : 0;
    if (depth == 0 && (c == ',' || c == ']')) {
      out.push_back(parse_placement(item));
      item.clear();
    } else {
      item += c;
    }
  }
  return out;
}

TEST(ShardingDoc, LayoutsAreWhatItSays) {
  const auto lines = examples("layout");
  ASSERT_GE(lines.size(), 9U);
  for (const auto& line : lines) {
    const auto part = split(line, "; ");
    const auto sizes = numbers(part.at(1));
    const auto layout = to_layout(numbers(part[0]), placements(part.at(2)), sizes);
    EXPECT_EQ(to_string(*layout), part.at(3));
    EXPECT_EQ(to_string(to_placements(*layout, sizes)), part[2]);
  }
}

TEST(ShardingDoc, CoordinatesOwnWhatItSays) {
  const auto lines = examples("indices");
  ASSERT_GE(lines.size(), 9U);
  for (const auto& line : lines) {
    const auto part = split(line, "; ");
    const auto owned = split(part.at(3), ":");
    const auto size = numbers(part[1]);
    const auto layout = to_layout(numbers(part[0]), placements(part[2]), size);
    EXPECT_EQ(global_indices(*layout, 0, size[0], numbers(owned.at(0))), numbers(owned.at(1)))
        << line;
  }
}

TEST(ShardingDoc, RefusesWhatItSays) {
  const auto lines = examples("refused");
  ASSERT_GE(lines.size(), 3U);
  for (const auto& line : lines) {
    const auto part = split(line, "; ");
    EXPECT_ERROR(to_layout(numbers(part[0]), placements(part[2]), numbers(part[1])),
                 "placements " + to_string(placements(part[2])))
        << line;
  }
}

TEST(ShardingDoc, PlansAreWhatItSays) {
  std::string text;
  for (const auto& line : examples("plan")) {
    text += line + "\n";
  }
  const auto blocks = split(text, "\n\n");
  ASSERT_GE(blocks.size(), 7U);
  for (const auto& block : blocks) {
    const auto head = block.substr(0, block.find('\n'));
    auto steps = block.substr(head.size() + 1);
    if (!steps.ends_with('\n')) {
      steps += '\n';
    }
    const auto part = split(head, "; ");
    const auto ends = split(part.at(2), " -> ");
    const auto mesh = numbers(part[0]);
    const auto sizes = numbers(part[1]);
    const auto plan = plan_redistribution(to_layout(mesh, placements(ends.at(0)), sizes),
                                          to_layout(mesh, placements(ends.at(1)), sizes), sizes, 4);
    EXPECT_EQ(to_string(plan), steps) << head;
  }
}

}  // namespace
}  // namespace tessera
