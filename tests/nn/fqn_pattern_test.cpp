#include "tessera/nn/fqn_pattern.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace tessera::nn
