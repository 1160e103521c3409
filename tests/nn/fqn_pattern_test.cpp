#include "tessera/nn/fqn_pattern.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "testing/errors.h"

namespace tessera::nn {
namespace {

/// Names that a pattern matches, and names that it does not.
struct Row {
  const char* pattern;
  std::vector<const char*> matched, others;
};

TEST(FqnPattern, MatchesNames) {
  const std::vector<Row> rows{
      {"a.b.weight", {"a.b.weight"}, {"a.b"}},
      {"a.b", {}, {"a.b.weight"}},
      {"", {""}, {"a"}},
      // A star stays inside a component, and may be anywhere in it or stand for nothing.
      {"*", {"a"}, {"", "a.b"}},
      {"layers.*.w", {"layers.10.w"}, {"layers.0.1.w"}},
      {"layers.*", {}, {"layers.0.w"}},
      {"l.*_proj.w", {"l.q_proj.w"}, {"l.q_norm.w"}},
      {"l.*_*.w", {"l.up_proj_x.w"}, {}},
      {"a*a.b", {"aaa.b"}, {}},
      {"a*.c", {}, {"ab.d"}},
      {"a*.b*", {"a.b"}, {}},
      // A question mark is one character.
      {"layers.?.w", {"layers.3.w"}, {"layers.10.w"}},
      {"a?b", {}, {"a.b"}},
      // Brackets are one of their characters, or of the others.
      {"block*.mixer.[qkv]", {"block0.mixer.k"}, {"block0.mixer.o"}},
      {"layers.[0-3].w", {"layers.2.w"}, {"layers.4.w", "layers.22.w"}},
      {"[a-cx-z]", {"y"}, {}},
      {"[a-]", {"-"}, {}},
      {"layers.[!0-3]", {"layers.4"}, {"layers.3", "layers."}},
      {"layers.[^0-3]", {"layers.4"}, {"layers.3", "layers."}},
      {"a[!x]b", {}, {"a.b"}},
      {"a[b", {"a[b"}, {"ab"}},  // not closed
      {"[]]", {"]"}, {}},
      {"[!]]", {"x"}, {}},
      // Two stars are any number of components; within a component they are one star.
      {"layers.**.w", {"layers.0.mlp.up.w", "layers.w"}, {"layers.0.mlp.b"}},
      {"**.w", {"w"}, {}},
      {"**.mlp.**", {"layers.0.mlp"}, {}},
      {"a.**.b.**.c", {"a.b.b.x.c"}, {"a.x.c"}},
      {"**", {"", "a.b"}, {}},
      {"a**c", {"abc"}, {"a.c"}},
      // An empty component matches no module.
      {"layers.", {}, {"layers"}},
      {".layers", {}, {"layers"}}};
  for (const Row& row : rows) {
    for (const char* name : row.matched) {
      EXPECT_TRUE(matches_fqn(row.pattern, name)) << row.pattern << " " << name;
    }
    for (const char* name : row.others) {
      EXPECT_FALSE(matches_fqn(row.pattern, name)) << row.pattern << " " << name;
    }
  }
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
