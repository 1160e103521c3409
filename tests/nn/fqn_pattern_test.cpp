#include "tessera/nn/fqn_pattern.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "testing/errors.h"

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

TEST(FqnPattern, RenamesByWhatWildcardsStandFor) {
  const auto renamed = [](const char* from, const char* to, const char* fqn) {
    return renamed_fqn(from, to, fqn).value_or("none");
  };
  EXPECT_EQ(renamed("blocks.*.norm[12].*", "layers.*.ln_[12].*", "blocks.10.norm2.bias"),
            "layers.10.ln_2.bias");
  EXPECT_EQ(renamed("model.**", "**", "model.a.b.weight"), "a.b.weight");
  EXPECT_EQ(renamed("**.gamma", "**.weight", "gamma"), "weight");
  EXPECT_EQ(renamed("**.gamma", "**.weight", "a.b.gamma"), "a.b.weight");
  EXPECT_EQ(renamed("a.**.w.**", "b.**.v.**", "a.w.x.w.y"), "b.v.x.w.y");
  EXPECT_EQ(renamed("l*_*.?", "m*-*.?", "l1_2_3.x"), "m1-2_3.x");
  EXPECT_EQ(renamed("a.*.w", "b.*.w", "a.w"), "none");
  EXPECT_EQ(renamed("head.*", "", "head.bias"), "");
  EXPECT_EQ(renamed("plain", "other", "plain"), "other");
}

TEST(FqnPattern, RefusesToRenameToOtherWildcards) {
  EXPECT_ERROR(renamed_fqn("a.*", "b.**", "x"), "'a.*'", "'b.**'", "wildcards are not those");
  EXPECT_ERROR(renamed_fqn("a", "b.*", "x"), "wildcards are not those");
  EXPECT_ERROR(renamed_fqn("a.[12].*", "b.*", "x"), "wildcards are not those");
}

}  // namespace
}  // namespace tessera::nn
