#include "tessera/nn/fqn_pattern.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace tessera::nn {
namespace {

TEST(FqnPattern, MatchesItself) {
  EXPECT_TRUE(matches_fqn("a.b.weight", "a.b.weight"));
  EXPECT_TRUE(matches_fqn("", ""));
  EXPECT_FALSE(matches_fqn("a.b", "a.b.weight"));
  EXPECT_FALSE(matches_fqn("a.b.weight", "a.b"));
  EXPECT_FALSE(matches_fqn("", "a"));
}

TEST(FqnPattern, StarStaysInsideAComponent) {
  EXPECT_FALSE(matches_fqn("*", ""));
  EXPECT_TRUE(matches_fqn("layers.*.w", "layers.10.w"));
  EXPECT_TRUE(matches_fqn("*", "a"));
  EXPECT_FALSE(matches_fqn("*", "a.b"));
  EXPECT_FALSE(matches_fqn("layers.*", "layers.0.w"));
  EXPECT_FALSE(matches_fqn("layers.*.w", "layers.0.1.w"));
}

TEST(FqnPattern, StarMayStandInTheMiddle) {
  EXPECT_TRUE(matches_fqn("l.*_proj.w", "l.q_proj.w"));
  EXPECT_TRUE(matches_fqn("l.*_*.w", "l.up_proj_x.w"));
  EXPECT_TRUE(matches_fqn("a*a.b", "aaa.b"));
  EXPECT_FALSE(matches_fqn("l.*_proj.w", "l.q_norm.w"));
  EXPECT_FALSE(matches_fqn("a*.c", "ab.d"));
}

TEST(FqnPattern, StarMayStandForNothing) {
  EXPECT_TRUE(matches_fqn("a*.b*", "a.b"));
}

TEST(FqnPattern, QuestionMarkIsOneCharacter) {
  EXPECT_TRUE(matches_fqn("layers.?.w", "layers.3.w"));
  EXPECT_FALSE(matches_fqn("layers.?.w", "layers.10.w"));
  EXPECT_FALSE(matches_fqn("a?b", "a.b"));
}

TEST(FqnPattern, BracketsAreOneOfTheirCharacters) {
  EXPECT_TRUE(matches_fqn("block*.mixer.[qkv]", "block0.mixer.k"));
  EXPECT_FALSE(matches_fqn("block*.mixer.[qkv]", "block0.mixer.o"));
  EXPECT_TRUE(matches_fqn("layers.[0-3].w", "layers.2.w"));
  EXPECT_FALSE(matches_fqn("layers.[0-3].w", "layers.4.w"));
  EXPECT_FALSE(matches_fqn("layers.[0-3].w", "layers.22.w"));
  EXPECT_TRUE(matches_fqn("[a-cx-z]", "y"));
  EXPECT_TRUE(matches_fqn("[a-]", "-"));
}

TEST(FqnPattern, NegatedBracketsAreOneOfTheOtherCharacters) {
  for (const char* pattern : {"layers.[!0-3]", "layers.[^0-3]"}) {
    EXPECT_TRUE(matches_fqn(pattern, "layers.4")) << pattern;
    EXPECT_FALSE(matches_fqn(pattern, "layers.3")) << pattern;
    EXPECT_FALSE(matches_fqn(pattern, "layers.")) << pattern;
  }
  EXPECT_FALSE(matches_fqn("a[!x]b", "a.b"));
}

TEST(FqnPattern, BracketsThatAreNotClosedStandForThemselves) {
  EXPECT_TRUE(matches_fqn("a[b", "a[b"));
  EXPECT_FALSE(matches_fqn("a[b", "ab"));
  EXPECT_TRUE(matches_fqn("[]]", "]"));
  EXPECT_TRUE(matches_fqn("[!]]", "x"));
}

TEST(FqnPattern, TwoStarsAreAnyNumberOfSegments) {
  EXPECT_TRUE(matches_fqn("layers.**.w", "layers.0.mlp.up.w"));
  EXPECT_TRUE(matches_fqn("layers.**.w", "layers.w"));
  EXPECT_TRUE(matches_fqn("**.w", "w"));
  EXPECT_TRUE(matches_fqn("**.mlp.**", "layers.0.mlp"));
  EXPECT_TRUE(matches_fqn("a.**.b.**.c", "a.b.b.x.c"));
  EXPECT_FALSE(matches_fqn("layers.**.w", "layers.0.mlp.b"));
  EXPECT_FALSE(matches_fqn("a.**.b.**.c", "a.x.c"));
  EXPECT_TRUE(matches_fqn("**", ""));
  EXPECT_TRUE(matches_fqn("**", "a.b"));
}

TEST(FqnPattern, TwoStarsWithinASegmentAreOne) {
  EXPECT_TRUE(matches_fqn("a**c", "abc"));
  EXPECT_FALSE(matches_fqn("a**c", "a.c"));
}

TEST(FqnPattern, AnEmptySegmentMatchesNoModule) {
  EXPECT_FALSE(matches_fqn("layers.", "layers"));
  EXPECT_FALSE(matches_fqn(".layers", "layers"));
}

// Backtracking over every star would take longer than the age of the universe.
TEST(FqnPattern, ManyStarsTakeNoTime) {
  std::string stars, name, levels, path;
  for (int i = 0; i < 40; ++i) {
    stars += "*a";
    name += "aaa";
    levels += "**.a.";
    path += "a.a.a.";
  }
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(matches_fqn(stars + "b", name));
  EXPECT_FALSE(matches_fqn(levels + "b", path + "a"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

}  // namespace
}  // namespace tessera::nn
