#include "examples/llama/generate/stop_strings.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace llama {
namespace {

/// What is shown at each piece, and at the end.
std::vector<std::string> Shown(StopStrings stops, const std::vector<std::string>& pieces) {
  std::vector<std::string> shown;
  for (const std::string& piece : pieces) {
    shown.push_back(stops.push(piece));
  }
  shown.push_back(stops.finish());
  return shown;
}

using Pieces = std::vector<std::string>;

TEST(StopStrings, EndATextBeforeTheFirstOne) {
  EXPECT_EQ(Shown(StopStrings({"END", "."}), {"one. two END"}), (Pieces{"one", ""}));
  EXPECT_EQ(Shown(StopStrings({".", "END"}), {"two END one."}), (Pieces{"two ", ""}));
}

TEST(StopStrings, ShowNoPartOfOne) {
  EXPECT_EQ(Shown(StopStrings({"<end>"}), {"a<", "e", "nd", ">b", "c"}),
            (Pieces{"a", "", "", "", "", ""}));
}

TEST(StopStrings, ShowTextThatTurnsOutToBeNoStopString) {
  EXPECT_EQ(Shown(StopStrings({"<end>"}), {"a<e", "l", "se<en"}),
            (Pieces{"a", "<el", "se", "<en"}));
}

TEST(StopStrings, MayBeginAgainWithinAPartialMatch) {
  EXPECT_EQ(Shown(StopStrings({"aab"}), {"a", "a", "a", "b"}), (Pieces{"", "", "a", "", ""}));
}

TEST(StopStrings, HoldBackTheLongestPartialMatch) {
  EXPECT_EQ(Shown(StopStrings({"bx", "abcd"}), {"zab", "c", "e"}), (Pieces{"z", "", "abce", ""}));
}

TEST(StopStrings, PassAllWithoutAny) {
  EXPECT_EQ(Shown(StopStrings({}), {"a", "b"}), (Pieces{"a", "b", ""}));
}

}  // namespace
}  // namespace llama
